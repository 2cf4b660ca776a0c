"""Linear systems: LU and Cholesky factorizations, and solutions."""

from __future__ import annotations

import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

from ali.blocks import require, require_same_rows, require_square
from ali.interface import Context, routine
from ali.scalapack.checks import computed_in, require_finite
from ali.scalapack.cyclic import Call, Cyclic, indices
from ali.scalapack.triangles import keep_lower, keep_upper, set_real_diagonal
from mpi_workers.matrix.dist_matrix import DistMatrix


@routine("X", like={"X": "B"})
def solve(ctx: Context, A: DistMatrix, B: DistMatrix) -> DistMatrix:
    """Solution X of A X = B, by Gaussian elimination with partial pivoting.

    Parameters
    ----------
    A : matrix, shape (n, n)
    B : matrix, shape (n, k)
        Any layouts (best MC_MR) and dtypes. Integers are promoted to float64.

    Returns
    -------
    X : matrix, shape (n, k), MC_MR

    Raises
    ------
    ShapeError
        If A is not square, or B has another number of rows.
    LinAlgError
        If A is singular (a pivot is exactly zero), or a matrix contains NaN or infinity. An A that
        is singular but for rounding passes: see `condest`.

    Notes
    -----
    ``(2/3 n^3 + 2 n^2 k) / ranks`` flops; about ``(n^2 + n k) log(ranks) / sqrt(ranks)`` words
    and ``n log(ranks)`` messages per rank; memory for copies of A and B, twice where they
    are in blocks (docs/scalapack.md). Cannot be interrupted while it computes. Source: ScaLAPACK
    Users' Guide, ``p?gesv``.

    Error: 2 eps, |A X - B| / (|A| |X| + |B|). Peak memory: 5.0 times arguments and results.
    """
    dtype = computed_in("solve", A, B)
    n = require_square("solve", A)
    require_same_rows("solve", A, B)
    require_finite(ctx, "solve", A, B)
    call = Call(ctx, dtype, "getrf", n, A, B)
    a, b = call.copy(A), call.copy(B)
    info = call.run("p?gesv", n, B.shape[1], *a.submatrix, a.pivots(), *b.submatrix)
    require(info == 0, "LinAlgError", f"solve: A is singular: pivot {info} of {n} is zero")
    return call.result(b)


@routine("L")
def cholesky(ctx: Context, A: DistMatrix) -> DistMatrix:
    """Cholesky factor L of a Hermitian positive definite A = L L^H.

    Parameters
    ----------
    A : matrix, shape (n, n)
        Only its lower triangle is read; symmetry is not checked.
        Best in MC_MR. Integers are promoted to float64.

    Returns
    -------
    L : matrix, shape (n, n), MC_MR
        Lower triangular with a positive diagonal; zeros above it.

    Raises
    ------
    ShapeError
        If A is not square.
    LinAlgError
        If A is not positive definite, or contains NaN or infinity.

    Notes
    -----
    ``n^3 / (3 ranks)`` flops, about ``n^2 log(ranks) / (2 sqrt(ranks))`` words per rank, memory
    for a copy of A, two where it is in blocks (docs/scalapack.md). Cannot be interrupted while it
    computes. Source: ScaLAPACK Users' Guide, ``p?potrf``.

    Error: 1 eps, |A - L L^H| / |A|. Peak memory: 2.6 times arguments and results.
    """
    dtype = computed_in("cholesky", A)
    n = require_square("cholesky", A)
    require_finite(ctx, "cholesky", A)
    call = Call(ctx, dtype, "potrf", n, A)
    a = call.copy(A)
    info = call.run("p?potrf", "L", n, *a.submatrix)
    require(
        info == 0,
        "LinAlgError",
        f"cholesky: A is not positive definite: its leading {info} x {info} part is not",
    )
    L = call.result(a)
    keep_lower(L)
    set_real_diagonal(L)
    return L


@routine("L", "U", "P", vectors=("P",))
def lu(ctx: Context, A: DistMatrix) -> tuple[DistMatrix, DistMatrix, DistMatrix]:
    """LU factorization with partial pivoting: the rows P of A are L U.

    Parameters
    ----------
    A : matrix, shape (m, n)
        Best in MC_MR. Integers are promoted to float64.

    Returns
    -------
    L : matrix, shape (m, min(m, n)), MC_MR
        Lower triangular with ones on its diagonal, and nothing above 1 in modulus (up to
        sqrt(2) if complex).
    U : matrix, shape (min(m, n), n), MC_MR
        Upper triangular. A zero on its diagonal means that A is singular, which is not an error.
    P : vector, shape (m,), int64, STAR_STAR
        Permutation as row numbers: in NumPy ``A[P] == L @ U``.

    Raises
    ------
    LinAlgError
        If A contains NaN or infinity.

    Notes
    -----
    ``(m n s - (m + n) s^2 / 2 + s^3 / 3) 2 / ranks`` flops with s = min(m, n), some
    ``m n log(ranks) / sqrt(ranks)`` words per rank; memory for a copy of A and the results, and a
    further copy where it is in blocks (docs/scalapack.md); m words for P. Cannot be interrupted
    while it computes. Source: ScaLAPACK Users' Guide, ``p?getrf``.

    Error: 10 eps, |P A - L U| / |A|. Peak memory: 2.2 times arguments and results.
    """
    dtype = computed_in("lu", A)
    (m, n), k = A.shape, min(A.shape)
    require_finite(ctx, "lu", A)
    call = Call(ctx, dtype, "getrf", k, A)
    a = call.copy(A)
    pivots = a.pivots()
    call.run("p?getrf", m, n, *a.submatrix, pivots)
    P = ctx.new_replicated(_permutation(ctx, call, a, pivots), "STAR_STAR")
    if m >= n:
        U, L = call.leading(a, k, n), call.result(a)
    else:
        L, U = call.leading(a, m, k), call.result(a)
    keep_lower(L, unit=True)
    keep_upper(U)
    return L, U, P


def _permutation(
    ctx: Context, call: Call, a: Cyclic, pivots: NDArray[np.int32]
) -> NDArray[np.int64]:
    """The order of rows that ScaLAPACK's interchanges (row i with row pivots[i]) amount to."""
    k = min(a.m, a.n)
    mine, every = np.zeros(k, np.int64), np.zeros(k, np.int64)
    if call.grid.col == 0:  # each column of the grid holds them all
        rows = indices(a.m, a.block, call.grid.row, call.grid.height)
        rows = rows[rows < k]
        mine[rows] = pivots[: len(rows)] - 1
    ctx.comm.Allreduce(mine, every, MPI.SUM)
    order = list(range(a.m))
    for i, other in enumerate(every.tolist()):
        order[i], order[other] = order[other], order[i]
    return np.array(order, np.int64)
