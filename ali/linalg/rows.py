"""Rows of matrices in VC_STAR: row i is on rank ``i % size``."""

from __future__ import annotations

import numpy as np

from ali.blocks import Array, count_owned
from ali.interface import Context
from ali.linalg.products import operand
from mpi_workers.matrix.dist_matrix import DistMatrix


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


def adjoint_in_rows(ctx: Context, A: DistMatrix) -> DistMatrix:
    """A^H in VC_STAR, a copy."""
    return copy_to_rows(ctx, operand(A, "C"), A.dtype)
