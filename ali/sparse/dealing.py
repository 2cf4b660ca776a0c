"""Deals the rows of a sparse matrix out to another number of ranks: its gang was resized."""

from __future__ import annotations

from weakref import WeakKeyDictionary

import numpy as np

from ali.arrays.row_blocks import exchange_pieces
from ali.blocks import Array
from ali.interface import Context
from mpi_workers.matrix.dist_matrix import DistMatrix

FACTS = 3  # columns at the end of the starts

Parts = tuple[DistMatrix, DistMatrix, DistMatrix]


def dealt_out(ctx: Context, data: DistMatrix, indices: DistMatrix, starts: DistMatrix) -> Parts:
    """A sparse matrix with one row of its three matrices for each rank there is now. Collective.

    After a resize the rows are dealt out once, in the first call; the result is kept until the
    matrix is freed.

    Notes
    -----
    Each element crosses the network at most once, with its row and column. Memory: the matrix once
    more, and three copies of it meanwhile.
    """
    if data.shape[0] == ctx.size:
        return data, indices, starts
    kept: WeakKeyDictionary[object, Parts] = ctx.state.setdefault("dealt", WeakKeyDictionary())
    # Not by one rank alone: a call that failed may have ended on some ranks only.
    if not all(ctx.comm.allgather(data.block in kept)):
        kept[data.block] = _dealt_out(ctx, data, indices, starts)
    return kept[data.block]


def _dealt_out(ctx: Context, data: DistMatrix, indices: DistMatrix, starts: DistMatrix) -> Parts:
    before = data.shape[0]
    rows, used = [np.empty(0, np.int64)], []
    for part, ends in enumerate(starts.local):
        own = ends[: ends[-1] + 1]
        used.append(int(own[-1]))
        old_rank = data.rows[part]
        rows.append(np.repeat(old_rank + before * np.arange(len(own) - 1), np.diff(own)))
    row = np.concatenate(rows)
    order = np.argsort(row % ctx.size, kind="stable")
    counts = np.bincount(row % ctx.size, minlength=ctx.size)

    def exchanged(whole: Array) -> Array:
        return exchange_pieces(ctx, whole[order], counts)[0]

    def used_of(matrix: DistMatrix) -> Array:
        own = [line[:count] for line, count in zip(matrix.local, used, strict=True)]
        return np.concatenate(own) if own else np.empty(0, matrix.dtype)

    row = exchanged(row) // ctx.size
    elements, columns = exchanged(used_of(data)), exchanged(used_of(indices))
    order = np.argsort(row, kind="stable")
    m = int(ctx.comm.allreduce(sum(int(ends[-1]) for ends in starts.local)))
    mine, most = len(range(ctx.rank, m, ctx.size)), -(-m // ctx.size)
    longest = max(1, *ctx.comm.allgather(len(row)))
    made = [ctx.zeros((ctx.size, longest), matrix.dtype) for matrix in (data, indices)]
    ends = ctx.zeros((ctx.size, most + 1 + FACTS), starts.dtype)
    for matrix, values in zip(made, (elements, columns), strict=True):
        matrix.local[0, : len(row)] = values[order]
    ends.local[0, 1 : mine + 1] = np.cumsum(np.bincount(row, minlength=mine)[:mine])
    ends.local[0, -1] = mine
    return made[0], made[1], ends
