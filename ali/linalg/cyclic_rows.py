"""Whole rows dealt to the ranks in turn: what triangular factorizations need of VC_STAR."""

from __future__ import annotations

import numpy as np

from ali.blocks import Array, count_owned
from ali.interface import Context

PANEL_ROWS = 128  # columns of a panel: enough for BLAS, few beside the matrix


def rows_before(index: int, rank: int, size: int) -> int:
    """How many of a rank's rows come before global row `index`."""
    return count_owned(index, rank, size)


def owned_rows(start: int, rank: int, size: int) -> slice:
    """Where a rank's rows lie in an array of the rows from `start` on."""
    return slice((rank - start) % size, None, size)


def gather_rows(ctx: Context, mine: Array, start: int, stop: int) -> Array:
    """Global rows ``start`` to ``stop`` on every rank, from each rank's own of them. Collective.

    Parameters
    ----------
    mine : ndarray, shape (own rows, w)

    Returns
    -------
    ndarray, shape (stop - start, w), C-ordered; the same bits on all ranks
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
