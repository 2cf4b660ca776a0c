"""Exchanges between all pairs of ranks: each sends a share of an array to each, and receives one.

Ranks exchange in pairs at increasing distance. Every rank computes which elements it sends and
receives, so no index travels, and both sides of a message cut it alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mpi_workers.matrix import copy_kernels, tags
from mpi_workers.matrix.layout import IndexArray, Shape, as_slice, put, taken

if TYPE_CHECKING:
    from mpi4py import MPI

MESSAGE = 16 << 20  # 16 MiB: far below MPI's 2 GiB

Array = NDArray[Any]
Order = Literal["C", "F"]


class Buffers:
    """Memory that is reused: touching fresh memory costs more than the copy."""

    def __init__(self) -> None:
        self._held: dict[str, Array] = {}

    def take(self, what: str, shape: Shape, dtype: np.dtype[Any], order: Order = "C") -> Array:
        """An array in this order, valid until the same name is taken again."""
        nbytes = shape[0] * shape[1] * dtype.itemsize
        held = self._held.get(what)
        if held is None or held.nbytes < nbytes:
            held = self._held[what] = np.empty(nbytes, np.uint8)
        return held[:nbytes].view(dtype).reshape(shape, order=order)


class Share(NamedTuple):
    """The elements of an array that a rank sends to another, or receives from it."""

    array: Array
    rows: slice | IndexArray
    cols: slice | IndexArray

    @property
    def shape(self) -> Shape:
        return len(_places(self.rows)), len(_places(self.cols))

    def cuts(self, itemsize: int, order: Order) -> Iterator[Share]:
        """Parts of at most `MESSAGE` bytes, of whole lines in this order if possible."""
        m, n = self.shape
        length = max(1, min(n if order == "C" else m, MESSAGE // itemsize))
        lines = max(1, MESSAGE // (length * itemsize))
        height, width = (lines, length) if order == "C" else (length, lines)
        for j in range(0, n, width):
            for i in range(0, m, height):
                yield Share(self.array, _cut(self.rows, i, height), _cut(self.cols, j, width))

    def elements(self) -> Array:
        """A view if slices select both rows and columns, else a copy."""
        return taken(self.array, self.rows, self.cols)

    def set(self, values: Array) -> None:
        """Replace the elements."""
        if isinstance(self.rows, slice) and isinstance(self.cols, slice):
            copy_kernels.copy(self.elements(), values)
        else:
            put(self.array, self.rows, self.cols, values)


NOTHING = Share(np.empty((0, 0)), slice(0, 0), slice(0, 0))


def _places(selected: slice | IndexArray) -> range | IndexArray:
    if isinstance(selected, slice):
        return range(selected.start, selected.stop, selected.step or 1)
    return selected


def _cut(selected: slice | IndexArray, start: int, count: int) -> slice | IndexArray:
    part = _places(selected)[start : start + count]
    return as_slice(part) if isinstance(part, range) else part


def serves(groups: Mapping[int, Sequence[int]], giver: int, taker: int) -> bool:
    """Whether `giver`, among all ranks with the same elements, sends them to `taker`.

    `groups`: for each rank that takes part, the ranks with its elements (`Distribution.owners`).
    """
    group = groups.get(giver, ())
    if taker in group or not group:
        return giver == taker and bool(group)
    return giver == group[taker % len(group)]


def exchange(
    comm: MPI.Intracomm,
    dtype: np.dtype[Any],
    outgoing: Callable[[int], Share],
    incoming: Callable[[int], Share],
    order: Order,
    buffers: Buffers | None = None,
) -> None:
    """Send a share to each rank and receive one from each, cast before sending. Collective.

    Parameters
    ----------
    dtype : dtype
        Of the elements that travel.
    outgoing, incoming : callable
        The share for a rank, and from a rank: of the same shape on both sides.
    order : str
        In which elements are sent, the same on all ranks.
    buffers : Buffers, optional
        Memory for two messages.
    """
    room = buffers or Buffers()
    for distance in range(comm.size):
        taker, giver = (comm.rank + distance) % comm.size, (comm.rank - distance) % comm.size
        swap(comm, dtype, taker, outgoing(taker), giver, incoming(giver), order, room)


def swap(
    comm: MPI.Intracomm,
    dtype: np.dtype[Any],
    taker: int,
    outgoing: Share,
    giver: int,
    incoming: Share,
    order: Order,
    room: Buffers,
) -> None:
    """Send a share to one rank and receive one from another, message by message; see `exchange`."""
    sends, receives = (share.cuts(dtype.itemsize, order) for share in (outgoing, incoming))
    for cut, place in zip_longest(sends, receives):
        if taker == comm.rank:
            place.set(cut.elements())
            continue
        if place is not None:
            arrived = room.take("received", place.shape, dtype, order)
            request = comm.Irecv(_raw(arrived, order), giver, tags.PAIRWISE)
        if cut is not None:
            values = cut.elements()
            flags = values.flags
            contiguous = flags.c_contiguous if order == "C" else flags.f_contiguous
            if values.dtype != dtype or not contiguous:
                packed = room.take("sent", cut.shape, dtype, order)
                copy_kernels.copy(packed, values)
                values = packed
            comm.Send(_raw(values, order), taker, tags.PAIRWISE)
        if place is not None:
            request.Wait()
            place.set(arrived)


def _raw(array: Array, order: Order) -> Array:
    return array.reshape(-1, order=order).view(np.uint8)
