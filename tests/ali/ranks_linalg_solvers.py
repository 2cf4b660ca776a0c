"""Functions that test_linalg.py runs on ranks: systems, decompositions, searches."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from ali import linalg
from ali.linalg import triangular
from mpi_workers.rank.gang_view import GangView
from tests.ali.ranks_linalg_checks import FLOATS, NUMBERS, Array, Checks, values

SIZES = (1, 2, 5, 9, 24)
SIDES = ("VC_STAR", "MC_MR", "STAR_VC", "CIRC_CIRC", "MR_STAR")


@contextmanager
def small_blocks(width: int) -> Iterator[None]:
    """Panels of a few columns, so that there are many and the last is short."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triangular, "PANEL_COLUMNS", width)
        yield


def used_dtype(*dtypes: str) -> np.dtype[Any]:
    return np.result_type(*dtypes, "float32")


def positive(n: int, dtype: str) -> Array:
    a = values((n, n + 3), dtype)
    return a @ a.conj().T + np.eye(n, dtype=dtype) * 4


def pivoting(check: Checks) -> None:
    """Matrices that fail without pivots, and those in which ranks run out of rows early."""
    n, ranks = 30, check.ctx.size
    permuted = np.eye(n)[::-1] * np.arange(1, n + 1)
    # All large elements in rows that one rank owns, so that its rows are the first to go.
    uneven = values((n, n), "float64") * np.where(np.arange(n) % ranks == 0, 1e6, 1.0)[:, None]
    hilbert = 1.0 / (np.arange(n)[:, None] + np.arange(n) + 1.0) + 1e-3 * np.eye(n)
    for name, a in (("permuted", permuted), ("uneven", uneven), ("hilbert", hilbert)):
        b = values((n, 2), "float64", 3)
        for width in (4, 128):
            with small_blocks(width):
                x = check.whole(check.linalg.solve(a, b))
                d = check.linalg.det(a)
            backward = np.abs(a @ x - b).max() / (np.abs(a).sum(1).max() * np.abs(x).max())
            check.true(backward < 1e-14, [name, width, "backward error", float(backward)])
            check.close(d / np.linalg.det(a), 1 + 0j, "complex128", [name, "det"], 20)
    half = np.eye(n)
    half[::2] *= 1e-3
    for ord in ("1", "2"):
        check.close(check.linalg.condest(half, ord), 1e3, "float64", ["condition", ord])
    flat = np.ones((n, n))
    check.true(check.linalg.condest(flat) == np.inf, "singular")
    check.true(check.linalg.det(flat) == 0, "det of singular")
    check.true(check.linalg.slogdet(flat)[1] == -np.inf, "slogdet of singular")
    huge = 1e200 * np.diag([-1.0, 1.0, 1.0])
    check.true(check.linalg.det(huge) == -np.inf, "det overflows")
    a = values((40, 6), "float64")
    found = check.linalg.condest(a, "2")
    check.close(found, np.linalg.cond(a), "float64", "condition of a tall matrix")


def least_squares(check: Checks, spread: bool = False) -> None:
    shapes = [(30, 4), (4, 30), (7, 7), (1, 1), (5, 1), (1, 5), (9, 8)]
    for (m, n), dtype, layout, kind in check.sample(shapes, NUMBERS, SIDES, ("", "low", "zero")):
        a = values((m, n), dtype)
        if kind == "low":
            a[:, n // 2 :] = a[:, :1]
        elif kind == "zero":
            a[...] = 0
        b = values((m, 2 if m % 2 else 40), dtype, 7)  # few columns, or more than A has
        used = used_dtype(dtype)
        exact = np.dtype("complex128" if used.kind == "c" else "float64")
        A, B = check.distribute(a, layout), check.distribute(b, "MC_MR")
        what = [m, n, dtype, layout, kind]
        X, lost, ours, values_of = check.linalg.least_squares(A, B)
        alone = check.whole(check.linalg.lstsq(A, B))
        if not spread:  # else they take different ways to it
            check.same(alone, check.whole(X), what)
        S, rank = check.linalg.svdvals(A), check.linalg.matrix_rank(A)
        wide, side = a.astype(exact), b.astype(exact)
        limit = max(m, n) * np.finfo(used).eps
        x, _, r, s = np.linalg.lstsq(wide, side, limit)
        check.true(rank == ours == r, [*what, rank, ours, int(r)])
        smallest = float(s[r - 1]) if r else 1.0
        blow = 20 * (1 + float(s[0]) / smallest) ** 2 * (1 + float(np.abs(x).max()))
        for one in (alone, check.whole(X)):
            check.close(one, x.astype(used), used, [*what, "X"], blow)
        real = used.type(0).real.dtype
        check.close(S, s.astype(real), real, [*what, "S"], 50)
        check.close(values_of, s.astype(real), real, [*what, "all S"], 50)
        squares = (abs(side - wide @ x) ** 2).sum(axis=0).astype(real)
        check.close(lost, squares, real, [*what, "residuals"], 50 * m)
        inverse = np.linalg.pinv(wide, limit)
        check.close(check.linalg.pinv(A), inverse.astype(used), used, what, blow)
        gram = wide.conj().T @ wide + 0.5 * np.eye(n)
        x = np.linalg.solve(gram, wide.conj().T @ side).astype(used)
        check.close(check.linalg.ridge(A, B, 0.5), x, used, [*what, "ridge"], 500)


def decompositions(check: Checks) -> None:
    a = values((9, 9), "float64")
    a[0, 8] = np.nan  # where eigh does not look
    check.close(check.linalg.eigh(a)[0], np.linalg.eigvalsh(a), "float64", "upper triangle", 90)
    for dtype, shape, q in itertools.product(FLOATS, [(160, 90), (90, 160)], (0, 1, 3)):
        layout = SIDES[(q + check.ctx.size) % 3]
        u, s, vh = np.linalg.svd(values(shape, dtype), full_matrices=False)
        a = ((u * 0.8 ** np.arange(len(s))) @ vh).astype(dtype)
        found = check.linalg.truncated_svd(
            check.distribute(a, layout), 5, method="randomized", power_iterations=q
        )
        s, u, v = map(check.whole, found)
        what = ["randomized", dtype, shape, q, layout]
        # The first that is left out is 0.8^11 of the last that is wanted.
        rest = 0.8 ** (11 * (4 * q + 2)) / (60 * float(np.finfo(dtype).eps))
        exact = (0.8 ** np.arange(5)).astype(s.dtype)
        check.close(s, exact, s.dtype, [*what, "S"], 5 + rest)
        if shape[0] > shape[1]:  # exact within what was found, on the side of the long vectors
            check.close(a @ v, u * s, dtype, [*what, "A V = U S"], 9)
        else:
            check.close(a.conj().T @ u, v * s, dtype, [*what, "A^H U = V S"], 9)
        check.orthonormal(u, [*what, "U"])
        check.orthonormal(v, [*what, "V"])
    for dtype, shape, huge in itertools.product(FLOATS, [(90, 40), (40, 90)], (False, True)):
        size = float(np.finfo(dtype).max) ** (0.4 if huge else 0.0)  # squared, it would overflow
        u, s, vh = np.linalg.svd(values(shape, dtype), full_matrices=False)
        a = ((u * (size * 0.8 ** np.arange(len(s)))) @ vh).astype(dtype)
        what = ["gram", dtype, shape, huge]
        with np.errstate(over="raise"):
            s, u, v = map(check.whole, check.linalg.truncated_svd(a, 5, method="gram"))
        s, a = (s / size).astype(s.dtype), (a / size).astype(dtype)
        exact = (0.8 ** np.arange(5)).astype(s.dtype)
        check.close(s, exact, s.dtype, [*what, "S"], 9)
        check.close(a @ v, u * s, dtype, [*what, "A V = U S"], 90)
        check.orthonormal(u, [*what, "U"])
        check.orthonormal(v, [*what, "V"])


def transposed_products(check: Checks) -> None:
    a = values((50, 4), "complex64")
    C = check.linalg.matmul(a, a, "C")
    check.close(C, a.conj().T @ a, "complex64", "A^H A", 60)
    check.true(C.layout == "VC_STAR", "no operand moved")
    H = check.linalg.transpose(check.distribute(a, "MC_MR"), True)
    check.close(H, a.conj().T, "complex64", "A^H", 1e-300)


def everything(gang: GangView) -> dict[str, Any]:
    return Checks.results_of(
        gang, pivoting, least_squares, decompositions, transposed_products, refused
    )


def refused(check: Checks) -> list[Any]:
    """The failures of bad calls on every rank."""
    ctx = check.ctx
    A = ctx.zeros((4, 3), "float64")
    indefinite = positive(20, "float64")
    indefinite[13, 13] = -1
    singular = values((20, 20), "float64")
    singular[:, 7] = 0
    bad = values((20, 20), "float64")
    bad[19, 3] = np.nan
    triangle = np.tril(values((20, 20), "float64")) + 5 * np.eye(20)
    triangle[9, 9] = 0
    P, S, N, T = (check.distribute(x) for x in (indefinite, singular, bad, triangle))
    B = ctx.zeros((20, 1), "float64")
    ones = linalg.full(ctx, 20, 1, 1)
    stiff = check.distribute(np.diag(np.arange(1.0, 21)))
    with small_blocks(6):
        says = check.refusals(linalg)
        says("cholesky", "ShapeError: A is 4 x 3; it must be square", A)
        says("solve", "ShapeError: A is 20 x 20 and B is 4 x 3; the numbers of rows", P, A)
        says("solve", "BadArgumentError: assume must be one of general, positive", P, B, "other")
        minor = "LinAlgError: A is not positive definite: its leading minor of order 14"
        says("cholesky", minor, P)
        says("solve", minor, P, B, "positive")
        says("cholesky", minor, linalg.add(ctx, P, N))
        says("solve", "LinAlgError: A is singular: pivot 8 of 20 is exactly zero", S, B)
        says("inv", "LinAlgError: A is singular: pivot 8 of 20 is exactly zero", S)
        for name in ("det", "condest", "svd", "matrix_rank", "eigh"):
            says(name, "LinAlgError: A contains NaN or infinity", N)
        for name in ("solve", "lstsq"):
            says(name, "LinAlgError: A contains NaN or infinity", N, B)
        says("condest", "BadArgumentError: ord must be one of 1, 2", N, "fro")
        says("solve_triangular", "LinAlgError: A is singular: element (9, 9) of its diagonal", T, B)
        says("lstsq", "ShapeError: A is 20 x 20 and B is 4 x 3; the numbers of rows", P, A)
        says("ridge", "LinAlgError: B contains NaN or infinity", P,
             linalg.scale(ctx, ones, float("nan")), 1.0)  # fmt: skip
        says("ridge", "BadArgumentError: lam=0.0; it must be above 0", P, B, 0.0)
        says("eigh", "ShapeError: A is 4 x 3; it must be square", A)
        says("truncated_svd", "BadArgumentError: method must be one of arpack, ", P, 2,
             method="lanczos")  # fmt: skip
        says("truncated_svd", "BadArgumentError: oversampling=-1; it must be at least 0", P, 2,
             oversampling=-1)  # fmt: skip
        says("conjugate_gradient", "ShapeError: A is 4 x 3; it must be square", A, A)
        says("conjugate_gradient", "BadArgumentError: tol=0 cannot be reached", P, B, 0.0)
        says("conjugate_gradient", "LinAlgError: A is not positive definite", P, ones)
        says("conjugate_gradient", "LinAlgError: the matrices contain NaN or infinity", N, ones)
        says(
            "conjugate_gradient", "LinAlgError: did not converge: a relative", stiff, ones, 1e-10, 5
        )
        says("solve", "nothing", stiff, ones)
        return says.found
