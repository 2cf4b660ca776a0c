"""Results of linalg beside those of scikit-learn, SciPy and statsmodels, for difficult data.

Tolerances are those of the docstrings: rounding errors times the size of the result, and times the
condition of the problem where it has one. (MLlib is compared in
tests/alchemist_ray/clients/spark/test_mllib.py.)
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
import scipy.linalg
from sklearn.cluster import KMeans
from sklearn.decomposition import PCA, TruncatedSVD
from sklearn.linear_model import Ridge
from sklearn.preprocessing import StandardScaler
from statsmodels.regression.linear_model import OLS

from tests.ali import peer_data
from tests.support import launches
from tests.support.suite import scaled

pytestmark = pytest.mark.parametrize("ranks", scaled([1, 3], [1, 2, 3, 4, 6]))
Array = np.ndarray[Any, Any]


@functools.cache
def results(ranks: int) -> dict[str, Any]:
    return launches.run("tests.ali.ranks_peers:everything", ranks, timeout=100)


def close(found: Any, expected: Any, dtype: Any, what: str, condition: float = 1.0) -> None:
    """Equal within 100 roundings of the largest number, times a condition number."""
    found, expected = np.asarray(found, "float64"), np.asarray(expected, "float64")
    assert found.shape == expected.shape, what
    kind = np.dtype(dtype)
    eps = float(np.finfo(kind if kind.kind == "f" else "float64").eps)
    limit = 100 * eps * condition * float(np.abs(expected).max(initial=0))
    assert float(np.abs(found - expected).max(initial=0)) <= limit, (what, found, expected)


def names(*kinds: str) -> list[str]:
    return [name for name in peer_data.matrices() if not kinds or name in kinds]


def condition(a: Array) -> float:
    """Of a, without the singular values that count as zero."""
    s = np.linalg.svd(a.astype("float64"), compute_uv=False)
    eps = float(np.finfo(a.dtype if a.dtype.kind == "f" else "float64").eps)
    kept = s[s > s[0] * max(a.shape) * eps]
    return float(kept[0] / kept[-1])


@pytest.mark.parametrize("scale", [False, True])
def test_components_are_those_of_scikit_learn(ranks: int, scale: bool) -> None:
    compared = 0
    for name, a in peer_data.matrices().items():
        if len(a) < 3 or (not scale and name in ("1e-30", "1e+30", "int64")):
            continue  # squares of int64 lose digits in scikit-learn, which does not scale them
        wide = a.astype("float64")
        # Far from the origin the mean is rounded; so are the centred elements.
        slack = 1 + float(np.abs(wide).max() / wide.std(axis=0).max())
        parts, variance, mean, scores, ratio, deviation = results(ranks)["components"][
            f"{name}/{scale}"
        ]
        scaler = StandardScaler(with_std=scale).fit(wide)
        x = scaler.transform(wide)
        if scale:
            x *= (1 - 1 / len(a)) ** 0.5  # scikit-learn divides by m, linalg by m - 1
            unit = np.where(scaler.scale_ == 1.0, 1.0, scaler.scale_ / (1 - 1 / len(a)) ** 0.5)
            close(deviation, unit, a.dtype, name, slack)
        peer = PCA(min(2, a.shape[1]), svd_solver="full").fit(x)
        vectors = peer.components_
        vectors = vectors * np.sign(
            vectors[range(len(vectors)), np.abs(vectors).argmax(axis=1)]
        ).reshape(-1, 1)
        close(mean, scaler.mean_, a.dtype, name, 10)
        close(variance, peer.explained_variance_, a.dtype, name, 10 * slack)
        close(ratio, peer.explained_variance_ratio_, a.dtype, name, 10 * slack)
        close(parts, vectors, a.dtype, name, 100 * slack)
        close(scores, x @ vectors.T, a.dtype, name, 100 * slack)
        compared += 1
    assert compared >= (15 if scale else 12)


def test_regressions_are_those_of_scipy_statsmodels_and_scikit_learn(ranks: int) -> None:
    ridges = 0
    for name, a in peer_data.matrices().items():
        wide, b = a.astype("float64"), peer_data.right_sides(a).astype("float64")
        eps = float(np.finfo(a.dtype if a.dtype.kind == "f" else "float64").eps)
        found, *ridge = results(ranks)["regressions"][name]
        x, _, _, _ = scipy.linalg.lstsq(wide, b, cond=max(a.shape) * eps)
        close(found, x, a.dtype, name, condition(a))
        if a.dtype != "float32" and np.linalg.matrix_rank(wide) == a.shape[1]:
            for j in range(2):  # statsmodels warns where columns depend on each other
                params = OLS(b[:, j], wide).fit(method="pinv").params
                close(np.array(found)[:, j], params, a.dtype, name, condition(a) * 10)
        if ridge:
            lam = peer_data.LAMBDA * float(np.linalg.norm(wide)) ** 2
            peer = Ridge(lam, fit_intercept=False, solver="svd").fit(wide, b)
            close(ridge[0], peer.coef_.T, a.dtype, name, 10)
            ridges += 1
    assert ridges >= 10


def test_spectra_are_those_of_scipy_and_scikit_learn(ranks: int) -> None:
    for name, a in peer_data.matrices().items():
        wide = a.astype("float64")
        eps = float(np.finfo(a.dtype if a.dtype.kind == "f" else "float64").eps)
        s, product, every, rank, inverse, norm = results(ranks)["spectra"][name]
        u, exact, vh = scipy.linalg.svd(wide, full_matrices=False)
        k = len(s)
        close(s, exact[:k], a.dtype, name)
        close(every, exact, a.dtype, name)
        gap = 1 if k == len(exact) else float(exact[0] / (exact[k - 1] - exact[k]))
        close(product, (u[:, :k] * exact[:k]) @ vh[:k], a.dtype, name, gap)
        assert rank == np.linalg.matrix_rank(wide, tol=exact[0] * max(a.shape) * eps), name
        peer = scipy.linalg.pinv(wide, rtol=max(a.shape) * eps)
        close(inverse, peer, a.dtype, name, condition(a))
        close(norm, scipy.linalg.norm(wide), "float64", name)
        if k == 2 and min(a.shape) > 2 and name not in ("1e-30", "1e+30"):
            model = TruncatedSVD(2, algorithm="arpack", random_state=0).fit(wide)
            close(s, model.singular_values_, a.dtype, name, 10)


def test_systems_are_those_of_scipy(ranks: int) -> None:
    for name, a in peer_data.matrices().items():
        p = peer_data.definite(a)
        b, worst = p[:, :1] * 3 + 1, float(np.linalg.cond(p))
        lu, positive, search, lower, inverse, w, again, log, cond = results(ranks)["systems"][name]
        x = scipy.linalg.solve(p, b)
        close(lu, x, "float64", name, worst)
        close(positive, x, "float64", name, worst)
        close(search, x, "float64", name, worst * 1e-10 / 2e-14)
        close(lower, scipy.linalg.cholesky(p, lower=True), "float64", name, worst)
        close(inverse, scipy.linalg.inv(p), "float64", name, worst)
        close(w, scipy.linalg.eigvalsh(p), "float64", name)
        close(again, p, "float64", name)
        close(log, np.linalg.slogdet(p)[1], "float64", name, worst)
        assert np.linalg.cond(p, 1) / 3 <= cond <= np.linalg.cond(p, 1) * (1 + 1e-9), name


def test_clusters_are_a_fixed_point_of_scikit_learns(ranks: int) -> None:
    """From our centers its iterations end at once, with our labels and inertia."""
    for name, a in peer_data.blobs().items():
        centers, labels, inertia = results(ranks)["clusters"][name]
        unit = float(name) if name in ("1e-30", "1e+30") else 1.0  # its squares would underflow
        wide = a.astype("float64") / unit
        start = np.array(centers) / unit
        peer = KMeans(4, init=start, n_init=1, tol=0.0, algorithm="lloyd").fit(wide)
        assert peer.labels_.tolist() == labels, name
        slack = 1 + float(np.abs(wide).max())
        close(start, peer.cluster_centers_, a.dtype, name, 10)
        close(inertia / unit**2, peer.inertia_, a.dtype, name, 10 * slack)


def test_nan_and_inf_are_refused_as_by_scikit_learn(ranks: int) -> None:
    for a in peer_data.spoiled().values():
        with pytest.raises(ValueError, match=r"NaN|infinity"):
            PCA(2).fit(a)
    found = results(ranks)["refusals"]
    assert len(found) == 18
    for name, said in found.items():
        assert len(said) == ranks
        assert len(set(said)) == 1, name
        assert said[0].startswith("LinAlgError: "), said[0]
        assert "NaN or inf" in said[0], said[0]


@pytest.mark.parametrize("kind", ["components", "regressions", "spectra", "systems", "clusters"])
def test_results_do_not_depend_on_the_number_of_ranks(ranks: int, kind: str) -> None:
    found, alone = results(ranks)[kind], results(1)[kind]
    assert found.keys() == alone.keys()
    for name, values in alone.items():
        for one, other in zip(values, found[name], strict=True):
            worst = 1e6 if kind in ("regressions", "spectra", "systems") or "far" in name else 1e3
            dtype = "float32" if "float32" in name else "float64"
            close(other, one, dtype, f"{kind} {name}", worst)
