"""Cholesky factors, and systems with triangular matrices, of matrices in VC_STAR.

Row i is on rank ``i % size``: helpers for blocked triangular algorithms come first.

Blocked and right-looking: rank 0 factors the square corner of a panel and sends it to all ranks,
each rank solves for its rows of the panel, all ranks gather the panel, and each rank updates its
remaining rows. Source: Golub, Van Loan, "Matrix Computations", 4th ed., 3.1 and 4.2;
LAPACK's potrf.
"""

from __future__ import annotations

import numpy as np
import scipy.linalg

from ali.blocks import (
    CHUNK,
    Array,
    block,
    count_owned,
    panels,
    subtract_product,
)
from ali.interface import Context
from ali.linalg.collectives import sum_over_ranks
from ali.linalg.products import operand
from mpi_workers.matrix.dist_matrix import DistMatrix

PANEL_COLUMNS = 128  # enough for BLAS's full speed, and little memory compared with the matrix


def rows_before(index: int, rank: int, size: int) -> int:
    """How many of the rows of `rank` come before global row `index`."""
    return count_owned(index, rank, size)


def owned_rows(start: int, rank: int, size: int) -> slice:
    """Positions of the rows of `rank` in an array of the global rows from `start` on."""
    return slice((rank - start) % size, None, size)


def gather_rows(ctx: Context, mine: Array, start: int, stop: int) -> Array:
    """Gather global rows ``start`` to ``stop`` on every rank. Collective.

    Parameters
    ----------
    mine : ndarray, shape (local rows, w)
        This rank's rows of that range.

    Returns
    -------
    ndarray, shape (stop - start, w), C-ordered
        The same bits on all ranks.
    """
    count, width = stop - start, mine.shape[1]
    if ctx.size == 1:
        return np.ascontiguousarray(mine)
    counts = [len(range((q - start) % ctx.size, count, ctx.size)) for q in range(ctx.size)]
    packed = np.empty(count * width, mine.dtype)
    ctx.comm.Allgatherv(
        np.ascontiguousarray(mine).reshape(-1), [packed, [c * width for c in counts]]
    )
    whole = np.empty((count, width), mine.dtype)
    at = 0
    for q, c in enumerate(counts):
        whole[owned_rows(start, q, ctx.size)] = packed[at : at + c * width].reshape(c, width)
        at += c * width
    return whole


def copy_to_rows(ctx: Context, A: DistMatrix, dtype: np.dtype[np.generic]) -> DistMatrix:
    """A copy of A in VC_STAR with this dtype."""
    moved = ctx.to_layout(A, "VC_STAR")
    if moved is not A and moved.dtype == dtype:
        return moved
    copy = ctx.empty(A.shape, dtype)
    copy.local[...] = moved.local
    return copy


def as_rows(ctx: Context, A: DistMatrix, dtype: np.dtype[np.generic]) -> DistMatrix:
    """A in VC_STAR with this dtype, read-only: A itself if possible."""
    return A if (A.layout, A.dtype) == ("VC_STAR", dtype) else copy_to_rows(ctx, A, dtype)


def cholesky_in_place(ctx: Context, L: DistMatrix) -> int:
    """Overwrite a Hermitian matrix in VC_STAR by its Cholesky factor; reads the lower triangle.

    Returns
    -------
    int
        0, or the order of the leading minor that is not positive definite; the same on all
        ranks.
    """
    n, local = L.shape[0], block(L)
    me, size = ctx.rank, ctx.size
    for cols in panels(n, PANEL_COLUMNS):
        ctx.check()
        start, stop = cols.start, cols.stop
        width, begin, end = stop - start, rows_before(start, me, size), rows_before(stop, me, size)
        corner = gather_rows(ctx, local[begin:end, cols], start, stop)
        message = np.empty(width * width + 1, local.dtype)  # the factor, and the failing minor
        if ctx.rank == 0:
            message[-1] = _factor(corner)
            message[:-1] = corner.reshape(-1)
        ctx.comm.Bcast(message)
        if minor := int(message[-1].real):
            return int(start + minor)
        corner = message[:-1].reshape(width, width)
        local[begin:end, cols] = corner[owned_rows(start, me, size)]
        # X corner^H = panel, solved as conj(corner) X^T = panel^T.
        below = local[end:, cols].T
        below = scipy.linalg.solve_triangular(
            corner.conj(), below, lower=True, check_finite=False
        ).T
        local[end:, cols] = below
        whole = gather_rows(ctx, below, stop, n)
        strip = max(32, 4 * CHUNK // max(1, (len(local) - end) * local.itemsize))
        for some in panels(n - stop, strip):  # little more than the lower triangle
            at = rows_before(stop + some.start, me, size)
            update = below[at - end :] @ whole[some].conj().T
            local[at:, stop + some.start : stop + some.stop] -= update
        ctx.progress(1 - (1 - stop / n) ** 3, f"column {stop} of {n}")
    for j, col in enumerate(L.cols):
        local[: rows_before(col, me, size), j] = 0
    return 0


def _factor(corner: Array) -> int:
    """Overwrite a block by its Cholesky factor; the order of the minor that fails, or 0."""
    (potrf,) = scipy.linalg.get_lapack_funcs(("potrf",), (corner,))
    factor, info = potrf(corner, lower=True, clean=True)
    diagonal = np.diagonal(factor)
    if info == 0 and not np.isfinite(diagonal).all():  # some LAPACKs do not detect NaN
        info = int(np.flatnonzero(~np.isfinite(diagonal))[0]) + 1
    corner[...] = factor
    return int(info)


def triangular_solve(
    ctx: Context, T: DistMatrix, X: DistMatrix, *, lower: bool, adjoint: bool = False
) -> int:
    """Overwrite X by the solution of ``T X = X`` or ``T^H X = X``; both in VC_STAR. Collective.

    Only the triangle chosen by `lower` is read.

    Returns
    -------
    int
        0, or the first position on the diagonal, from 1, that is zero; the same on all ranks.
        X is then undefined.

    Notes
    -----
    ``n^2 r / ranks`` flops; for each block of 128 rows two messages to all ranks, of the
    block's square and of r words for each of its rows.
    """
    n, t, x = T.shape[0], block(T), block(X)
    me, size = ctx.rank, ctx.size
    forward = lower != adjoint
    blocks = list(panels(n, PANEL_COLUMNS))
    for part in blocks if forward else reversed(blocks):
        ctx.check()
        start, stop = part.start, part.stop
        mine = slice(rows_before(start, me, size), rows_before(stop, me, size))
        corner = gather_rows(ctx, t[mine, part], start, stop)
        zeros = np.flatnonzero(np.diagonal(corner) == 0)
        if zeros.size:
            return int(start + zeros[0] + 1)
        side = gather_rows(ctx, x[mine], start, stop)
        done = slice(0, mine.start) if forward else slice(mine.stop, None)
        ahead = slice(mine.stop, None) if forward else slice(0, mine.start)
        if adjoint:
            side = side - sum_over_ranks(ctx.comm, t[done, part].conj().T @ x[done])
        side = scipy.linalg.solve_triangular(
            corner, side, lower=lower, trans="C" if adjoint else "N", check_finite=False
        )
        x[mine] = side[owned_rows(start, me, size)]
        if not adjoint:
            subtract_product(x[ahead], t[ahead, part], side)
    return 0


def adjoint_in_rows(ctx: Context, A: DistMatrix) -> DistMatrix:
    """A^H in VC_STAR, a copy."""
    return copy_to_rows(ctx, operand(A, "C"), A.dtype)
