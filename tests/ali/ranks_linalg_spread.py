"""Functions that test_linalg_spread.py runs on ranks: factorizations that stay distributed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import scipy.linalg

from ali import DistMatrix, blocks, linalg
from ali.interface import Context
from ali.linalg import eigen, qr_factorization, systems
from ali.linalg.eigen import tridiagonal_eigh
from mpi_workers.rank.gang import Gang
from tests.ali.ranks_linalg_checks import (
    FLOATS,
    Array,
    Checks,
    orthonormal,
    sample,
    small_panels,
    values,
)
from tests.ali.ranks_stated import PANEL, alone, peak

LAYOUTS = ("VC_STAR", "STAR_VC", "MC_MR", "CIRC_CIRC")


@contextmanager
def small_limits() -> Iterator[None]:
    """Matrices of a few columns are spread, in panels of fewer."""
    with small_panels(), pytest.MonkeyPatch.context() as patch:
        for module in (eigen, qr_factorization):
            patch.setattr(module, "ON_ONE_RANK", 3)
        for module in (qr_factorization, systems):
            patch.setattr(module, "PANEL_COLUMNS", 5)
        patch.setattr(eigen, "WIDTH", 4)
        patch.setattr(eigen, "LEAF", 6)
        patch.setattr(eigen, "MERGE_WIDTH", 7)
        yield


def matrix(shape: tuple[int, int], dtype: str, kind: str) -> Array:
    """Any, of low rank, with singular values down to rounding, an identity, or zero."""
    a = values(shape, dtype)
    k = min(shape)
    if kind == "low":
        a = a[:, : k // 3 + 1] @ a[: k // 3 + 1]
    elif kind == "bad":
        u, _, vh = np.linalg.svd(a, full_matrices=False)
        a = (u * np.logspace(0, np.log10(np.finfo(dtype).eps), k)) @ vh
    elif kind == "eye":
        a = np.eye(*shape)
    elif kind == "zero":
        a = np.zeros(shape)
    return np.asarray(a.astype(dtype))


KINDS = ("any", "low", "bad", "eye", "zero")
SHAPES = ((24, 24), (25, 17), (17, 25), (60, 9), (9, 60), (7, 7))


def singular(gang: Gang) -> list[Any]:
    check = Checks(gang)
    for shape, dtype, layout, kind in sample(gang, SHAPES, FLOATS, LAYOUTS, KINDS):
        a, what = matrix(shape, dtype, kind), [shape, dtype, layout, kind]
        A, real = check.distribute(a, layout), np.zeros(0, dtype).real.dtype
        s, u, v = (check.whole(x) for x in linalg.svd(check.ctx, A))
        exact = np.linalg.svd(a, compute_uv=False)
        size = 1 + float(exact[0])
        check.close(s, exact, real, [*what, "S"], size)
        check.close((u * s) @ v.conj().T, a, dtype, [*what, "U S V^H"], size)
        orthonormal(check, u, [*what, "U"])
        orthonormal(check, v, [*what, "V"])
        check.close(check.whole(linalg.svdvals(check.ctx, A)), exact, real, [*what, "vals"], size)
        q, r = (check.whole(x) for x in linalg.qr(check.ctx, A))
        check.close(q @ r, a, dtype, [*what, "Q R"], size)
        orthonormal(check, q, [*what, "Q"])
        check.true(bool((np.diagonal(r).real >= 0).all()), [*what, "diagonal"])
        check.close(np.tril(r, -1), np.zeros_like(r), dtype, [*what, "triangle"])
        q, p = (check.whole(x) for x in linalg.polar(check.ctx, A))
        check.close(q @ p, a, dtype, [*what, "Q P"], size)
        check.close(p, p.conj().T, dtype, [*what, "Hermitian"], 1e-3)
        check.true(scipy.linalg.eigvalsh(p).min() > -60 * size * np.finfo(dtype).eps, what)
        if kind in ("any", "bad", "eye"):
            orthonormal(check, q if shape[0] >= shape[1] else q.conj().T, [*what, "polar"])
    return check.result()


def least_squares(gang: Gang) -> list[Any]:
    check = Checks(gang)
    for shape, dtype, layout, kind in sample(gang, SHAPES, FLOATS, LAYOUTS, ("any", "low")):
        a, b = matrix(shape, dtype, kind), values((shape[0], 3), dtype, 7)
        A, B = check.distribute(a, layout), check.distribute(b, "MC_MR")
        what, real = [shape, dtype, layout, kind], np.zeros(0, dtype).real.dtype
        limit = max(shape) * float(np.finfo(dtype).eps)
        x, _, r, s = np.linalg.lstsq(a, b, limit)
        blow = 20 * (1 + float(s[0] / s[r - 1])) ** 2 * (1 + float(np.abs(x).max()))
        X, lost, rank, S = linalg.least_squares(check.ctx, A, B)
        check.true(rank == r, [*what, rank, int(r)])
        check.close(check.whole(X), x, dtype, [*what, "X"], blow)
        check.close(check.whole(S), s, real, [*what, "S"], 50)
        squares = (abs(b - a @ x) ** 2).sum(axis=0)
        check.close(check.whole(lost), squares, real, [*what, "residuals"], 50 * shape[0])
        check.close(check.whole(linalg.lstsq(check.ctx, A, B)), x, dtype, [*what, "lstsq"], blow)
        inverse = np.linalg.pinv(a, limit)
        check.close(check.whole(linalg.pinv(check.ctx, A)), inverse, dtype, [*what, "pinv"], blow)
    return check.result()


def regularized(gang: Gang) -> list[Any]:
    """ridge, and leading vectors from a Gram matrix that would not fit."""
    check = Checks(gang)
    choices = sample(gang, SHAPES, FLOATS, LAYOUTS, ("any", "low"), (1e-3, 0.5, 30))
    for shape, dtype, layout, kind, lam in choices:
        a, b = matrix(shape, dtype, kind), values((shape[0], 3), dtype, 7)
        A, what = check.distribute(a, layout), [shape, dtype, layout, kind, lam]
        wide: Any = a.astype("complex128")
        h = wide.conj().T @ wide + lam * np.eye(shape[1])
        exact = np.linalg.solve(h, wide.conj().T @ b)
        exact = (exact if np.dtype(dtype).kind == "c" else exact.real).astype(dtype)
        blow = 10 * float(np.linalg.norm(wide, 2) ** 2 / lam + 1) * (1 + float(np.abs(exact).max()))
        X = linalg.ridge(check.ctx, A, check.distribute(b, "MC_MR"), lam)
        check.close(check.whole(X), exact, dtype, what, blow)
        if kind == "any":
            found = linalg.truncated_svd(check.ctx, A, 2, method="gram")
            s, u, v = (check.whole(x) for x in found)
            largest = np.linalg.svd(a, compute_uv=False)[:2]
            size = 20 * float(largest[0])
            check.close(s, largest, np.zeros(0, dtype).real.dtype, [*what, "S"], size)
            check.close(a @ v, u * s, dtype, [*what, "A V"], size)
    return check.result()


def exponentials(gang: Gang) -> list[Any]:
    check = Checks(gang)
    for n, dtype, layout, size in sample(gang, (1, 4, 13, 40), FLOATS, LAYOUTS, (0.0, 0.1, 1, 3)):
        a = np.asarray(values((n, n), dtype) * size, dtype)
        exact = scipy.linalg.expm(a)
        found = check.whole(linalg.expm(check.ctx, check.distribute(a, layout)))
        scale = 10 * (1 + np.linalg.norm(a, 1)) * float(np.abs(exact).max())
        check.close(found, exact, dtype, [n, dtype, layout, size], scale)
    return check.result()


def determinants(gang: Gang) -> list[Any]:
    """Of matrices whose pivots are on all ranks, and of singular ones."""
    check = Checks(gang)
    for n, dtype, layout in sample(gang, (3, 12, 40, 41), FLOATS, LAYOUTS):
        a = values((n, n), dtype)
        found = linalg.det(check.ctx, check.distribute(a, layout))
        exact = np.linalg.det(a.astype("complex128"))
        what, eps = [n, dtype, layout], float(np.finfo(dtype).eps)
        check.true(abs(found - exact) <= 60 * n * np.linalg.cond(a) * eps * abs(exact), what)
        a[:, n // 2] = 0
        check.true(linalg.det(check.ctx, check.distribute(a, layout)) == 0, [*what, "singular"])
    return check.result()


def hermitian(gang: Gang) -> list[Any]:
    check = Checks(gang)
    for n, dtype, layout, kind in sample(gang, (4, 13, 40), FLOATS, LAYOUTS, KINDS):
        a = matrix((n, n), dtype, kind)
        h = a + a.conj().T
        given = np.tril(h) + np.triu(np.full((n, n), np.nan), 1).astype(dtype)
        W, V = linalg.eigh(check.ctx, check.distribute(given, layout))
        w, v, what = check.whole(W), check.whole(V), [n, dtype, layout, kind]
        exact = np.linalg.eigvalsh(h)
        size = 1 + float(np.abs(exact).max())
        check.close(w, exact, exact.dtype, [*what, "W"], size)
        check.close(h @ v, v * w, dtype, [*what, "A V = V W"], size)
        orthonormal(check, v, [*what, "V"])
    return check.result()


def tridiagonals(gang: Gang) -> list[Any]:
    """Clustered, multiple and zero eigenvalues, and subdiagonals of zero."""
    check, n = Checks(gang), 75
    rng = np.random.default_rng(3)
    glued = np.ones(n - 1)
    glued[20::21] = 1e-14
    cases = {
        "any": (rng.standard_normal(n), rng.standard_normal(n - 1)),
        "laplacian": (np.full(n, 2.0), np.full(n - 1, -1.0)),
        "wilkinson, glued": (np.abs(np.arange(n) % 21 - 10.0), glued),
        "identity": (np.ones(n), np.full(n - 1, 1e-20)),
        "diagonal": (rng.standard_normal(n), np.zeros(n - 1)),
        "graded": (10.0 ** -np.arange(n), 10.0 ** -np.arange(n - 1)),
    }
    for what, (d, e) in cases.items():
        w, Z = tridiagonal_eigh(check.ctx, d, e)
        z, t = check.whole(Z), np.diag(d) + np.diag(e, 1) + np.diag(e, -1)
        exact = scipy.linalg.eigvalsh_tridiagonal(d, e)
        check.close(np.sort(w), exact, "float64", what, float(np.abs(exact).max()))
        check.close(t @ z, z * w, "float64", [what, "vectors"], float(np.abs(exact).max()))
        orthonormal(check, z, what)
    return check.result()


def everything(gang: Gang) -> dict[str, Any]:
    found = {}
    with small_limits():
        for function in (
            singular,
            least_squares,
            regularized,
            hermitian,
            tridiagonals,
            exponentials,
            determinants,
        ):
            found[function.__name__] = function(gang)
    return found


def leading(ctx: Context, A: DistMatrix) -> Any:
    return linalg.truncated_svd(ctx, A, 5, method="gram", tol=1e-2)


def memory(gang: Gang, n: int) -> dict[str, float]:
    """The most memory that a rank takes beyond the arguments' share, in its shares of A."""
    check = alone(gang)
    blocks.PANEL = PANEL
    rng, found = np.random.default_rng(1), {}
    a = rng.standard_normal((n, n))
    for name in ("eigh", "svd", "qr", "polar", "lstsq", "pinv", "solve", "det", "ridge", "gram"):
        for size in (600, n):  # the first call loads code
            A = check.distribute(a[:size, :size])
            B: list[Any] = []
            if name in ("lstsq", "solve", "ridge"):
                B.append(check.distribute(a[:size, :2]))
            if name == "ridge":
                B.append(0.5)
            held = A.local.nbytes
            call = leading if name == "gram" else getattr(linalg, name)
            results, most = peak(gang, lambda A=A, B=B, call=call: call(check.ctx, A, *B))
            del results
        found[name] = max(gang.comm.allgather((held + most) / held))
        del A, B
    return found
