"""A node's share of a block as the payload of one frame: cut, packed and sent; received, placed.

Blocks one below the other travel as one array: a message for each block costs both ends some
100 us, and a copy into one array another pass.

Both ends cut the share into the same pieces (`node_shares`), so no index is sent, and pass them
through a buffer that stays in cache. Elements travel in the client's order: its end copies without
a transpose, or not at all where a piece is contiguous; the node's end splits pieces by rank.
"""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from typing import Any, Literal, NamedTuple, Protocol, cast

import numpy as np

from mpi_workers.data.description import TransferTarget
from mpi_workers.matrix.copy_kernels import Array, ArrayBlock
from mpi_workers.matrix.layout import Distribution, Runs, Shape
from mpi_workers.matrix.neighbours import joined
from mpi_workers.matrix.node_shares import Box, Region, boxes, chunk_bytes, spans
from mpi_workers.wire.blocking import Connection
from mpi_workers.wire.frames import ConnectionLost

STEP_BYTES = 64 << 20  # 64 MiB: progress is reported, and the ranks are checked, this often
UNCUT_BYTES = 512 << 20  # 512 MiB: up to this size a block is one step if progress is not reported


class Step(NamedTuple):
    """A region of the matrix that moves in one step, or a part of it."""

    array: Array
    region: Region

    def part(self, rows: slice, cols: slice) -> Step:
        """Some of its rows and columns."""
        array = self.array[rows, cols]
        row0, _, col0, _ = self.region
        row0, col0 = row0 + rows.start, col0 + cols.start
        return Step(array, Region(row0, row0 + array.shape[0], col0, col0 + array.shape[1]))

    def cut(self, count: int) -> Iterator[Step]:
        """The step in `count` parts, across the axis with the larger stride."""
        m, n = self.array.shape
        by_row = is_by_row(self.array)
        length = m if by_row else n
        for k in range(count):
            some = slice(length * k // count, length * (k + 1) // count)
            if some.start < some.stop:
                yield self.part(*((some, slice(0, n)) if by_row else (slice(0, m), some)))

    def holders(self, target: TransferTarget, ranks: Iterable[int]) -> list[int]:
        """The ranks that hold an element of the region."""
        return [r for r in ranks if self.region.of(target.distribution.local_indices(r)).size]


def is_by_row(array: Array) -> bool:
    """Whether elements of a row are nearer to each other than those of a column."""
    return abs(array.strides[0]) > abs(array.strides[1])


def steps_of(
    blocks: Iterable[ArrayBlock], shape: Shape, *, watched: bool, buffer_bytes: int | None = None
) -> Iterator[list[Step]]:
    """Cut blocks of a matrix into steps that move together.

    Each moves at most `buffer_bytes` if they are given, but at least one element; otherwise about
    `STEP_BYTES`, and a block up to `UNCUT_BYTES` whole if no progress is reported.
    """
    most = STEP_BYTES if buffer_bytes is None else buffer_bytes
    limit = most if watched or buffer_bytes is not None else UNCUT_BYTES
    steps: list[Step] = []
    nbytes = 0
    for array, (row, col) in blocks:
        m, n = array.shape
        whole = Region.checked(list(map(int, (row, row + m, col, col + n))), shape)
        for part in whole.parts(m * n if array.nbytes <= limit else most // array.itemsize):
            its = array[part.row0 - row : part.row1 - row, part.col0 - col : part.col1 - col]
            if steps and nbytes + its.nbytes > most:
                yield steps
                steps, nbytes = [], 0
            steps.append(Step(its, part))
            nbytes += its.nbytes
    if steps:
        yield steps


Order = Literal["C", "F"]

IN_PLACE_BYTES = 64 << 10  # 64 KiB: less is copied together, which costs less than a system call


class Elements(Protocol):
    """Where the elements of a share are, at one end of a stream."""

    def views(self, piece: Box) -> Iterable[Array]:
        """A piece in the order of travel, as 4-D views; nothing: use `copy`."""

    def copy(self, packed: Array, piece: Box, *, out: bool) -> None:
        """Copy a piece into (`out`) or from a 4-D buffer."""


class Share(NamedTuple):
    """The part of a region that some ranks hold, and the order in which it travels."""

    boxes: list[Box]
    dtype: np.dtype[Any]
    order: Order
    chunk: int

    @classmethod
    def of(
        cls,
        distribution: Distribution,
        ranks: list[int],
        region: Region,
        dtype: np.dtype[Any],
        order: Order,
    ) -> Share:
        return cls(boxes(distribution, ranks, region), dtype, order, chunk_bytes(len(ranks)))

    @property
    def nbytes(self) -> int:
        return sum(box.size for box in self.boxes) * int(self.dtype.itemsize)

    def pieces(self) -> Iterator[Box]:
        for box in self.boxes:
            if self.order == "C":  # in tiles: ranks store columns
                yield from box.pieces(self.dtype.itemsize, self.chunk, tiled=True)
            else:
                for piece in box.transposed().pieces(self.dtype.itemsize, self.chunk, tiled=False):
                    yield piece.transposed()

    def groups(self) -> Iterator[list[Box]]:
        """Neighbouring pieces of up to a chunk together: small system calls are slow."""
        group: list[Box] = []
        size, most = 0, self.chunk // self.dtype.itemsize
        for piece in self.pieces():
            if group and size + piece.size > most:
                yield group
                group, size = [], 0
            group.append(piece)
            size += piece.size
        if group:
            yield group

    def in_place(self, elements: Elements, group: Sequence[Box]) -> list[Array]:
        """The elements of some pieces as 1-D views, if each is contiguous and not small."""
        if len(group) > 1:
            return []
        found = []
        for view in elements.views(group[0]):
            ordered = view if self.order == "C" else view.transpose(2, 3, 0, 1)
            if view.dtype != self.dtype or not ordered.flags.c_contiguous:
                return []
            found.append(ordered.reshape(-1))
        least = IN_PLACE_BYTES * (len(found) - 1)
        return found if group[0].size * self.dtype.itemsize >= least else []

    def copy(self, elements: Elements, packed: Array, group: Sequence[Box], *, out: bool) -> None:
        """Copy some pieces into (`out`) or from a 1-D buffer."""
        at = 0
        for piece in group:
            flat = packed[at : at + piece.size]
            at += piece.size
            if self.order == "C":
                shaped = flat.reshape(piece.shape)
            else:
                shaped = flat.reshape(piece.transposed().shape).transpose(2, 3, 0, 1)
            elements.copy(shaped, piece, out=out)


class StreamTimes(NamedTuple):
    """Seconds that one end of a stream spent copying elements, and moving bytes."""

    copying: float
    moving: float


def move_stream(
    connection: Connection,
    share: Share,
    elements: Elements,
    *,
    out: bool,
    stop_on_reply: bool = False,
) -> StreamTimes:
    """Send (`out`) or receive a share, the payload of a frame whose header has passed.

    Parameters
    ----------
    connection : Connection
        Its socket's timeout is set, and applies to each piece.
    share : Share
        The elements; the other end must use an equal one.
    elements : Elements
        Where they are.
    out : bool
        Whether to send.
    stop_on_reply : bool
        Whether to stop when the other end sends something: it can only be a refusal.

    Raises
    ------
    ConnectionLost, TimeoutError
        If the other end is gone, moves no bytes in time, or has replied.
    """
    copying = moving = 0.0
    staging = np.empty(0, share.dtype)
    for group in share.groups():
        clock = time.perf_counter()
        parts = share.in_place(elements, group)
        in_place = bool(parts)
        if not in_place:
            size = sum(piece.size for piece in group)
            if staging.size < size:
                staging = np.empty(size, share.dtype)
            parts = [staging[:size]]
            if out:
                share.copy(elements, staging, group, out=True)
        begun = time.perf_counter()
        if stop_on_reply and connection.readable():
            raise ConnectionLost("the other end refused the data")
        transfer = connection.write if out else connection.read_into
        for part in parts:
            transfer(part.view(np.uint8).data)
        ended = time.perf_counter()
        if not (in_place or out):
            share.copy(elements, staging, group, out=False)
        moving += ended - begun
        copying += begun - clock + time.perf_counter() - ended
    return StreamTimes(copying, moving)


class RowStack:
    """C-ordered arrays with the same columns, cut like the array that they make."""

    def __init__(self, arrays: Sequence[Array]) -> None:
        self.arrays = arrays
        self.ends = list(accumulate(map(len, arrays)))
        self.shape = (self.ends[-1], int(arrays[0].shape[1]))
        self.strides = arrays[0].strides
        self.nbytes = sum(array.nbytes for array in arrays)

    def __getitem__(self, where: tuple[slice, slice]) -> RowStack:
        """Some of the rows, with all columns."""
        rows, parts = where[0], []
        for array, end in zip(self.arrays, self.ends, strict=True):
            start = end - len(array)
            part = array[max(0, rows.start - start) : max(0, rows.stop - start)]
            if len(part):
                parts.append(part)
        return RowStack(parts)


class InArrays:
    """Elements in an array of any strides or in a stack, which covers `region`."""

    def __init__(self, array: Array | RowStack, region: Region) -> None:
        self._stack = array if isinstance(array, RowStack) else RowStack([array])
        self._region = region

    def views(self, piece: Box) -> Iterator[Array]:
        rows, (row0, _, col0, _) = piece.rows, self._region
        stop = rows.start + (rows.runs - 1) * rows.period + rows.width
        runs = Runs(rows.start, rows.width, rows.period)
        ends = self._stack.ends
        for i in range(bisect_right(ends, rows.start - row0), len(ends)):
            array = self._stack.arrays[i]
            end = row0 + ends[i]
            start = end - len(array)
            if start >= stop:
                break
            if start <= rows.start and stop <= end:
                yield piece.view(array, start, col0)
                break
            for span in spans(runs, max(start, rows.start), min(end, stop)):
                yield Box(span, piece.cols).view(array, start, col0)

    def copy(self, packed: Array, piece: Box, *, out: bool) -> None:
        row = 0
        for view in self.views(piece):
            # A view has whole runs of rows, or a part of one, and all of the piece's columns.
            runs, width = view.shape[:2]
            first, place = divmod(row, piece.rows.width)
            part = packed[first : first + runs, place : place + width]
            row += runs * width
            if out:
                part[...] = view
            else:
                view[...] = part


def stackable(array: Array, dtype: np.dtype[Any]) -> bool:
    """Whether an array can be a part of a stack: rows of this dtype, in C order."""
    return bool(
        array.dtype == dtype and array.strides[0] > array.strides[1] == array.dtype.itemsize
    )


def stacked(steps: Sequence[Step], dtype: np.dtype[Any]) -> list[Step]:
    """The same elements; blocks one below the other are one step."""
    rows, found = [], []
    for i, step in enumerate(steps):
        if stackable(step.array, dtype):
            rows.append((step.region, [i]))
        else:
            found.append(step)
    for bounds, members in joined(rows, 0):
        array = steps[members[0]].array
        if len(members) > 1:  # it is used as an array, by those who stream it
            array = cast("Array", RowStack([steps[i].array for i in members]))
        found.append(Step(array, Region(*bounds)))
    return found
