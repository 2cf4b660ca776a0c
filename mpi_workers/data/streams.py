"""A node's share of a block as the payload of one frame: cut, packed and sent; received, placed.

Blocks one below the other travel as one array.

Both ends cut the share into the same pieces (`node_shares`), so no index is sent, and pass them
through a buffer that stays in cache. Elements travel in the client's order: its end copies without
a transpose, or not at all where a piece is contiguous; the node's end splits pieces by rank.

A message for each block costs both ends some 100 us, and a copy into one array another pass.
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
from mpi_workers.matrix.node_shares import Box, Region, boxes, chunk_bytes, spans
from mpi_workers.wire.blocking import Connection
from mpi_workers.wire.frames import Body, ConnectionLost, Kind

STEP_BYTES = 64 << 20  # 64 MiB: progress is reported, and the ranks are checked, this often


UNCUT_BYTES = 512 << 20  # 512 MiB: up to this size a block is one step if progress is not reported


class Step(NamedTuple):
    """A region of the matrix that moves in one step, or a part of it."""

    array: Array
    region: Region

    def cut(self, count: int) -> Iterator[Step]:
        """The step in `count` parts, across the axis with the larger stride."""
        array, region = self
        by_row = abs(array.strides[0]) > abs(array.strides[1])
        length = len(array) if by_row else array.shape[1]
        for k in range(count):
            start, stop = length * k // count, length * (k + 1) // count
            if start == stop:
                continue
            if by_row:
                part = region._replace(row0=region.row0 + start, row1=region.row0 + stop)
                yield Step(array[start:stop], part)
            else:
                part = region._replace(col0=region.col0 + start, col1=region.col0 + stop)
                yield Step(array[:, start:stop], part)

    def holders(self, target: TransferTarget, ranks: Iterable[int]) -> list[int]:
        """The ranks that hold an element of the region."""
        return [r for r in ranks if self.region.of(target.distribution.local_indices(r)).size]


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
        bounds = [row, row + array.shape[0], col, col + array.shape[1]]
        whole = Step(array, Region.checked(list(map(int, bounds)), shape))
        parts = _parts(whole, most) if array.nbytes > limit else [whole] if array.size else []
        for part in parts:
            if steps and nbytes + part.array.nbytes > most:
                yield steps
                steps, nbytes = [], 0
            steps.append(part)
            nbytes += part.array.nbytes
    if steps:
        yield steps


def _parts(whole: Step, most: int) -> Iterator[Step]:
    """The step in parts of at most `most` bytes."""
    array, region = whole
    height, width = _largest(array, most)
    for i in range(0, len(array), height):
        for j in range(0, array.shape[1], width):
            part = array[i : i + height, j : j + width]
            row0, col0 = region.row0 + i, region.col0 + j
            yield Step(part, Region(row0, row0 + part.shape[0], col0, col0 + part.shape[1]))


def _largest(array: Array, most: int) -> tuple[int, int]:
    """Rows and columns of a part of at most this many bytes: whole rows if one of them fits."""
    width = min(array.shape[1], max(1, most // array.itemsize))
    return max(1, most // (width * array.itemsize)), width


Order = Literal["C", "F"]

IN_PLACE_BYTES = 64 << 10  # 64 KiB: less is copied together, which costs less than a system call


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
    def size(self) -> int:
        return sum(box.size for box in self.boxes)

    @property
    def nbytes(self) -> int:
        return self.size * int(self.dtype.itemsize)

    def pieces(self) -> Iterator[Box]:
        for box in self.boxes:
            if self.order == "C":  # in tiles: ranks store columns
                yield from box.pieces(self.dtype.itemsize, self.chunk, tiled=True)
            else:
                for piece in box.transposed().pieces(self.dtype.itemsize, self.chunk, tiled=False):
                    yield piece.transposed()

    def shaped(self, packed: Array, piece: Box) -> Array:
        """The 4-D view of a piece's elements that are contiguous in the order of travel."""
        if self.order == "C":
            return packed.reshape(piece.shape)
        return packed.reshape(piece.transposed().shape).transpose(2, 3, 0, 1)

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


class Elements(Protocol):
    """Where the elements of a share are, at one end of a stream."""

    def views(self, piece: Box) -> Iterable[Array]:
        """A piece in the order of travel, as 4-D views; nothing: use `copy`."""

    def copy(self, packed: Array, piece: Box, *, out: bool) -> None:
        """Copy a piece into (`out`) or from a 4-D buffer."""


class InArray:
    """Elements in an array of any strides, which covers `region`."""

    def __init__(self, array: Array, region: Region) -> None:
        self._array = array
        self._region = region

    def views(self, piece: Box) -> list[Array]:
        return [piece.view(self._array, self._region.row0, self._region.col0)]

    def copy(self, packed: Array, piece: Box, *, out: bool) -> None:
        (view,) = self.views(piece)
        if out:
            packed[...] = view
        else:
            view[...] = packed


class StreamTimes(NamedTuple):
    """Seconds that one end of a stream spent copying elements, and moving bytes."""

    copying: float
    moving: float


def send_stream(
    connection: Connection,
    kind: Kind,
    body: Body,
    share: Share,
    elements: Elements,
    *,
    stop_on_reply: bool = False,
) -> StreamTimes:
    """Send a share as one frame.

    Parameters
    ----------
    connection : Connection
        Its socket's timeout is set, and applies to each piece.
    kind, body
        Of the frame.
    share : Share
        The elements to send; the receiver must use an equal one.
    elements : Elements
        Where they are.
    stop_on_reply : bool
        Whether to stop when the other end sends something: it can only be a refusal.

    Raises
    ------
    ConnectionLost
        If the other end is gone, accepts no bytes in time, or has replied.
    """
    connection.begin(kind, body, share.nbytes)
    copying = moving = 0.0
    staging = np.empty(0, share.dtype)
    clock = time.perf_counter()
    for group in _together(share.pieces(), share.chunk // share.dtype.itemsize):
        parts = share.in_place(elements, group)
        if not parts:
            size = sum(piece.size for piece in group)
            if staging.size < size:
                staging = np.empty(size, share.dtype)
            parts, filled = [staging[:size]], 0
            for piece in group:
                part = staging[filled : filled + piece.size]
                elements.copy(share.shaped(part, piece), piece, out=True)
                filled += piece.size
        packed_at = time.perf_counter()
        if stop_on_reply and connection.readable():
            raise ConnectionLost("the other end refused the data")
        for part in parts:
            connection.write(part.view(np.uint8).data)
        now = time.perf_counter()
        copying += packed_at - clock
        moving += now - packed_at
        clock = now
    return StreamTimes(copying, moving)


def receive_stream(connection: Connection, share: Share, elements: Elements) -> StreamTimes:
    """Receive the payload of `send_stream`.

    Raises
    ------
    ConnectionLost, TimeoutError
        If the other end is gone, or sends nothing within the socket's timeout.
    """
    copying = moving = 0.0
    staging = np.empty(0, share.dtype)
    clock = time.perf_counter()
    for group in _together(share.pieces(), share.chunk // share.dtype.itemsize):
        parts = share.in_place(elements, group)
        in_place = bool(parts)
        if not in_place:
            size = sum(piece.size for piece in group)
            if staging.size < size:
                staging = np.empty(size, share.dtype)
            parts = [staging[:size]]
        for part in parts:
            connection.read_into(part.view(np.uint8).data)
        arrived = time.perf_counter()
        if not in_place:
            filled = 0
            for piece in group:
                part = staging[filled : filled + piece.size]
                elements.copy(share.shaped(part, piece), piece, out=False)
                filled += piece.size
        now = time.perf_counter()
        moving += arrived - clock
        copying += now - arrived
        clock = now
    return StreamTimes(copying, moving)


def _together(pieces: Iterable[Box], most: int) -> Iterator[list[Box]]:
    """Neighbouring pieces of at most `most` elements together: small system calls are slow."""
    group: list[Box] = []
    size = 0
    for piece in pieces:
        if group and size + piece.size > most:
            yield group
            group, size = [], 0
        group.append(piece)
        size += piece.size
    if group:
        yield group


class RowStack:
    """C-ordered arrays with the same columns, cut like the array that they make."""

    def __init__(self, arrays: Sequence[Array]) -> None:
        self.arrays = arrays
        self.ends = list(accumulate(map(len, arrays)))
        self.shape = (self.ends[-1], int(arrays[0].shape[1]))
        self.strides = arrays[0].strides
        self.nbytes = sum(array.nbytes for array in arrays)

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, rows: slice) -> RowStack:
        parts = []
        for array, end in zip(self.arrays, self.ends, strict=True):
            start = end - len(array)
            part = array[max(0, rows.start - start) : max(0, rows.stop - start)]
            if len(part):
                parts.append(part)
        return RowStack(parts)


class InStack:
    """Elements in a stack of arrays, which covers `region`: see `streams.Elements`."""

    def __init__(self, stack: RowStack, region: Region) -> None:
        self._stack = stack
        self._region = region

    def views(self, piece: Box) -> Iterator[Array]:
        rows, (row0, _, col0, _) = piece.rows, self._region
        stop = rows.start + (rows.runs - 1) * rows.period + rows.width
        runs, ends = Runs(rows.start, rows.width, rows.period), self._stack.ends
        for i in range(bisect_right(ends, rows.start - row0), len(ends)):
            array, end = self._stack.arrays[i], row0 + ends[i]
            start = end - len(array)
            if start >= stop:
                break
            for span in spans(runs, max(start, rows.start), min(end, stop)):
                yield Box(span, piece.cols).view(array, start, col0)

    def copy(self, packed: Array, piece: Box, *, out: bool) -> None:
        flat, at = packed.reshape(-1), 0
        for view in self.views(piece):
            part = flat[at : at + view.size].reshape(view.shape)
            if out:
                part[...] = view
            else:
                view[...] = part
            at += view.size


def stackable(array: Array, dtype: np.dtype[Any]) -> bool:
    """Whether an array can be a part of a stack: rows of this dtype, in C order."""
    return bool(
        array.dtype == dtype and array.strides[0] > array.strides[1] == array.dtype.itemsize
    )


def stacked(steps: Sequence[Step], dtype: np.dtype[Any]) -> list[Step]:
    """The same elements; blocks one below the other are one step."""
    found: list[Step] = []
    stack: list[Step] = []

    def flush() -> None:
        if len(stack) > 1:
            region = stack[0].region._replace(row1=stack[-1].region.row1)
            # It is used as an array, by those who stream it.
            found.append(Step(cast("Array", RowStack([step.array for step in stack])), region))
        else:
            found.extend(stack)
        stack.clear()

    for step in sorted(steps, key=lambda step: (step.region.col0, step.region.row0)):
        here, last = step.region, stack[-1].region if stack else None
        follows = last and (last.row1, last[2:]) == (here.row0, here[2:])
        if not (follows and stackable(step.array, dtype)):
            flush()
        if stackable(step.array, dtype):
            stack.append(step)
        else:
            found.append(step)
    flush()
    return found
