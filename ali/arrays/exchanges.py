"""Elements that move between ranks: to their owners, axes in another order, in another shape.

An array of three axes or more is stored as the matrix of its first axis by all others
(`DistMatrix`). In a layout that divides only rows (VC_STAR) a rank has whole elements of the first
axis, and what concerns the other axes is a local operation of NumPy. A routine of matrices serves
along any axis after `permuted` and `reshaped` have made that axis the rows or the columns.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import lcm, prod
from typing import Any

import numpy as np

from ali.blocks import Array, block
from ali.interface import Context
from ali.linalg import products
from ali.linalg.arithmetic import divides_rows
from mpi_workers.matrix.dist_matrix import DistMatrix
from mpi_workers.matrix.layout import MAX_BLOCK, Form, form, stored_shape

IN_BLOCKS = "VC_STAR:BLOCK"  # each rank has consecutive rows: what scans, sorts and masks make
POOLED_NBYTES = 1 << 20  # 1 MiB: smaller scratch memory is not taken from the pool


def scratch(ctx: Context, count: int, dtype: Any) -> Array:
    """Uninitialised memory for `count` elements of this rank.

    Large blocks come from the pool of matrices: they count as its memory does, and have no page
    faults if they were used before.
    """
    if count * np.dtype(dtype).itemsize < POOLED_NBYTES:
        return np.empty(count, dtype)
    return ctx.empty((count * ctx.size,), dtype).local.reshape(-1)


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


def to_owners(ctx: Context, owner: Array, *arrays: Array) -> list[Array]:
    """Send each element (of arrays of two axes: row) to a rank; what arrives here. Collective.

    Parameters
    ----------
    owner : ndarray of int, shape (k,)
        The rank to which each goes.
    *arrays : ndarrays, shapes (k,) or (k, n)

    Returns
    -------
    list of ndarray
        For each array what the ranks sent here: in the order of ranks, and of each rank in its own.
    """
    order = np.argsort(owner, kind="stable")
    counts = np.bincount(owner, minlength=ctx.size)
    found = []
    for array in arrays:
        n = prod(array.shape[1:])
        received, _ = exchange_pieces(ctx, array[order].reshape(-1), counts * n)
        found.append(received.reshape(received.size // max(1, n), *array.shape[1:]))
    return found


def answers(ctx: Context, owner: Array, asked: Array, answer: Callable[[Array], Array]) -> Array:
    """The answers of other ranks, in the order in which this one asks. Collective.

    Parameters
    ----------
    owner : ndarray of int, shape (k,)
        The rank that each question is for.
    asked : ndarray, shape (k,)
    answer : callable
        Gives the answers to questions for this rank, one for each, in one array.
    """
    order = np.argsort(owner, kind="stable")
    questions, ends = exchange_pieces(ctx, asked[order], np.bincount(owner, minlength=ctx.size))
    received, _ = exchange_pieces(ctx, answer(questions), np.diff(ends, prepend=0))
    found = np.empty_like(received)
    found[order] = received
    return found


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
    size = ctx.size
    _, n = stored_shape(shape)
    found = ctx.empty(shape, values.dtype)
    places, elements = to_owners(ctx, positions // max(1, n) % size, positions, values)
    if elements.size:
        found.stored[places // n // size, places % n] = elements
    return found


def contiguous_rows(ctx: Context, A: DistMatrix) -> tuple[Array, int]:
    """This rank's consecutive rows of A, and the index of the first. Collective.

    Returns
    -------
    rows : ndarray, shape (k, n), C-ordered
        A copy. Ranks have ``ceil(m / size)`` rows each, the last ones fewer.
    start : int
    """
    (m, n), size, me = A.shape, ctx.size, ctx.rank
    edges = [min(m, -(-m // size) * r) for r in range(size + 1)]
    start, stop = edges[me], edges[me + 1]
    rows = scratch(ctx, (stop - start) * n, A.dtype).reshape(stop - start, n)
    if size == 1 or A.layout == IN_BLOCKS:
        rows[...] = block(A)
        return rows, start
    # A redistribution takes three times as long: it is made for any two layouts.
    local = np.ascontiguousarray(block(ctx.to_layout(A, "VC_STAR")))
    cuts = [-(-(edge - me) // size) if edge > me else 0 for edge in edges]
    received, ends = exchange_pieces(ctx, local.reshape(-1), np.diff(cuts) * n)
    for source, part in enumerate(np.split(received, ends[:-1])):
        mine = rows[(source - start) % size :: size]
        mine[...] = part.reshape(mine.shape)
    return rows, start


def from_contiguous(ctx: Context, rows: Array, start: int, shape: Sequence[int]) -> DistMatrix:
    """An array from consecutive rows on each rank, in the order of ranks. Collective.

    Only rows move that are on another rank than `contiguous_rows` gives them to.

    Parameters
    ----------
    rows : ndarray, shape (k, n)
        Any number of rows; over all ranks they are all rows.
    start : int
        Index of the first one.
    shape : sequence of int
        Of the array, in ``VC_STAR:BLOCK``.
    """
    found = ctx.empty(shape, rows.dtype, IN_BLOCKS)
    m, n = stored_shape(shape)
    edges = np.minimum(m, -(-m // ctx.size) * np.arange(ctx.size + 1))
    counts = np.diff(np.clip(edges - start, 0, len(rows))) * n
    if n == 1:  # the local part is a column, in the order in which pieces arrive
        exchange_pieces(ctx, rows.reshape(-1), counts, found.stored.reshape(-1, order="F"))
        return found
    received, _ = exchange_pieces(ctx, rows.reshape(-1), counts)
    if found.stored.size:
        found.stored[...] = received.reshape(-1, n)
    return found


def start_of(ctx: Context, mine: Array) -> int:
    """The number of elements on the ranks before this one. Collective."""
    return sum(ctx.comm.allgather(len(mine))[: ctx.rank])


def in_order(ctx: Context, values: Array) -> DistMatrix:
    """The vector of what the ranks pass, one after the other. Collective."""
    counts = ctx.comm.allgather(values.size)
    start = sum(counts[: ctx.rank])
    return from_contiguous(ctx, values.reshape(-1, 1), start, (sum(counts),))


def listed(indices: bytes) -> Array:
    """Indices that travel in a command: little-endian int64."""
    return np.frombuffer(indices, "<i8").astype(np.int64, copy=False)


def in_rows(ctx: Context, A: DistMatrix) -> DistMatrix:
    """A in a layout that divides only rows, so that `local` has all axes. Collective."""
    return A if divides_rows(A.layout) else ctx.to_layout(A, "VC_STAR")


def with_axes(A: DistMatrix) -> Array:
    """This rank's block of an array in such a layout with all axes, a view; also of no rows."""
    stored = block(A)
    return stored.reshape(len(stored), *A.array_shape[1:])


def permuted(ctx: Context, A: DistMatrix, order: Sequence[int]) -> DistMatrix:
    """The axes in another order: NumPy's ``transpose``. Collective.

    Notes
    -----
    Local if the first axis stays, or every rank has all; else each element crosses the network
    once. Memory: two copies of this rank's part.
    """
    if A.ndim <= 2:
        return products.transpose(ctx, A) if list(order) == [1, 0] else A
    if list(order) == list(range(A.ndim)):
        return A
    shape = tuple(A.array_shape[axis] for axis in order)
    A = in_rows(ctx, A)
    if order[0] == 0 or A.layout == "STAR_STAR":
        B = ctx.empty(shape, A.dtype, A.layout)
        if B.local.size:
            B.local[...] = A.local.transpose(order)
        return B
    A = ctx.to_layout(A, "VC_STAR")
    size = ctx.size
    B = ctx.empty(shape, A.dtype)
    mine = with_axes(A).transpose(order)
    parts = [mine[rank::size].reshape(-1) for rank in range(size)]
    received, ends = exchange_pieces(ctx, np.concatenate(parts), [part.size for part in parts])
    whole = with_axes(B)
    place = list(order).index(0)
    for rank, part in enumerate(np.split(received, ends[:-1])):
        there = whole[(slice(None),) * place + (slice(rank, None, size),)]
        there[...] = part.reshape(there.shape)
    return B


def reshaped(ctx: Context, A: DistMatrix, shape: Sequence[int]) -> DistMatrix:
    """The elements in C order in another shape: a new matrix, or the memory of A. Collective.

    Notes
    -----
    A block of rows is a run of elements in C order. Where rows of the new shape divide the runs,
    they are dealt to ranks in other blocks, and nothing moves. Else the runs are made longer first:
    each element crosses the network once. Where that would leave ranks without a run, each element
    takes its position along.
    """
    wanted = tuple(shape)
    old, new = A.shape, stored_shape(wanted)
    if old == new:
        return A.with_shape(wanted)
    if 1 in old and new == old[::-1]:
        return products.transpose(ctx, A.with_shape(old)).with_shape(wanted)
    if A.layout == "STAR_STAR" or not A.nbytes:
        B = ctx.empty(wanted, A.dtype, A.layout)
        _copy_in_order(A, B)
        return B
    A = in_rows(ctx, A)
    run = A.distribution.block[0] * old[1]
    longer = lcm(run, new[1])
    few = longer > run and longer * ctx.size > old[0] * old[1]
    if few or longer // min(old[1], new[1]) > MAX_BLOCK:
        A = ctx.to_layout(A, "VC_STAR")
        return array_of(ctx, block(A).reshape(-1), positions_of(ctx, A).reshape(-1), wanted)
    if longer > run:
        run = longer
        A = ctx.to_layout(A, Form("VC", "STAR", longer // old[1]).layout)
    B = ctx.empty(wanted, A.dtype, Form(form(A.layout).rows, "STAR", run // new[1]).layout)
    _copy_in_order(A, B)
    return B


def _copy_in_order(A: DistMatrix, B: DistMatrix) -> None:
    """This rank's elements of A in C order into B."""
    m, n = A.stored.shape
    if not A.stored.size:
        return
    rows, cols = B.stored.shape
    least = min(n, cols)
    if max(n, cols) % least == 0:  # a view of both: an axis is split
        common = (min(m, rows), max(n, cols) // least, least)
        B.stored.reshape(common)[...] = A.stored.reshape(common)
    else:
        B.stored[...] = A.stored.reshape(B.stored.shape)
