"""Copy selected rows and columns of a matrix to selected rows and columns of another.

Every rank knows all indices and computes which elements it sends and receives: no indices are
sent. Ranks exchange in pairs at increasing distance.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import zip_longest
from typing import NamedTuple

import numpy as np

from ali.blocks import Array
from ali.interface import Context
from mpi_workers.matrix.dist_matrix import DistMatrix
from mpi_workers.matrix.layout import Distribution
from mpi_workers.matrix.runs import Runs, evenly, put, taken

MESSAGE = 16 << 20  # 16 MiB
TAG = 14


class IndexMap(NamedTuple):
    """Index ``source[k]`` of one matrix is copied to index ``target[k]`` of the other (int64)."""

    source: Array
    target: Array


class _Selection(NamedTuple):
    """Local positions on one side of a transfer between two ranks."""

    rows: Array
    cols: Array


def transfer(
    ctx: Context, source: DistMatrix, target: DistMatrix, rows: IndexMap, cols: IndexMap
) -> None:
    """``target[rows.target, cols.target] = source[rows.source, cols.source]``. Collective.

    Both have the same dtype and any layouts; no element of the target may occur twice.
    Each element crosses the network at most once per copy in the target's layout. Memory: two
    messages of 16 MiB, and the indices.
    """
    me, size = ctx.rank, ctx.size
    groups = {member: group for group in source.distribution.owners() for member in group}
    giving = [
        _narrow(w.source, w, owned) for w, owned in _pairs(rows, cols, source.distribution, me)
    ]
    taking = [
        _narrow(w.target, w, owned) for w, owned in _pairs(rows, cols, target.distribution, me)
    ]
    for distance in range(size):
        ctx.check()
        taker, giver = (me + distance) % size, (me - distance) % size
        outgoing = incoming = None
        if me in groups and _sender(groups[me], taker) == me:
            outgoing = _selection(giving, target.distribution, taker, True, source)
        if giver in groups and _sender(groups[giver], me) == giver:
            incoming = _selection(taking, source.distribution, giver, False, target)
        if distance == 0:
            if outgoing is not None and incoming is not None:
                for cut, place in zip(
                    _cuts(source, outgoing), _cuts(target, incoming), strict=True
                ):
                    _put(target.local, place, _get(source.local, cut))
            continue
        for cut, place in zip_longest(_cuts(source, outgoing), _cuts(target, incoming)):
            _exchange(ctx, source, target, (taker, cut), (giver, place))


def _exchange(
    ctx: Context,
    source: DistMatrix,
    target: DistMatrix,
    to: tuple[int, _Selection | None],
    frm: tuple[int, _Selection | None],
) -> None:
    (taker, cut), (giver, place) = to, frm
    packed = buffer = None
    if cut is not None:
        packed = np.asfortranarray(_get(source.local, cut))
    if place is not None:
        shape = (place.rows.size, place.cols.size)
        buffer = np.empty(shape, target.dtype, order="F")
    if packed is not None and buffer is not None:
        ctx.comm.Sendrecv(_raw(packed), taker, TAG, _raw(buffer), giver, TAG)
    elif packed is not None:
        ctx.comm.Send(_raw(packed), taker, TAG)
    elif buffer is not None:
        ctx.comm.Recv(_raw(buffer), giver, TAG)
    if buffer is not None and place is not None:
        _put(target.local, place, buffer)


def _pairs(
    rows: IndexMap, cols: IndexMap, distribution: Distribution, rank: int
) -> list[tuple[IndexMap, Runs | None]]:
    down, across = distribution.runs(rank) or (None, None)
    return [(rows, down), (cols, across)]


def _narrow(side: Array, index_map: IndexMap, owned: Runs | None) -> IndexMap:
    """The part of a map whose `side` is among the indices that a rank owns."""
    if owned is None:
        return IndexMap(side[:0], side[:0])
    mine = owned.holds(side)
    return IndexMap(index_map.source[mine], index_map.target[mine])


def _selection(
    maps: list[IndexMap], other: Distribution, rank: int, giving: bool, matrix: DistMatrix
) -> _Selection | None:
    """The elements of this rank's part that go to, or come from, another rank."""
    theirs = other.runs(rank) or (None, None)
    mine, found = matrix.distribution.runs(matrix.rank), []
    if mine is None:
        return None
    for index_map, owned, runs in zip(maps, theirs, mine, strict=True):
        part = _narrow(index_map.target if giving else index_map.source, index_map, owned)
        found.append(runs.positions(part.source if giving else part.target))
    return _Selection(*found) if found[0].size and found[1].size else None


def _sender(group: tuple[int, ...], receiver: int) -> int:
    """The rank in a group with equal copies that sends to `receiver`: itself if possible."""
    return receiver if receiver in group else group[receiver % len(group)]


def _cuts(matrix: DistMatrix, share: _Selection | None) -> Iterator[_Selection]:
    if share is None:
        return
    width = max(1, MESSAGE // (share.rows.size * matrix.dtype.itemsize))
    for start in range(0, share.cols.size, width):
        yield _Selection(share.rows, share.cols[start : start + width])


def _get(local: Array, share: _Selection) -> Array:
    return taken(local, evenly(share.rows), evenly(share.cols))


def _put(local: Array, share: _Selection, values: Array) -> None:
    put(local, evenly(share.rows), evenly(share.cols), values)


def _raw(array: Array) -> Array:
    return array.reshape(-1, order="F").view(np.uint8)
