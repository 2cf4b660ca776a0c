"""Copies a matrix from any layout to any other, over MPI.

Each rank computes which ranks need its elements (`partners.py`), so no index is sent. Between
Elemental's layouts the indices of both sides are ranges, and their intersection is a slice of the
local block; in blocks it may be a list of positions. Ranks exchange in pairs at a growing distance,
so that no rank is the first target of all others, in messages of `MESSAGE` bytes, far below MPI's
limit of 2 GiB.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import zip_longest
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mpi_workers.matrix import copy_kernels
from mpi_workers.matrix.dist_matrix import DistMatrix
from mpi_workers.matrix.layout import Distribution, Shape, positions
from mpi_workers.matrix.partners import NO_PART, Part, givers, takers
from mpi_workers.matrix.regions import stream
from mpi_workers.matrix.runs import IndexArray, Indices, Runs, as_array, evenly, put, taken
from mpi_workers.rank.communicator import GangComm

MESSAGE = 16 << 20  # 16 MiB
TAG = 7
ALL = slice(None)


def exchanges(
    source: Distribution, result: Distribution, rank: int
) -> Iterator[tuple[tuple[int, Part], tuple[int, Part]]]:
    """The elements that a rank sends, with their taker, and those that it receives, with the giver.

    In the order of the distances; those at which this rank has nothing to do are left out.
    """
    size = source.size
    to, frm = takers(source, result, rank), givers(source, result, rank)
    outgoing = {(taker - rank) % size: part for taker, part in zip(*to, strict=True)}
    incoming = {(rank - giver) % size: part for giver, part in zip(*frm, strict=True)}
    for distance in sorted({*outgoing, *incoming}):
        taker, giver = (rank + distance) % size, (rank - distance) % size
        yield (
            (taker, outgoing.get(distance, NO_PART)),
            (giver, incoming.get(distance, NO_PART)),
        )


class _Selection(NamedTuple):
    """Elements of a rank's block: a view, and lists of positions in it where no view selects."""

    local: NDArray[Any]
    rows: slice | IndexArray  # of a message, or everything
    cols: slice | IndexArray

    @classmethod
    def of(cls, matrix: DistMatrix, part: Part) -> _Selection:
        both = matrix.distribution.runs(matrix.rank)
        if both is None or not part.size:
            return cls(matrix.local[:0, :0], ALL, ALL)
        rows = _positions(matrix.rows, part.rows, both[0])
        cols = _positions(matrix.cols, part.cols, both[1])
        down, across = (where if isinstance(where, slice) else ALL for where in (rows, cols))
        lists = (ALL if isinstance(where, slice) else where for where in (rows, cols))
        return cls(matrix.local[down, across], *lists)

    @property
    def is_view(self) -> bool:
        return isinstance(self.rows, slice) and isinstance(self.cols, slice)

    @property
    def shape(self) -> Shape:
        m, n = self.local.shape
        return _count(self.rows, m), _count(self.cols, n)

    def buffer(self) -> NDArray[Any]:
        """Memory for the elements."""
        return np.empty(self.shape, self.local.dtype, order="F")

    def cuts(self) -> Iterator[_Selection]:
        """In messages."""
        for rows, cols in stream(self.shape, self.local.itemsize, MESSAGE):
            yield _Selection(self.local, _cut(self.rows, rows), _cut(self.cols, cols))

    def get(self) -> NDArray[Any]:
        return taken(self.local, self.rows, self.cols)

    def packed(self) -> NDArray[Any]:
        return np.asfortranarray(self.get())

    def put(self, values: NDArray[Any]) -> None:
        put(self.local, self.rows, self.cols, values)


def _positions(owned: Indices, part: range | IndexArray, runs: Runs) -> slice | IndexArray:
    if isinstance(owned, range) and isinstance(part, range):
        return positions(owned, part)
    indices = as_array(part) if isinstance(part, range) else part
    return evenly(runs.positions(indices))


def _count(chosen: slice | IndexArray, length: int) -> int:
    return len(range(length)[chosen]) if isinstance(chosen, slice) else chosen.size


def _cut(chosen: slice | IndexArray, part: slice) -> slice | IndexArray:
    return part if isinstance(chosen, slice) else chosen[part]


def redistribute(source: DistMatrix, result: DistMatrix, comm: GangComm) -> None:
    """Copy `source` into `result`, which has the same shape and dtype and any layout.

    Collective over the gang. Cost: each element crosses the network at most once per copy in the
    result; two messages of staging memory.

    Raises
    ------
    ValueError
        If shapes or dtypes differ.
    """
    if source.shape != result.shape or source.dtype != result.dtype:
        raise ValueError(f"cannot redistribute {source!r} into {result!r}")
    for to, frm in exchanges(source.distribution, result.distribution, source.rank):
        here, there = _Selection.of(source, to[1]), _Selection.of(result, frm[1])
        if to[0] != source.rank:
            _pairwise(here.cuts(), there.cuts(), comm, to[0], frm[0])
        elif here.is_view and there.is_view:
            copy_kernels.copy(there.local, here.local)
        else:
            for cut, place in zip(here.cuts(), there.cuts(), strict=True):
                place.put(cut.get())


def _pairwise(
    outgoing: Iterator[_Selection],
    incoming: Iterator[_Selection],
    comm: GangComm,
    taker: int,
    giver: int,
) -> None:
    """Send elements to one rank and receive some from another, message by message."""
    for cut, place in zip_longest(outgoing, incoming):
        if cut is not None and place is not None:
            packed, buffer = cut.packed(), place.buffer()
            comm.Sendrecv(_raw(packed), taker, TAG, _raw(buffer), giver, TAG)
            place.put(buffer)
        elif cut is not None:
            comm.Send(_raw(cut.packed()), taker, TAG)
        elif place is not None:
            buffer = place.buffer()
            comm.Recv(_raw(buffer), giver, TAG)
            place.put(buffer)


def _raw(array: NDArray[Any]) -> NDArray[np.uint8]:
    return array.reshape(-1, order="F").view(np.uint8)
