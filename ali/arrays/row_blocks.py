"""Rows in consecutive blocks, for algorithms that need the order of elements: scans and sorts.

A matrix in VC_STAR has row i on rank ``i % size``. Here rank 0 has the first rows, rank 1 the next
ones, and so on. Both conversions send each element once and no positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ali.blocks import Array, block
from ali.interface import Context
from ali.linalg import products
from ali.linalg.views import operand
from mpi_workers.matrix.dist_matrix import REPLY_NBYTES, DistMatrix

POOLED_NBYTES = 1 << 20  # 1 MiB: smaller scratch memory is not taken from the pool


def scratch(ctx: Context, count: int, dtype: Any) -> Array:
    """Uninitialised memory for `count` elements of this rank.

    Large blocks come from the pool of matrices: they count as its memory does, and have no page
    faults if they were used before.
    """
    if count * np.dtype(dtype).itemsize < POOLED_NBYTES:
        return np.empty(count, dtype)
    return ctx.empty((count * ctx.size,), dtype).local.reshape(-1)


def exchange(ctx: Context, parts: Sequence[Array]) -> list[Array]:
    """Send ``parts[r]`` (1-D, of one dtype) to rank r; the parts that the ranks sent here."""
    received, ends = exchange_pieces(ctx, np.concatenate(parts), [part.size for part in parts])
    return np.split(received, ends[:-1])


def exchange_pieces(
    ctx: Context, sent: Array, counts: Sequence[int] | Array, into: Array | None = None
) -> tuple[Array, Array]:
    """Cut an array into consecutive pieces, one for each rank, and send them. Collective.

    Parameters
    ----------
    sent : ndarray, shape (k,)
    counts : sequence of int
        Elements for each rank.
    into : ndarray, optional
        Takes the pieces that arrive; exactly as many elements.

    Returns
    -------
    received : ndarray
        The pieces that the ranks sent here, one after another.
    ends : ndarray of int64
        Index at which each of them ends.
    """
    mine = np.asarray(counts, np.int64)
    theirs = np.empty_like(mine)
    ctx.comm.Alltoall(mine, theirs)
    ends = np.cumsum(theirs)
    total = int(ends[-1])
    # Some more memory than is needed: so the next exchange, of a like size, can use it again.
    received = scratch(ctx, total + total // 16, sent.dtype)[:total] if into is None else into
    ctx.comm.Alltoallv([sent, (mine, np.cumsum(mine) - mine)], [received, (theirs, ends - theirs)])
    return received, ends


def gathered(ctx: Context, mine: Array) -> list[Array]:
    """Arrays of all ranks, on every rank; all have as many dimensions, and the same dtype."""
    tail = mine.shape[1:]
    lengths = np.empty(ctx.size, np.int64)
    ctx.comm.Allgather(np.array([len(mine)], np.int64), lengths)
    counts = lengths * int(np.prod(tail, dtype=np.int64))
    found = np.empty(int(counts.sum()), mine.dtype)
    ctx.comm.Allgatherv(np.ascontiguousarray(mine), [found, (counts, np.cumsum(counts) - counts)])
    parts = np.split(found, np.cumsum(counts)[:-1])
    return [x.reshape(n, *tail) for x, n in zip(parts, lengths.tolist(), strict=True)]


def contiguous_rows(ctx: Context, A: DistMatrix) -> tuple[Array, int]:
    """This rank's consecutive rows of A, and the index of the first. Collective.

    Returns
    -------
    rows : ndarray, shape (k, n), C-ordered
        A copy. Ranks have ``ceil(m / size)`` rows each, the last ones fewer.
    start : int
    """
    local = np.ascontiguousarray(block(ctx.to_layout(A, "VC_STAR")))
    (m, n), size, me = A.shape, ctx.size, ctx.rank
    each = -(-m // size)
    edges = [min(m, each * r) for r in range(size + 1)]
    start, stop = edges[me], edges[me + 1]
    rows = scratch(ctx, (stop - start) * n, A.dtype).reshape(stop - start, n)
    if size == 1:
        rows[...] = local
        return rows, 0
    cuts = [-(-(edge - me) // size) if edge > me else 0 for edge in edges]
    received, ends = exchange_pieces(ctx, local.reshape(-1), np.diff(cuts) * n)
    for source, part in enumerate(np.split(received, ends[:-1])):
        mine = rows[(source - start) % size :: size]
        mine[...] = part.reshape(mine.shape)
    return rows, start


def from_contiguous(ctx: Context, rows: Array, start: int, shape: Sequence[int]) -> DistMatrix:
    """An array in VC_STAR from consecutive rows on each rank, in the order of ranks. Collective.

    Parameters
    ----------
    rows : ndarray, shape (k, n)
        Any number of rows; over all ranks they are all rows.
    start : int
        Index of the first one.
    shape : sequence of int
        Of the array.
    """
    size = ctx.size
    found = ctx.empty(shape, rows.dtype)
    n = rows.shape[1]
    if size == 1:
        found.local[...] = rows.reshape(found.local.shape)
        return found
    sent = scratch(ctx, rows.size, rows.dtype)
    counts, filled = [], 0
    for r in range(size):
        piece = rows[(r - start) % size :: size]
        counts.append(piece.size)
        sent[filled : filled + piece.size].reshape(piece.shape)[...] = piece
        filled += piece.size
    if n == 1:  # the local part is a column, in the order in which pieces arrive
        exchange_pieces(ctx, sent, counts, found.local.reshape(-1, order="F"))
        return found
    received, _ = exchange_pieces(ctx, sent, counts)
    if found.local.size:
        found.local[...] = received.reshape(-1, n)
    return found


def flattened(ctx: Context, A: DistMatrix) -> DistMatrix:
    """The elements in C order as a vector in VC_STAR; A itself if it is one. Collective."""
    if A.shape[1] == 1:
        return A.with_ndim(1)
    rows, start = contiguous_rows(ctx, A)
    n = A.shape[1]
    return from_contiguous(ctx, rows.reshape(-1, 1), start * n, (A.shape[0] * n,))


# --- lines: what an operation along an axis works on --------------------------------------


def canonical(ctx: Context, A: DistMatrix, axis: int | None) -> DistMatrix:
    """A matrix along whose columns an operation along `axis` of A goes; maybe a read-only view."""
    if A.ndim < 2:
        return A
    if axis is None:
        return flattened(ctx, A)
    return operand(A, "T") if axis == 1 else A


def restored(ctx: Context, R: DistMatrix, A: DistMatrix, axis: int | None) -> DistMatrix:
    """A new matrix of the shape of `canonical`, turned back; a vector if that is one."""
    if A.ndim < 2 or axis is None:
        return replied(ctx, R).with_ndim(1)
    return replied(ctx, products.transpose(ctx, R) if axis == 1 else R)


def replied(ctx: Context, R: DistMatrix) -> DistMatrix:
    """A small result in STAR_STAR, so that its elements come with the reply."""
    return ctx.to_layout(R, "STAR_STAR") if R.nbytes <= REPLY_NBYTES else R


def whole_columns(ctx: Context, A: DistMatrix) -> DistMatrix | None:
    """A in a layout in which ranks have whole columns; None where too few ranks would.

    Small matrices come in STAR_STAR: they cost one message, and every rank has the result.
    """
    if A.nbytes <= REPLY_NBYTES:
        return ctx.to_layout(A, "STAR_STAR")
    if A.layout.startswith("STAR_"):
        return A
    return ctx.to_layout(A, "STAR_VC") if A.shape[1] >= ctx.size else None
