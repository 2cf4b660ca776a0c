"""Functions that test_linalg_stated.py runs on ranks: errors and peak memory of every routine.

A case is the arguments of a routine, as names of `data` and plain values, and a function that
computes the error from the arguments and the results in float64.
"""

from __future__ import annotations

import ctypes
import importlib
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.linalg
from mpi4py import MPI

from ali import blocks, registry
from ali.linalg import creation, elimination, kernel_regression, reductions, triangular
from mpi_workers.matrix.dist_matrix import DistMatrix
from mpi_workers.matrix.memory import Pool
from mpi_workers.matrix.storage import Storage
from mpi_workers.rank.gang import Gang
from tests.ali.ranks_linalg_checks import Array, Checks

Errors = Callable[..., float]
MATRICES = ("A", "B", "W", "X", "Y", "condition", "mask")
EPS = float(np.finfo("float32").eps)
MEMORY: dict[str, dict[str, Any]] = {"det": {"A": "Q"}, "random_features_ridge": {"tol": 1.0}}
PANEL = 1 << 20  # 1 MiB instead of 32: panels are stated apart
norm = np.linalg.norm


def data(m: int, n: int, k: int) -> dict[str, Array]:
    """Matrices by name: T and U tall, Q square, P positive definite, L triangular, ..."""
    rng = np.random.default_rng(7)
    q = rng.standard_normal((k, k))
    return {
        "T": rng.standard_normal((m, n)),
        "U": rng.standard_normal((m, n)),
        "Y": rng.standard_normal((m, 3)),
        "Q": q,
        "B": rng.standard_normal((k, 3)),
        "P": q @ q.T + k * np.eye(k),
        "L": np.tril(q) / k + np.eye(k),
        "S": q[:20, :20] / 20 + np.eye(20),
        "V": rng.standard_normal((k, 1)),
        "W": rng.standard_normal((20, 3)),
        "R": (rng.random((m, 1)) < 0.5).astype("int32"),
        "C": (rng.random((1, n)) < 0.5).astype("int32"),
    }


def far(found: Any, exact: Any) -> float:
    """The largest difference, relative to the largest number."""
    exact = np.asarray(exact)
    found = np.asarray(found).reshape(exact.shape)
    return float(np.abs(found - exact).max() / max(1e-300, np.abs(exact).max()))


def off(*products: Array) -> float:
    """``|A - B|`` over ``|A|``, in the Frobenius norm."""
    return float(norm(products[0] - products[1]) / norm(products[0]))


def lost(x: Array, a: Array, b: Array) -> float:
    """The backward error of a solution of ``A X = B``."""
    return float(norm(a @ x - b) / (norm(a) * norm(x) + norm(b)))


def slope(x: Array, a: Array, b: Array, lam: float = 0.0) -> float:
    """The gradient of a least squares problem, relative to ``|A| (|A| |X| + |B|)``."""
    gradient = a.T @ (a @ x - b) + lam * x
    return float(norm(gradient) / (norm(a, 2) * (norm(a, 2) * norm(x) + norm(b))))


def factored(a: Array, s: Array, u: Array, v: Array) -> float:
    """Backward error of an SVD, or the deviation of its vectors from orthonormal ones."""
    ones = [float(norm(x.T @ x - np.eye(x.shape[1]), 2)) for x in (u, v)]
    return max(off(a, (u * s) @ v.T), *ones)


def unit(q: Array) -> float:
    """How far columns are from orthonormal."""
    return float(norm(q.T @ q - np.eye(q.shape[1]), 2))


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


CASES: dict[str, list[tuple[dict[str, Any], Errors]]] = {
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
    "eye": [({"m": 0, "k": 3}, lambda c: far(c, np.eye(len(c), k=3)))],
    "full": [({"m": 0, "n": 0, "value": 0.1}, lambda c: far(c, np.full(c.shape, 0.1)))],
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
            {"m": 0, "n": 0, "seed": 5},
            lambda a: far(a, creation.normal_rows(range(len(a)), a.shape[1], 5, 0)),
        )
    ],
    "random_uniform": [({"m": 0, "n": 0, "seed": 5}, lambda a: far(a, uniform(a)))],
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
    "zeros": [({"m": 0, "n": 0}, lambda c: float(c.any()))],
}  # fmt: skip


def _sized(given: dict[str, Any], m: int, n: int) -> dict[str, Any]:
    sizes = {"m": m, "n": n}
    return {key: sizes[key] if value == 0 and key in sizes else value
            for key, value in given.items()}  # fmt: skip


# ScaLAPACK takes the same arguments; `lu` gives the order of the rows.
OTHERS: dict[str, list[tuple[dict[str, Any], Errors]]] = {
    "lq": [({"A": "Q"}, lambda a, low, q: max(off(a, low @ q), unit(q.T)))],
    "lu": [({"A": "Q"}, lambda a, low, up, order: off(a[order.ravel()], low @ up))],
    "norm": CASES["norm"][:1],
    "svdvals": [({"A": "Q"}, CASES["svdvals"][0][1])],
} | {
    name: [case for case in CASES[name] if case[0].get("assume") != "positive"]
    for name in ("cholesky", "condest", "eigh", "lstsq", "matmul", "qr", "solve", "svd")
}
LIBRARIES = {"linalg": CASES, "scalapack": OTHERS}


def loaded(gang: Gang, library: str) -> tuple[Any, Checks]:
    module, check = importlib.import_module(registry.SHIPPED[library]), Checks(gang)
    if hasattr(module, "load"):
        module.load(check.ctx.state, None)
    return module, check


def errors(gang: Gang, library: str) -> dict[str, float]:
    """The largest error of each routine, in units of float32's epsilon."""
    (module, check), found = loaded(gang, library), {}
    plain = data(2000, 20, 200)
    for name, cases in LIBRARIES[library].items():
        worst = 0.0
        for given, error in cases:
            kinds = {"dtype": "float32"} if name in ("eye", "full", "zeros") else {}
            used = {k: v for k, v in given.items() if k in MATRICES}
            taken = [
                plain[v].astype("float32" if v not in "RC" else "int32") for v in used.values()
            ]
            matrices = {k: check.distribute(a) for k, a in zip(used, taken, strict=True)}
            results = getattr(module, name)(check.ctx, **(_sized(given, 60, 7) | kinds | matrices))
            results = results if isinstance(results, tuple) else (results,)
            whole = [check.whole(x) if isinstance(x, DistMatrix) else x for x in results]
            wide = [
                x.astype("complex128" if x.dtype.kind == "c" else "float64")
                if isinstance(x, np.ndarray) and x.dtype.kind in "fc" else x
                for x in (*taken, *whole)
            ]  # fmt: skip
            worst = max(worst, float(error(*wide)))
        found[name] = worst / EPS
    return found


def memory(gang: Gang, library: str) -> dict[str, float]:
    """Peak memory of a rank in each routine, over its share of the arguments and results."""
    # A pool that keeps nothing, so that all memory of a call is new.
    storage = Storage(gang.rank, Pool(0, shared=True))
    alone = Gang(MPI.COMM_WORLD, storage, lambda *_: None)
    (module, check), found = loaded(alone, library), {}
    order = 2000 if library == "linalg" else 1200  # Debian's ScaLAPACK may have a slow BLAS
    few, plain = data(2000, 20, 200), data(100_000, 40, order)
    trim = ctypes.CDLL(None).malloc_trim
    with pytest.MonkeyPatch.context() as patch:
        for tuned in (blocks, reductions, kernel_regression):
            patch.setattr(tuned, "PANEL", PANEL)
        for tuned in (blocks, elimination, triangular):
            patch.setattr(tuned, "CHUNK", PANEL // 8)
        for name, cases in LIBRARIES[library].items():
            given = cases[0][0] | MEMORY.get(name, {})
            used = {k: v for k, v in given.items() if k in MATRICES}
            for sizes in (few, plain):  # the first call loads code
                m, n = sizes["T"].shape if name != "eye" else sizes["Q"].shape
                matrices = {k: check.distribute(sizes[v]) for k, v in used.items()}
                arguments = _sized(given, m, n) | matrices
                if sizes is few:
                    getattr(module, name)(check.ctx, **arguments)
            held = sum(x.local.nbytes for x in matrices.values())
            trim(0)
            gang.comm.Barrier()
            Path("/proc/self/clear_refs").write_text("5")  # the peak begins here
            before = _status("VmRSS")
            results = getattr(module, name)(check.ctx, **arguments)
            peak = _status("VmHWM") - before
            results = results if isinstance(results, tuple) else (results,)
            share = held + sum(x.local.nbytes for x in results if isinstance(x, DistMatrix))
            del results, matrices, arguments
            found[name] = max(gang.comm.allgather((held + peak) / share))
    return found


def _status(key: str) -> int:
    text = Path("/proc/self/status").read_text()
    return int(re.findall(rf"{key}:\s+(\d+) kB", text)[0]) * 1024
