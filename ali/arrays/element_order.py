"""Elements in C order: masks of elements, flat positions, and arrays made of either.

All matrices here are in VC_STAR: a rank holds whole rows, every `size`-th.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ali.blocks import Array, block
from ali.interface import Context
from mpi_workers.matrix.dist_matrix import DistMatrix
from mpi_workers.matrix.layout import stored_shape


def positions_of(ctx: Context, A: DistMatrix) -> Array:
    """The positions in C order of this rank's elements, in the shape of its block."""
    m, n = A.shape
    return np.arange(ctx.rank, m, ctx.size, dtype=np.int64)[:, None] * n + np.arange(n)


def array_of(ctx: Context, values: Array, positions: Array, shape: Sequence[int]) -> DistMatrix:
    """An array from elements that ranks hold, each with its position. Collective.

    Parameters
    ----------
    values, positions : ndarray, shape (k,)
        Of this rank; over all ranks every position occurs once.
    shape : sequence of int
        Of the array.

    Returns
    -------
    DistMatrix
        In VC_STAR.

    Notes
    -----
    Each element crosses the network once, with its position. Memory: three copies of this rank's
    elements and positions.
    """
    size, (_, n) = ctx.size, stored_shape(shape)
    found = ctx.empty(shape, values.dtype)
    owner = positions // max(1, n) % size
    order = np.argsort(owner, kind="stable")
    counts = np.bincount(owner, minlength=size).astype(np.int64)
    theirs = np.empty(size, np.int64)
    ctx.comm.Alltoall(counts, theirs)
    places = _exchanged(ctx, positions[order], counts, theirs)
    elements = _exchanged(ctx, values[order], counts, theirs)
    if elements.size:
        found.local[places // n // size, places % n] = elements
    return found


def _exchanged(ctx: Context, mine: Array, counts: Array, theirs: Array) -> Array:
    width = mine.dtype.itemsize
    received = np.empty(int(theirs.sum()), mine.dtype)
    raw_in, raw_out = (np.ascontiguousarray(x).view(np.uint8) for x in (mine, received))
    send, receive = counts * width, theirs * width
    ctx.comm.Alltoallv((raw_in, (send, _starts(send))), (raw_out, (receive, _starts(receive))))
    return received


def _starts(counts: Array) -> Array:
    return np.cumsum(counts) - counts


def numbered(ctx: Context, mask: DistMatrix) -> tuple[Array, int]:
    """Number the elements where a mask is true, in C order. Collective.

    Returns
    -------
    numbers : ndarray of int64, the shape of this rank's block
        Of true elements; -1 of others.
    count : int
        How many there are in all.

    Notes
    -----
    Every rank gathers the number of true elements of each row.
    """
    local = block(mask) != 0
    counts = np.zeros(mask.shape[0], np.int64)
    counts[ctx.rank :: ctx.size] = local.sum(axis=1)
    total = np.empty_like(counts)
    ctx.comm.Allreduce(counts, total)
    before = (np.cumsum(total) - total)[ctx.rank :: ctx.size]
    numbers = np.cumsum(local, axis=1, dtype=np.int64) - 1 + before[:, None]
    return np.where(local, numbers, -1), int(total.sum())
