"""Exchange between boxes of a file and a matrix in any layout, in rounds, over MPI.

In a round every rank has one box. The owners of its elements follow from arithmetic on ranges, as
in `mpi_workers.matrix.redistribution`, so no index is sent. Each rank reads contiguous parts of the
file whatever the layout, and needs three boxes of memory besides its part of the matrix: one
that it reads, one to send, one to receive.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import zip_longest
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ali.files.boxes import Box, share
from ali.files.buffers import Buffers
from ali.files.paths import together
from ali.interface import Context
from mpi_workers.matrix import copy_kernels
from mpi_workers.matrix.dist_matrix import DistMatrix
from mpi_workers.matrix.layout import LocalIndices, clip, positions
from mpi_workers.matrix.runs import Indices, put, selector, taken

MESSAGE = 16 << 20  # 16 MiB: far below MPI's 2 GiB
TAG = 11

Array = NDArray[Any]


class Rounds:
    """The box of each rank in each round."""

    def __init__(self, ctx: Context, boxes: Sequence[Box]) -> None:
        self._boxes = boxes
        self._shares = [share(len(boxes), rank, ctx.size) for rank in range(ctx.size)]
        self.count = max(map(len, self._shares))

    def box(self, rank: int, number: int) -> Box | None:
        mine = self._shares[rank]
        return self._boxes[mine[number]] if number < len(mine) else None


def scatter(
    ctx: Context,
    matrix: DistMatrix,
    boxes: Sequence[Box],
    read: Callable[[Box], Array],
    path: str,
    order: Literal["C", "F"] = "C",
) -> None:
    """Fill a matrix with boxes that the ranks read. Collective.

    Parameters
    ----------
    read : callable
        Returns a box's elements, in any order and any dtype that casts to the matrix's. May raise.
    path : str
        For messages.
    order : str
        In which elements are sent: the order of most boxes, and the same on all ranks.

    Notes
    -----
    Elements are cast by the reading rank, and cross the network once per copy of the layout.
    """
    rounds, buffers = Rounds(ctx, boxes), Buffers()
    for number in range(rounds.count):
        ctx.check()
        mine = rounds.box(ctx.rank, number)
        local_indices = together(ctx, path, partial(_read, read, mine))
        for distance in range(ctx.size):
            taker, giver = (ctx.rank + distance) % ctx.size, (ctx.rank - distance) % ctx.size
            outgoing = _common(mine, matrix.distribution.local_indices(taker))
            incoming = _common(
                rounds.box(giver, number), matrix.distribution.local_indices(ctx.rank)
            )
            source = (
                None
                if local_indices is None or not outgoing.size
                else _within(mine, local_indices, outgoing)
            )
            target = _local(matrix, incoming) if incoming.size else None
            if distance == 0:
                if source is not None and target is not None:
                    copy_kernels.copy(target, source)
            else:
                if order == "F":
                    source = None if source is None else source.T
                    target = None if target is None else target.T
                _pass(ctx, buffers, matrix.dtype, (taker, source), (giver, target))
        ctx.progress((number + 1) / rounds.count, f"box {number + 1} of {rounds.count}")


def _read(read: Callable[[Box], Array], box: Box | None) -> Array | None:
    return None if box is None else read(box)


def scatter_rows(
    ctx: Context,
    matrix: DistMatrix,
    boxes: Sequence[Box],
    order: NDArray[np.int64],
    read: Callable[[Box], Array],
    path: str,
) -> None:
    """Like `scatter`, where row i of the boxes is row ``order[i]`` of the matrix. Collective."""
    rounds, mine_of = Rounds(ctx, boxes), matrix.distribution.runs(ctx.rank)
    for number in range(rounds.count):
        ctx.check()
        mine = rounds.box(ctx.rank, number)
        values = together(ctx, path, partial(_read, read, mine))
        for distance in range(ctx.size):
            taker, giver = (ctx.rank + distance) % ctx.size, (ctx.rank - distance) % ctx.size
            sends = _row_cuts(mine, order, matrix, taker)
            theirs = rounds.box(giver, number)
            receives = _row_cuts(theirs, order, matrix, ctx.rank)
            for cut, place in zip_longest(sends, receives):
                packed = buffer = request = None
                if cut is not None and mine is not None and values is not None:
                    part = values[cut.positions][:, selector(cut.cols, mine.cols.start)]
                    packed = np.ascontiguousarray(part, matrix.dtype)
                if place is not None and distance:
                    buffer = np.empty((len(place.rows), len(place.cols)), matrix.dtype)
                    request = ctx.comm.Irecv(buffer.reshape(-1).view(np.uint8), giver, TAG)
                if packed is not None and distance:
                    ctx.comm.Send(packed.reshape(-1).view(np.uint8), taker, TAG)
                if request is not None:
                    request.Wait()
                if place is not None and mine_of is not None:
                    rows = mine_of[0].positions(place.rows)
                    cols = positions(matrix.cols, place.cols)
                    matrix.local[rows, cols] = buffer if distance else packed
        ctx.progress((number + 1) / rounds.count, f"box {number + 1} of {rounds.count}")


class _RowCut(NamedTuple):
    """Some rows of a box and their part of the columns: one message."""

    positions: NDArray[np.int64]  # in the box
    rows: NDArray[np.int64]  # of the matrix
    cols: Indices


def _row_cuts(
    box: Box | None, order: NDArray[np.int64], matrix: DistMatrix, rank: int
) -> list[_RowCut]:
    """The elements of a box in a rank's part of the matrix, cut alike on both sides."""
    both = matrix.distribution.runs(rank)
    if box is None or both is None:
        return []
    rows = order[box.rows.start : box.rows.stop]
    cols = both[1].members(box.cols.start, box.cols.stop)
    owned = np.flatnonzero(both[0].holds(rows))
    height = max(1, MESSAGE // (max(1, len(cols)) * matrix.dtype.itemsize))
    cuts = [owned[i : i + height] for i in range(0, len(owned) if cols else 0, height)]
    return [_RowCut(cut, rows[cut], cols) for cut in cuts]


def gather(
    ctx: Context,
    matrix: DistMatrix,
    boxes: Sequence[Box],
    write: Callable[[Box, Array], None],
    path: str,
) -> None:
    """Pass a matrix to `write` in boxes: each rank its own, C-ordered, in order. Collective."""
    rounds, buffers = Rounds(ctx, boxes), Buffers()
    group_of = {member: group for group in matrix.distribution.owners() for member in group}
    for number in range(rounds.count):
        ctx.check()
        mine = rounds.box(ctx.rank, number)
        whole = None if mine is None else buffers.take("box", mine.shape, matrix.dtype)
        for distance in range(ctx.size):
            taker, giver = (ctx.rank + distance) % ctx.size, (ctx.rank - distance) % ctx.size
            outgoing = incoming = LocalIndices(range(0), range(0))
            if _serves(group_of, ctx.rank, taker):
                outgoing = _common(
                    rounds.box(taker, number), matrix.distribution.local_indices(ctx.rank)
                )
            if _serves(group_of, giver, ctx.rank):
                incoming = _common(mine, matrix.distribution.local_indices(giver))
            source = _local(matrix, outgoing) if outgoing.size else None
            target = None
            if whole is not None and incoming.size:
                target = _within(mine, whole, incoming)
            if distance == 0:
                if source is not None and target is not None:
                    copy_kernels.copy(target, source)
            else:
                _pass(ctx, buffers, matrix.dtype, (taker, source), (giver, target))
            if whole is not None and target is not None and not np.may_share_memory(whole, target):
                _put(mine, whole, incoming, target)

        def done(box: Box | None = mine, values: Array | None = whole) -> None:
            if box is not None and values is not None:
                write(box, values)

        together(ctx, path, done)
        ctx.progress((number + 1) / rounds.count, f"box {number + 1} of {rounds.count}")


def _serves(group_of: dict[int, tuple[int, ...]], rank: int, taker: int) -> bool:
    """Whether `rank`, among all ranks with the same elements, sends them to `taker`."""
    group = group_of.get(rank)
    if group is None:
        return False
    return rank == (taker if taker in group else group[taker % len(group)])


def _common(box: Box | None, local_indices: LocalIndices) -> LocalIndices:
    """The intersection of a box and a rank's part of the matrix, as global indices."""
    if box is not None:
        rows, cols = (
            clip(local_indices.rows, box.rows.start, box.rows.stop),
            clip(local_indices.cols, box.cols.start, box.cols.stop),
        )
        if rows and cols:
            return LocalIndices(rows, cols)
    return LocalIndices(range(0), range(0))


def _within(box: Box | None, values: Array, part: LocalIndices) -> Array:
    """A box's elements of a part: a view, or a copy if the part lies in several blocks."""
    assert box is not None
    rows, cols = selector(part.rows, box.rows.start), selector(part.cols, box.cols.start)
    return taken(values, rows, cols)


def _put(box: Box | None, values: Array, part: LocalIndices, elements: Array) -> None:
    assert box is not None
    rows, cols = selector(part.rows, box.rows.start), selector(part.cols, box.cols.start)
    put(values, rows, cols, elements)


def _local(matrix: DistMatrix, part: LocalIndices) -> Array:
    return matrix.local[positions(matrix.rows, part.rows), positions(matrix.cols, part.cols)]


def _cuts(shape: tuple[int, int], itemsize: int) -> Iterator[tuple[slice, slice]]:
    """Regions of at most `MESSAGE` bytes, the same on both sides of a message."""
    m, n = shape
    width = max(1, min(n, MESSAGE // itemsize))
    height = max(1, MESSAGE // (width * itemsize))
    for i in range(0, m, height):
        for j in range(0, n, width):
            yield slice(i, i + height), slice(j, j + width)


def _pass(
    ctx: Context,
    buffers: Buffers,
    dtype: np.dtype[Any],
    to: tuple[int, Array | None],
    frm: tuple[int, Array | None],
) -> None:
    """Send one share and receive another, C-ordered and cast before sending."""
    (taker, source), (giver, target) = to, frm
    sends = [] if source is None else list(_cuts(source.shape, dtype.itemsize))
    receives = [] if target is None else list(_cuts(target.shape, dtype.itemsize))
    for k in range(max(len(sends), len(receives))):
        request = None
        place = buffer = None
        if target is not None and k < len(receives):
            place = target[receives[k]]
            buffer = buffers.take("received", place.shape, dtype)
            request = ctx.comm.Irecv(buffer.reshape(-1).view(np.uint8), giver, TAG)
        if source is not None and k < len(sends):
            view = source[sends[k]]
            packed = buffers.take("sent", view.shape, dtype)
            copy_kernels.copy(packed, view)
            ctx.comm.Send(packed.reshape(-1).view(np.uint8), taker, TAG)
        if request is not None and place is not None and buffer is not None:
            request.Wait()
            copy_kernels.copy(place, buffer)
