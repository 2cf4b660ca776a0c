"""A page of preprocessing and regression runs on handles with no change but their creation."""

from __future__ import annotations

from typing import Any

import numpy as np

from alchemist_ray import AlchemistSession, Handle


def page(X: Any, y: Any) -> dict[str, Any]:
    """Cleaning, scaling, splitting, three regressions and their scores, as one types them."""
    found: dict[str, Any] = {}

    # Missing values become the mean of their column, and outliers are clipped.
    missing = np.isnan(X)
    found["missing"] = missing.sum(axis=0)
    X = np.where(missing, np.nanmean(X, axis=0), X)
    low, high = np.percentile(X, [1, 99], axis=0)
    X = np.clip(X, low, high)

    # Constant columns go; the rest is standardized.
    X = X[:, X.std(axis=0) > 1e-12]
    X = (X - X.mean(axis=0)) / X.std(axis=0)
    found["shape"] = X.shape

    # A shuffled split.
    order = np.random.default_rng(0).permutation(X.shape[0])
    cut = int(0.8 * X.shape[0])
    train, test = order[:cut], order[cut:]
    Xt, yt, Xv, yv = X[train], y[train], X[test], y[test]

    # Least squares with an intercept.
    ones = np.ones_like(Xt[:, 0])
    beta, _, rank, _ = np.linalg.lstsq(np.column_stack([Xt, ones]), yt)
    found["beta"], found["rank"] = beta, rank
    residual = yv - (Xv @ beta[:-1] + beta[-1])
    found["r2"] = 1 - (residual**2).sum() / ((yv - yv.mean()) ** 2).sum()

    # Ridge by the normal equations.
    G = Xt.T @ Xt
    w = np.linalg.solve(G + 10 * np.eye(G.shape[0]), Xt.T @ (yt - yt.mean()))
    found["ridge"] = np.sqrt(np.mean((yv - yt.mean() - Xv @ w) ** 2))

    # Logistic regression by gradient descent.
    label = (yt > np.median(yt)).astype(np.float64)
    theta = np.zeros(Xt.shape[1])
    for _ in range(25):
        p = 1 / (1 + np.exp(-(Xt @ theta)))
        theta = theta - Xt.T @ (p - label) / len(label)
    found["theta"] = theta
    found["accuracy"] = ((Xv @ theta > 0) == (yv > np.median(yt))).mean()

    # What one looks at.
    found["strongest"] = np.argsort(-abs(beta[:-1]))[:3]
    found["correlation"] = np.corrcoef(X[:, 0], y)[0, 1]
    found["worst"] = int(np.argmax(abs(residual)))
    found["classes"], found["counts"] = np.unique(np.sign(residual), return_counts=True)
    found["histogram"] = np.histogram(residual, bins=5)[0]
    return found


def data() -> tuple[Any, Any]:
    random = np.random.default_rng(3)
    X = random.standard_normal((3000, 6)) * np.arange(1.0, 7) + 5
    y = X @ np.array([2.0, -1, 0, 0.5, 3, 0]) + random.standard_normal(3000)
    X[random.random(X.shape) < 0.01] = np.nan
    return np.column_stack([X, np.full(3000, 7.0)]), y


def test_a_page_of_regression(session: AlchemistSession) -> None:
    X, y = data()
    theirs = page(X, y)
    ours = page(session.send_matrix(X), session.send_matrix(y))
    assert isinstance(ours["beta"], Handle)
    for name, expected in theirs.items():
        np.testing.assert_allclose(np.asarray(ours[name]), expected, rtol=1e-8, err_msg=name)


def test_scikit_learn_takes_handles(session: AlchemistSession) -> None:
    from sklearn.cluster import KMeans  # noqa: PLC0415  (slow to import)
    from sklearn.linear_model import LogisticRegression, Ridge  # noqa: PLC0415
    from sklearn.preprocessing import StandardScaler  # noqa: PLC0415

    X, y = data()
    X = np.nan_to_num(X)
    A, b = session.send_matrix(X), session.send_matrix(y)
    for model, target, handle in [
        (Ridge(), y, b), (LogisticRegression(max_iter=2000), y > 5, b > 5),
        (KMeans(3, n_init=1, random_state=0), None, None),
    ]:  # fmt: skip
        theirs = type(model)(**model.get_params()).fit(X, target).predict(X[:50])
        np.testing.assert_allclose(model.fit(A, handle).predict(A[:50]), theirs)
    np.testing.assert_allclose(
        StandardScaler().fit(A).mean_, np.asarray(A.mean(axis=0)), rtol=1e-12
    )
