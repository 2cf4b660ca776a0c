"""A node's share of a block as the payload of one frame: cut, packed and sent; received, placed.

Both ends cut the share into the same pieces (`node_shares`), so no index is sent, and pass them
through a buffer that stays in cache. Elements travel in the client's order: its end copies without
a transpose, or not at all where a piece is contiguous; the node's end splits pieces by rank.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from mpi_workers.matrix.layout import Distribution
from mpi_workers.matrix.node_shares import Box, boxes, chunk_bytes
from mpi_workers.matrix.regions import Region
from mpi_workers.wire.blocking import Connection
from mpi_workers.wire.frames import Body, ConnectionLost, Kind

Array = NDArray[Any]
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
