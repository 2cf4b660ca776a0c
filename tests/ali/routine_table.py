"""The table of routines: for each its arguments, and how far its results are from exact ones.

A case is the arguments of a routine, as names of matrices of `data` and plain values, and a
function that computes the error from the arguments and the results. The error is relative; it is
infinite if a result has not the form that it must have. These tests
follow from the rows:

- test_stated.py: error and peak memory are those that the docstring states
- test_routines.py: shapes, layouts, dtypes, matrices of zeros, of low rank and ill-conditioned
  ones, on 1 to 6 ranks, in linalg (also spread over ranks), ScaLAPACK (also in blocks), Elemental
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import scipy.linalg
import scipy.sparse

from ali.linalg import creation, learning

Array = np.ndarray[Any, Any]
Errors = Callable[..., float]
Cases = dict[str, list[tuple[dict[str, Any], Errors]]]
norm = np.linalg.norm


TINY = 1e-300


def far(found: Any, exact: Any) -> float:
    """The largest difference, relative to the largest number."""
    exact = 1.0 * np.asarray(exact)  # truth values have no difference
    found = np.asarray(found).reshape(exact.shape)
    size = max(TINY, float(np.abs(exact).max(initial=0)))
    return float(np.abs(found - exact).max(initial=0) / size)


def off(a: Array, b: Array) -> float:
    """``|A - B|`` over ``|A|``, in the Frobenius norm."""
    return float(norm(1.0 * a - b) / max(TINY, float(norm(1.0 * a))))


def holds(*conditions: Any) -> float:
    """0 if the conditions hold, else infinity."""
    return 0.0 if all(bool(np.all(one)) for one in conditions) else np.inf


def adjoint(a: Array) -> Array:
    return a.conj().T


def lost(x: Array, a: Array, b: Array) -> float:
    """The backward error of a solution of ``A X = B``."""
    return float(norm(a @ x - b) / (norm(a) * norm(x) + norm(b)))


def slope(x: Array, a: Array, b: Array, lam: float = 0.0) -> float:
    """The gradient of a least squares problem, relative to ``|A| (|A| |X| + |B|)``.

    With lam |A| counts with the square root of lam.
    """
    gradient = adjoint(a) @ (a @ x - b) + lam * x
    whole = norm(a, 2) + lam**0.5
    size = whole * (whole * norm(x) + norm(b))
    return float(norm(gradient) / size)


def shortest(x: Array, a: Array, b: Array) -> float:
    """`slope` of a solution that must be the shortest one."""
    exact = np.linalg.lstsq(a, b, rcond=None)[0]
    return slope(x, a, b) + holds(norm(x) <= 1.001 * norm(exact))


def unit(q: Array) -> float:
    """How far columns (rows, if there are fewer) are from orthonormal."""
    q = q if q.shape[0] >= q.shape[1] else adjoint(q)
    return float(norm(adjoint(q) @ q - np.eye(q.shape[1]), 2))


def triangular(a: Array, *, lower: bool = False) -> float:
    """Whether a matrix is triangular, with a real diagonal >= 0."""
    d = np.diagonal(a)
    zeros = np.triu(a, 1) if lower else np.tril(a, -1)
    return holds(zeros == 0, np.real(d) >= 0, np.imag(d) == 0)


def values_of(a: Array, s: Array) -> float:
    """Singular values, descending."""
    exact = np.linalg.svd(a, compute_uv=False)
    return far(s.ravel(), exact) + holds(np.diff(s.ravel()) <= 0)


def factored(a: Array, s: Array, u: Array, v: Array) -> float:
    """Backward error of an SVD, or the deviation of its vectors from orthonormal ones."""
    s = s.ravel()
    form = holds(np.diff(s) <= 0, s >= 0, len(s) == u.shape[1] == v.shape[1] == min(a.shape))
    return max(off(a, (u * s) @ adjoint(v)), unit(u), unit(v), values_of(a, s)) + form


def orthogonal(a: Array, q: Array, r: Array) -> float:
    """Backward error of a QR factorization."""
    return max(off(a, q @ r), unit(q)) + triangular(r) + holds(q.shape[1] == min(a.shape))


def eliminated(a: Array, low: Array, up: Array, order: Array) -> float:
    """Backward error of an LU factorization."""
    form = holds(
        np.triu(low, 1) == 0, np.tril(up, -1) == 0, np.diagonal(low) == 1, np.abs(low) < 1.5,
        np.sort(order.ravel()) == np.arange(len(a)),
    )  # fmt: skip
    return off(a[order.ravel()], low @ up) + form


def spectrum(h: Array, w: Array, v: Array) -> float:
    """Backward error of the eigenvectors of a matrix whose lower triangle counts."""
    h, w = np.tril(h) + adjoint(np.tril(h, -1)), w.ravel()
    return max(off(h, (v * w) @ adjoint(v)), unit(v)) + holds(np.diff(w) >= 0)


def nearest(a: Array, q: Array, p: Array) -> float:
    """Backward error of a polar decomposition."""
    least = -1e-4 * max(TINY, float(norm(a, 2)))
    s = np.linalg.svd(a, compute_uv=False)
    apart = unit(q) if s[-1] > 1e-5 * s[0] else 0.0  # of full rank
    return max(off(a, q @ p), apart, off(p, adjoint(p))) + holds(np.linalg.eigvalsh(p) >= least)


def means(t: Array, centers: Array, labels: Array, *_: Any) -> float:
    return far(centers, [t[labels.ravel() == i].mean(axis=0) for i in range(len(centers))])


def signed(a: Array, sign: complex, log: float) -> float:
    """The error of a determinant's sign or phase, and of its logarithm."""
    exact = np.linalg.slogdet(a)
    return max(abs(sign - exact[0]), abs(log - exact[1]) / max(1.0, abs(exact[1])))


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
    frequencies = creation.normal_rows(range(20), x.shape[1], 0, learning.PURPOSE) / 4
    streams = creation.RowStreams(0, learning.PURPOSE + 1)
    phases = [2 * np.pi * streams.at(row).random() for row in range(20)]
    return np.asarray(np.cos(x @ frequencies.T + phases) / 10**0.5)


def uniform(a: Array) -> Array:
    streams = creation.RowStreams(5, creation.UNIFORM)
    return np.array([streams.at(row).random(a.shape[1]) for row in range(len(a))])


def product(left: str, right: str) -> Errors:
    """The error of ``op(A) op(B)``."""
    ops: dict[str, Callable[[Array], Array]] = {
        "N": np.asarray,
        "T": np.transpose,
        "C": lambda a: a.T.conj() if a.dtype.kind == "c" else a.T,
    }
    return lambda a, b, c: off(ops[left](a) @ ops[right](b), c)


def products() -> list[tuple[dict[str, Any], Errors]]:
    """Plain, with one operand turned, and with both."""
    found: list[tuple[dict[str, Any], Errors]] = [({"A": "Q", "B": "P"}, product("N", "N"))]
    for a, b in ("TN", "CN", "NT", "NC", "TT", "TC", "CT", "CC"):
        given = {"A": "T", "B": "U" if "N" in (a, b) else "YH"}
        found.append((given | {"transpose_a": a, "transpose_b": b}, product(a, b)))
    return found


SMALL = ("S", "S1", "S2")  # the error of one number may be small by chance

LINALG: Cases = {
    "add": [({"A": "T", "B": "U", "alpha": 2.0}, lambda t, u, c: far(c, 2 * t + u))],
    "apply": [({"op": "exp", "A": "T"}, lambda t, c: far(c, np.exp(t)))],
    "astype": [({"A": "T", "dtype": "complex128"}, lambda t, c: far(c, t))],
    "cholesky": [({"A": "P"}, lambda p, c: off(p, c @ adjoint(c)) + triangular(c, lower=True))],
    "column_stats": [({"A": "T"}, stats)],
    "concatenate": [({"A": "T", "B": "U"}, lambda t, u, c: far(c, np.concatenate([t, u])))],
    "condest": [({"A": "Q"}, lambda q, c: max(1.0, np.linalg.cond(q, 1) / c))],
    "conjugate_gradient": [
        ({"A": "P", "B": "B"}, lambda p, b, x, *_: float((norm(p @ x - b, axis=0) / norm(b)).max()))
    ],
    "det": [({"A": name}, lambda s, d: abs(d / np.linalg.det(s) - 1)) for name in SMALL],
    "diag": [({"A": "V"}, lambda v, d: far(d, np.diag(v[:, 0])))],
    "diagonal": [({"A": "Q"}, lambda q, d: far(d, np.diag(q)))],
    "eigh": [({"A": name}, spectrum) for name in "PH"],
    "elementwise": [
        ({"op": "multiply", "A": "T", "B": "U"}, lambda t, u, c: far(c, t * u)),
    ],
    "elementwise_scalar": [
        ({"op": "multiply", "A": "T", "value": 3.0}, lambda t, c: far(c, 3 * t)),
    ],
    "expm": [({"A": "Q"}, lambda q, x: off(scipy.linalg.expm(q), x))],
    "eye": [({"m": "m", "k": 3}, lambda c: far(c, np.eye(len(c), k=3)))],
    "full": [({"m": "m", "n": "n", "value": 0.1}, lambda c: far(c, np.full(c.shape, 0.1)))],
    "gram": [({"A": "T"}, lambda t, g: far(g, adjoint(t) @ t) + off(g, adjoint(g)))],
    "inv": [({"A": "Q"}, lambda q, x: lost(x, q, np.eye(len(q))))],
    "kmeans": [({"A": "T", "k": 4, "tol": 0.0}, means)],
    "least_squares": [({"A": "T", "B": "Y"}, lambda t, y, *found: ways(t, *found, y))],
    "lstsq": [
        ({"A": "T", "B": "Y"}, lambda t, y, x: shortest(x, t, y)),
        ({"A": "Q", "B": "B"}, lambda q, b, x: lost(x, q, b)),
    ],
    "matmul": products(),
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
    "polar": [({"A": name}, nearest) for name in "TQ"],
    "qr": [({"A": name}, orthogonal) for name in "TQ"],
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
    "slogdet": [({"A": name}, signed) for name in "PQ"],
    "solve": [
        ({"A": "Q", "B": "B"}, lambda q, b, x: lost(x, q, b)),
        ({"A": "P", "B": "B", "assume": "positive"}, lambda p, b, x: lost(x, p, b)),
    ],
    "solve_triangular": [
        ({"A": "L", "B": "B"}, lambda a, b, x: lost(x, a, b)),
        ({"A": "LH", "B": "B", "lower": False}, lambda a, b, x: lost(x, a, b)),
        ({"A": "L", "B": "B", "adjoint": True}, lambda a, b, x: lost(x, adjoint(a), b)),
        (
            {"A": "LH", "B": "B", "lower": False, "adjoint": True},
            lambda a, b, x: lost(x, adjoint(a), b),
        ),
    ],
    "std": [({"A": "T", "axis": 0}, lambda t, r: far(r, t.std(axis=0)))],
    "sum": [({"A": "T", "axis": 0}, lambda t, r: norm(r - t.sum(axis=0)) / norm(abs(t).sum(0)))],
    "svd": [({"A": name}, factored) for name in "TQ"],
    "svdvals": [({"A": "T"}, values_of)],
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
SCALAPACK: Cases = {
    "lq": [({"A": "Q"}, lambda a, low, q: orthogonal(adjoint(a), adjoint(q), adjoint(low)))],
    "lu": [({"A": "Q"}, eliminated)],
    "norm": LINALG["norm"][:1],
    "svdvals": [({"A": "Q"}, values_of)],
} | {
    name: [case for case in LINALG[name] if case[0].get("assume") != "positive"]
    for name in ("cholesky", "condest", "eigh", "lstsq", "matmul", "qr", "solve", "svd")
}


def elemental_data(k: int) -> dict[str, Array]:
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
        "EH": e.T,
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


ELEMENTAL: Cases = {
    name: SCALAPACK[name] for name in ("cholesky", "lu", "qr", "lstsq", "matmul", "solve")
}
ELEMENTAL |= {name: LINALG[name] for name in ("norm", "pinv", "ridge")}
ELEMENTAL |= {
    "basis_pursuit": [({"A": "EH", "b": "J"}, planted)],
    "cond": [
        ({"A": "S", "ord": ord}, lambda s, c, p=p: gap(c, np.linalg.cond(s, p)))
        for ord, p in (("2", 2), ("1", 1))
    ],
    "eigh": LINALG["eigh"],
    "elastic_net": [
        ({"A": "E", "b": "F", "lam1": 2.0, "lam2": 0.5}, lambda e, f, x: pulled(e, f, x, 2.0, 0.5))
    ],
    "interpolative": [({"A": "T", "rank": 8}, chosen)],
    "lasso": [({"A": "E", "b": "F", "lam": 2.0}, lambda e, f, x: pulled(e, f, x, 2.0))],
    "least_absolute": [
        ({"A": "E", "b": "F"}, lambda e, f, x: gap(float(np.abs(e @ x - f).sum()), least_sum(e, f)))
    ],
    "nmf": [({"A": "N", "rank": 3}, lambda a, x, y: off(a, x @ y.T))],
    "nnls": [({"A": "E", "B": "F"}, nonnegative)],
    "polar": [({"A": "Q"}, nearest)],
    "qr_pivoted": [
        ({"A": name}, lambda a, q, r, p: orthogonal(a[:, p.ravel()], q, r)) for name in "TQ"
    ],
    "rpca": [({"A": "O", "tol": 1e-4}, lambda a, low, rare: off(a, low + rare))],
    "singular_values": LINALG["svdvals"],
    "svd": LINALG["svd"],
    "svdvals": LINALG["svdvals"],
    "svm": [
        (
            {"A": "E", "d": "K", "lam": 1.0},
            lambda e, k, w, bias: gap(objective(e, k, w, bias), least_margin(e, k)),
        )
    ],
}


def sparse_data(m: int, n: int) -> dict[str, Any]:
    """Tall matrices A1 and A2, a positive definite one of order m, S, and the dense G."""
    rng = np.random.default_rng(9)
    tall, other = (
        scipy.sparse.random_array((m, 3 * n), density=0.2, rng=rng, format="csr") for _ in "12"
    )
    steps = scipy.sparse.diags_array([-1.0, 2.5, -1.0], offsets=[-1, 0, 1], shape=(m, m))
    rows = rng.integers(-m, m, (m, 1))
    G = rng.standard_normal((3 * n, 3))
    return {"A1": tall, "A2": other, "S": steps.tocsr(), "G": G, "J": rows}


def residual(a: Any, b: Array, x: Array, *_: Any) -> float:
    """The largest relative residual of a column."""
    return float((norm(a @ x - b, axis=0) / norm(b, axis=0)).max())


def first_values(a: Any, s: Array, *_: Any) -> float:
    return far(s, np.linalg.svd(a.toarray(), compute_uv=False)[:3])


def apart(found: Any, exact: Any) -> float:
    """`far` of sparse matrices."""
    return float(abs(found - exact).max() / abs(exact).max())


SPARSE: Cases = {
    "astype": [({"A": "A1", "dtype": "float64"}, lambda a, b: apart(b, a))],
    "conjugate_gradient": [
        ({"A": "S", "B": "Y", "preconditioner": "none"}, residual),
        ({"A": "S", "B": "Y"}, residual),
    ],
    "diagonal": [({"A": "A1", "k": 1}, lambda a, d: far(d, a.diagonal(1)))],
    "elementwise": [
        ({"A": "A1", "B": "A2", "op": "add"}, lambda a, b, c: apart(c, a + b)),
        ({"A": "A1", "B": "A2", "op": "multiply"}, lambda a, b, c: apart(c, a * b)),
    ],
    "matmul": [({"A": "A1", "X": "G"}, lambda a, x, c: far(c, a @ x))],
    "multiply": [({"A": "S", "B": "A1"}, lambda a, b, c: apart(c, a @ b))],
    "norm": [({"A": "A1"}, lambda a, f: gap(f, float(norm(a.data))))],
    "scale": [({"A": "A1", "value": 3.0, "kind": "float"}, lambda a, b: apart(b, 3 * a))],
    "solve": [({"A": "S", "B": "Y"}, residual)],
    "sum": [
        ({"A": "A1", "axis": axis}, lambda a, s, axis=axis: far(s, a.sum(axis=axis)))
        for axis in (0, 1)
    ],
    "take_rows": [({"A": "A1", "rows": "J"}, lambda a, j, b: apart(b, a[j[:, 0]]))],
    "transpose": [({"A": "A1"}, lambda a, b: apart(b, a.T))],
    "transposed_matmul": [({"A": "A1", "X": "Y"}, lambda a, x, c: far(c, a.T @ x))],
    "truncated_svd": [({"A": "A1", "rank": 3}, first_values)],
}

LIBRARIES = {
    "linalg": LINALG, "scalapack": SCALAPACK, "elemental": ELEMENTAL, "sparse": SPARSE,
}  # fmt: skip
MATRICES = (
    "A", "B", "b", "d", "W", "X", "Y", "condition", "mask", "rows",
)  # fmt: skip


def random(rng: np.random.Generator, shape: tuple[int, int], dtype: str) -> Array:
    """Normal numbers; whole ones of an integer dtype."""
    if dtype == "bool":
        return rng.random(shape) < 0.5
    if dtype.startswith("int"):
        return rng.integers(-9, 10, shape).astype(dtype)
    found = rng.standard_normal(shape)
    if dtype.startswith("complex"):
        found = found + 1j * rng.standard_normal(shape)
    return found.astype(dtype)


def spoilt(a: Array, kind: str) -> Array:
    """A matrix of zeros, an identity, one of low rank, or with singular values down to rounding."""
    if kind == "zero":
        return np.zeros_like(a)
    if kind == "eye":
        return np.eye(*a.shape, dtype=a.dtype)
    if kind == "low":
        r = min(a.shape) // 3 + 1
        return np.asarray(a[:, :r] @ a[:r]).astype(a.dtype)
    if kind == "ill":
        u, _, vh = np.linalg.svd(a, full_matrices=False)
        steep = np.logspace(0, np.log10(np.finfo(a.dtype).eps), min(a.shape))
        return np.asarray((u * steep) @ vh).astype(a.dtype)
    return a


def data(
    library: str, m: int, n: int, k: int, size: int, dtype: str = "float64", kind: str = ""
) -> dict[str, Array]:
    """Matrices by name: T and U m x n, Q square, P positive definite, H Hermitian, ...

    `kind`: of T and Q, see `spoilt`.
    """
    rng = np.random.default_rng(7)
    if library == "sparse":
        return {key: rng.standard_normal((m, cols)) for key, cols in (("T", n), ("Y", 3))} | (
            sparse_data(m, n)
        )
    t, u, y, q, b = (random(rng, s, dtype) for s in ((m, n), (m, n), (m, 3), (k, k), (k, 3)))
    small = min(20, k)
    found = {
        "T": spoilt(t, kind),
        "U": u,
        "Y": y,
        "Q": spoilt(q, kind),
        "B": b,
        "P": q @ adjoint(q) + (k * np.eye(k)).astype(q.dtype),
        "H": np.tril(q + adjoint(q)) + 9 * np.triu(q, 1),
        "YH": adjoint(y),
        "L": np.tril(q) / (2 * k) + np.eye(k),
        "LH": adjoint(np.tril(q) / (2 * k) + np.eye(k)),
        **{
            name: q[at : at + small, at : at + small] / 20 + np.eye(small)
            for name, at in zip(SMALL, (0, k - small, (k - small) // 2), strict=True)
        },
        "V": random(rng, (k, 1), dtype),
        "W": rng.standard_normal((20, 3)),
        "R": (rng.random((m, 1)) < 0.5).astype("int32"),
        "C": (rng.random((1, n)) < 0.5).astype("int32"),
    }
    return found | (elemental_data(k) if library == "elemental" and k >= 80 else {})
