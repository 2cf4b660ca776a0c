"""Cases of Elemental's routines for ranks_stated.py.

Interior point methods factor a system of all rows and columns in each step, so the matrices of
optimisation problems are small: E (m x n), F, J, K (vectors), H and O.
"""

from __future__ import annotations

import numpy as np

from tests.ali.stated_errors import Array, Cases, factored, far, norm, off, unit
from tests.ali.stated_linalg import CASES as LINALG
from tests.ali.stated_linalg import OTHERS as SCALAPACK


def data(k: int) -> dict[str, Array]:
    """K are labels, N is nonnegative of rank 3, O of rank 2 with outliers."""
    rng = np.random.default_rng(8)
    m, n = k // 4, k // 8
    e = rng.standard_normal((m, n))
    few, fewer = np.zeros((n, 1)), np.zeros((m, 1))
    few[1::5], fewer[[1, 3]] = 2, [[1], [-2]]
    outliers = 10 * rng.standard_normal((2 * k, n)) * (rng.random((2 * k, n)) < 0.04)
    return {
        "E": e,
        "F": e @ few + 0.1 * rng.standard_normal((m, 1)),
        "H": e.T,
        "J": e.T @ fewer,
        "K": np.sign(e[:, :1] + 0.5 * e[:, 1:2]),
        "N": rng.random((10 * k, 3)) @ rng.random((3, n)),
        "O": rng.standard_normal((2 * k, 2)) @ rng.standard_normal((2, n)) + outliers,
    }


def chosen(a: Array, order: Array, z: Array) -> float:
    """What an interpolative decomposition leaves, over the first singular value left out."""
    p, r = order.ravel(), len(z)
    rest = a[:, p] - a[:, p[:r]] @ np.hstack([np.eye(r), z])
    return float(norm(rest, 2) / np.linalg.svd(a, compute_uv=False)[r])


def pulled(a: Array, b: Array, x: Array, lam1: float, lam2: float = 0.0) -> float:
    """How far the conditions of optimality of an elastic net are from holding, over lam1."""
    gradient = a.T @ (b - a @ x) - 2 * lam2 * x
    there = np.abs(x) > 1e-2
    excess = np.maximum(np.abs(gradient) - lam1, 0)
    return float(max(excess.max(), np.abs(gradient - lam1 * np.sign(x))[there].max()) / lam1)


def gap(value: float, best: float) -> float:
    """The relative distance of an objective from its least value."""
    return abs(value / best - 1)


def least_sum(a: Array, b: Array) -> float:
    """The least ``|A x - b|_1``, from SciPy."""
    from scipy.optimize import linprog  # noqa: PLC0415  (slow to import)

    m, n = a.shape
    eye = np.eye(m)
    found = linprog(
        np.r_[np.zeros(2 * n), np.ones(2 * m)],
        A_eq=np.hstack([a, -a, -eye, eye]), b_eq=b.ravel(),
    )  # fmt: skip
    return float(found.fun)


def least_margin(a: Array, d: Array) -> float:
    """The least objective of a support vector machine with lam = 1, from scikit-learn."""
    from sklearn.svm import SVC  # noqa: PLC0415  (slow to import)

    model = SVC(C=1.0, kernel="linear", tol=1e-10).fit(a, d.ravel())
    return objective(a, d, model.coef_.T, float(model.intercept_[0]))


def objective(a: Array, d: Array, w: Array, bias: float) -> float:
    return float(0.5 * norm(w) ** 2 + np.maximum(0, 1 - d * (a @ w + bias)).sum())


def nonnegative(a: Array, b: Array, x: Array) -> float:
    """The conditions of optimality of nonnegative least squares, over ``|A|^2 |X|``."""
    gradient = a.T @ (a @ x - b)
    wrong = [np.minimum(x, 0) * norm(a, 2) ** 2, np.minimum(gradient, 0), gradient * (x > 1e-3)]
    return float(max(norm(w) for w in wrong) / (norm(a, 2) ** 2 * norm(x)))


def planted(h: Array, j: Array, x: Array) -> float:
    """How far x is from the sparse solution of ``H x = J``."""
    exact = np.zeros((h.shape[1], 1))
    exact[[1, 3]] = [[1], [-2]]
    assert norm(h @ exact - j) < 1e-5 * norm(j)
    return far(x, exact)


CASES: Cases = {
    name: SCALAPACK[name] for name in ("cholesky", "lu", "qr", "lstsq", "matmul", "solve")
}
CASES |= {name: LINALG[name] for name in ("norm", "pinv", "ridge")}
CASES |= {
    "basis_pursuit": [({"A": "H", "b": "J"}, planted)],
    "cond": [
        ({"A": "S", "ord": ord}, lambda s, c, p=p: gap(c, np.linalg.cond(s, p)))
        for ord, p in (("2", 2), ("1", 1))
    ],
    "eigh": [({"A": "P"}, lambda p, w, v: max(off(p, (v * w.ravel()) @ v.T), unit(v)))],
    "elastic_net": [
        (
            {"A": "E", "b": "F", "lam1": 2.0, "lam2": 0.5},
            lambda e, f, x: pulled(e, f, x, 2.0, 0.5),
        )
    ],
    "interpolative": [({"A": "T", "rank": 8}, chosen)],
    "lasso": [({"A": "E", "b": "F", "lam": 2.0}, lambda e, f, x: pulled(e, f, x, 2.0))],
    "least_absolute": [
        (
            {"A": "E", "b": "F"},
            lambda e, f, x: gap(float(np.abs(e @ x - f).sum()), least_sum(e, f)),
        )
    ],
    "nmf": [({"A": "N", "rank": 3}, lambda a, x, y: off(a, x @ y.T))],
    "nnls": [({"A": "E", "B": "F"}, nonnegative)],
    "polar": [({"A": "Q"}, lambda a, q, p: max(off(a, q @ p), unit(q)))],
    "qr_pivoted": [
        ({"A": name}, lambda a, q, r, p: max(off(a[:, p.ravel()], q @ r), unit(q))) for name in "TQ"
    ],
    "rpca": [({"A": "O", "tol": 1e-4}, lambda a, low, rare: off(a, low + rare))],
    "singular_values": LINALG["svdvals"],
    "svd": [({"A": name}, lambda a, s, u, v: factored(a, s.ravel(), u, v)) for name in "TQ"],
    "svdvals": LINALG["svdvals"],
    "svm": [
        (
            {"A": "E", "d": "K", "lam": 1.0},
            lambda e, k, w, bias: gap(objective(e, k, w, bias), least_margin(e, k)),
        )
    ],
}
