"""Cases of the routines of linalg and ScaLAPACK for ranks_stated.py.

A case is the arguments of a routine, as names of `ranks_stated.data` and plain values, and a
function that computes the error from the arguments and the results in float64.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import scipy.linalg

from ali.linalg import creation, kernel_regression
from tests.ali.stated_errors import Array, Cases, factored, far, lost, norm, off, slope, unit


def means(t: Array, centers: Array, labels: Array, *_: Any) -> float:
    return far(centers, [t[labels.ravel() == i].mean(axis=0) for i in range(len(centers))])


def stats(t: Array, *found: Array) -> float:
    exact = (t.mean(axis=0), t.std(axis=0), t.min(axis=0), t.max(axis=0))
    return max(far(one, other) for one, other in zip(found, exact, strict=True))


def parts(t: Array, components: Array, variance: Array, *_: Array) -> float:
    x = t - t.mean(axis=0)
    exact = np.linalg.svd(x, compute_uv=False)[: len(variance)] ** 2 / (len(t) - 1)
    return max(far(variance, exact), off(np.eye(len(variance)), components @ components.T))


def ways(a: Array, x: Array, residuals: Array, rank: int, s: Array, b: Array) -> float:
    exact = np.linalg.lstsq(a, b, rcond=None)
    assert rank == exact[2]
    return max(slope(x, a, b), far(residuals, exact[1]), far(s, exact[3]))


def features(x: Array) -> Array:
    """20 of width 4, computed in float64."""
    frequencies = creation.normal_rows(range(20), x.shape[1], 0, kernel_regression.PURPOSE) / 4
    streams = creation.RowStreams(0, kernel_regression.PURPOSE + 1)
    phases = [2 * np.pi * streams.at(row).random() for row in range(20)]
    return np.asarray(np.cos(x @ frequencies.T + phases) / 10**0.5)


def uniform(a: Array) -> Array:
    streams = creation.RowStreams(5, creation.UNIFORM)
    return np.array([streams.at(row).random(a.shape[1]) for row in range(len(a))])


CASES: Cases = {
    "add": [({"A": "T", "B": "U", "alpha": 2.0}, lambda t, u, c: far(c, 2 * t + u))],
    "apply": [({"op": "exp", "A": "T"}, lambda t, c: far(c, np.exp(t)))],
    "astype": [({"A": "T", "dtype": "complex128"}, lambda t, c: far(c, t))],
    "cholesky": [({"A": "P"}, lambda p, c: off(p, c @ c.T))],
    "column_stats": [({"A": "T"}, stats)],
    "concatenate": [({"A": "T", "B": "U"}, lambda t, u, c: far(c, np.concatenate([t, u])))],
    "condest": [({"A": "Q"}, lambda q, c: max(1.0, np.linalg.cond(q, 1) / c))],
    "conjugate_gradient": [
        ({"A": "P", "B": "B"}, lambda p, b, x, *_: float((norm(p @ x - b, axis=0) / norm(b)).max()))
    ],
    "det": [({"A": "S"}, lambda s, d: abs(d / np.linalg.det(s) - 1))],
    "diag": [({"A": "V"}, lambda v, d: far(d, np.diag(v[:, 0])))],
    "diagonal": [({"A": "Q"}, lambda q, d: far(d, np.diag(q)))],
    "eigh": [
        ({"A": "P"}, lambda p, w, v: max(off(p, (v * w) @ v.T), norm(v.T @ v - np.eye(len(v)), 2)))
    ],
    "elementwise": [
        ({"op": "multiply", "A": "T", "B": "U"}, lambda t, u, c: far(c, t * u)),
    ],
    "elementwise_scalar": [
        ({"op": "multiply", "A": "T", "value": 3.0}, lambda t, c: far(c, 3 * t)),
    ],
    "expm": [({"A": "Q"}, lambda q, x: off(scipy.linalg.expm(q), x))],
    "eye": [({"m": "m", "k": 3}, lambda c: far(c, np.eye(len(c), k=3)))],
    "full": [({"m": "m", "n": "n", "value": 0.1}, lambda c: far(c, np.full(c.shape, 0.1)))],
    "gram": [({"A": "T"}, lambda t, g: far(g, t.T @ t))],
    "inv": [({"A": "Q"}, lambda q, x: lost(x, q, np.eye(len(q))))],
    "kmeans": [({"A": "T", "k": 4, "tol": 0.0}, means)],
    "least_squares": [({"A": "T", "B": "Y"}, lambda t, y, *found: ways(t, *found, y))],
    "lstsq": [
        ({"A": "T", "B": "Y"}, lambda t, y, x: slope(x, t, y)),
        ({"A": "Q", "B": "B"}, lambda q, b, x: lost(x, q, b)),
    ],
    "matmul": [
        ({"A": "Q", "B": "P"}, lambda q, p, c: off(q @ p, c)),
        ({"A": "T", "B": "U", "transpose_a": "T"}, lambda t, u, c: off(t.T @ u, c)),
    ],
    "matrix_rank": [({"A": "T"}, lambda t, r: float(r != min(t.shape)))],
    "max": [({"A": "T", "axis": 0}, lambda t, r: far(r, t.max(axis=0)))],
    "mean": [({"A": "T", "axis": 0}, lambda t, r: far(r, t.mean(axis=0)))],
    "min": [({"A": "T", "axis": 1}, lambda t, r: far(r, t.min(axis=1)))],
    "norm": [
        ({"A": "T"}, lambda t, r: abs(r / norm(t) - 1)),
        ({"A": "T", "ord": "2"}, lambda t, r: abs(r / norm(t, 2) - 1)),
    ],
    "pca": [({"A": "T", "k": 3, "scale": False}, parts)],
    "pinv": [({"A": "T"}, lambda t, x: off(np.linalg.pinv(t), x))],
    "polar": [
        ({"A": name}, lambda a, q, p: max(off(a, q @ p), unit(q))) for name in "TQ"
    ],
    "qr": [
        (
            {"A": name},
            lambda a, q, r: max(off(a, q @ r), norm(q.T @ q - np.eye(q.shape[1]), 2)),
        )
        for name in "TQ"
    ],
    "random_features": [
        ({"X": "T", "features": 20, "sigma": 4.0}, lambda t, z: far(z, features(t)))
    ],
    "random_features_predict": [
        ({"X": "T", "W": "W", "sigma": 4.0}, lambda t, w, y: far(y, features(t) @ w))
    ],
    "random_features_ridge": [
        (
            {"X": "T", "Y": "Y", "features": 20, "sigma": 4.0, "lam": 0.1},
            lambda t, y, w, count, residual: residual,
        )
    ],
    "random_normal": [
        (
            {"m": "m", "n": "n", "seed": 5},
            lambda a: far(a, creation.normal_rows(range(len(a)), a.shape[1], 5, 0)),
        )
    ],
    "random_uniform": [({"m": "m", "n": "n", "seed": 5}, lambda a: far(a, uniform(a)))],
    "ridge": [({"A": "T", "B": "Y", "lam": 2.0}, lambda t, y, x: slope(x, t, y, 2.0))],
    "scale": [({"A": "T", "alpha": 3.0}, lambda t, c: far(c, 3 * t))],
    "select_cols": [({"A": "T", "mask": "C"}, lambda t, c, b: far(b, t[:, c[0] != 0]))],
    "select_rows": [({"A": "T", "mask": "R"}, lambda t, r, b: far(b, t[r[:, 0] != 0]))],
    "slice": [({"A": "T", "row_start": 9, "row_step": 2}, lambda t, b: far(b, t[9::2]))],
    "slogdet": [({"A": "P"}, lambda p, sign, log: abs(log / np.linalg.slogdet(p)[1] - 1))],
    "solve": [
        ({"A": "Q", "B": "B"}, lambda q, b, x: lost(x, q, b)),
        ({"A": "P", "B": "B", "assume": "positive"}, lambda p, b, x: lost(x, p, b)),
    ],
    "solve_triangular": [({"A": "L", "B": "B"}, lambda a, b, x: lost(x, a, b))],
    "std": [({"A": "T", "axis": 0}, lambda t, r: far(r, t.std(axis=0)))],
    "sum": [({"A": "T", "axis": 0}, lambda t, r: norm(r - t.sum(axis=0)) / norm(abs(t).sum(0)))],
    "svd": [({"A": name}, factored) for name in "TQ"],
    "svdvals": [({"A": "T"}, lambda t, s: far(s, scipy.linalg.svdvals(t)))],
    "take_cols": [({"A": "T", "cols": [2, 0, 2]}, lambda t, b: far(b, t[:, [2, 0, 2]]))],
    "take_rows": [({"A": "T", "rows": [5, 0, 5]}, lambda t, b: far(b, t[[5, 0, 5]]))],
    "trace": [({"A": "Q"}, lambda q, r: abs(r - np.trace(q)) / abs(np.diag(q)).sum())],
    "transpose": [({"A": "T"}, lambda t, b: far(b, t.T))],
    "tril": [({"A": "Q", "k": 1}, lambda q, b: far(b, np.tril(q, 1)))],
    "triu": [({"A": "Q", "k": -1}, lambda q, b: far(b, np.triu(q, -1)))],
    "truncated_svd": [
        (
            {"A": "T", "rank": 3, "method": method},
            lambda t, s, u, v: far(s, scipy.linalg.svdvals(t)[:3]) if len(s) == 3 else 1.0,
        )
        for method in ("arpack", "gram")
    ],
    "var": [({"A": "T", "axis": 0}, lambda t, r: far(r, t.var(axis=0)))],
    "where": [
        ({"condition": "R", "A": "T", "B": "U"}, lambda r, t, u, c: far(c, np.where(r, t, u)))
    ],
    "zeros": [({"m": "m", "n": "n"}, lambda c: float(c.any()))],
}  # fmt: skip

# ScaLAPACK takes the same arguments; `lu` gives the order of the rows.
OTHERS: Cases = {
    "lq": [({"A": "Q"}, lambda a, low, q: max(off(a, low @ q), unit(q.T)))],
    "lu": [({"A": "Q"}, lambda a, low, up, order: off(a[order.ravel()], low @ up))],
    "norm": CASES["norm"][:1],
    "svdvals": [({"A": "Q"}, CASES["svdvals"][0][1])],
} | {
    name: [case for case in CASES[name] if case[0].get("assume") != "positive"]
    for name in ("cholesky", "condest", "eigh", "lstsq", "matmul", "qr", "solve", "svd")
}
