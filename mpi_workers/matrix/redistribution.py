"""Copies a matrix from any layout to any other, over MPI, between the ranks that share elements.

Each rank computes which ranks need its elements (`partners`), so no index is sent. Between
Elemental's layouts the indices of both sides are ranges, and their intersection is a slice of the
local block; in blocks it may be a list of positions. Ranks exchange in pairs at a growing distance,
so that no rank is the first target of all others (`pairwise`).

Each rank looks at all others at once, in arithmetic on arrays: 0.3 ms on 8192 ranks, where a loop
over ranks takes 0.1 to 0.2 s. Between Elemental's layouts common indices are ranges; with blocks
they are lists, which each rank computes from its own indices.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache
from math import gcd
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mpi_workers.matrix.dist_matrix import DistMatrix
from mpi_workers.matrix.layout import (
    ELEMENTS,
    Distribution,
    Grid,
    IndexArray,
    Indices,
    LocalIndices,
    Runs,
    as_array,
    evenly,
    owners,
    positions,
    rank_runs,
)
from mpi_workers.matrix.pairwise import NOTHING, Buffers, Share, swap

if TYPE_CHECKING:
    from mpi4py import MPI

Ranks = NDArray[np.int64]
Choice = Callable[[Ranks], Any]  # of ranks, as an array of bool


class Part(NamedTuple):
    """Rows and columns that two ranks exchange."""

    rows: range | IndexArray
    cols: range | IndexArray

    @property
    def size(self) -> int:
        return len(self.rows) * len(self.cols)


NO_PART = Part(range(0), range(0))


class _Parts(NamedTuple):
    """A layout on all ranks, in blocks; entries of ranks that take no part are -1."""

    rows: Ranks  # first row of blocks of each rank
    cols: Ranks
    row_step: int
    col_step: int
    places: Ranks  # of each rank in its group of copies
    copies: int

    def alike(self, rank: int) -> NDArray[np.bool_]:
        """Which ranks are in the group of copies of one."""
        if self.places[rank] < 0:
            return np.zeros(len(self.rows), bool)
        same: NDArray[np.bool_] = (self.rows == self.rows[rank]) & (self.cols == self.cols[rank])
        return same


@lru_cache(maxsize=64)
def _parts(layout: str, grid: Grid) -> _Parts:
    """Cost: O(ranks), once per layout and grid."""
    rows, cols, places = (np.full(grid[0] * grid[1], -1) for _ in range(3))
    row_step = col_step = 1
    groups = owners(layout, grid)
    for group in groups:
        both = rank_runs(layout, grid, group[0])
        assert both is not None
        (rows[[*group]], _, row_step), (cols[[*group]], _, col_step) = both
        places[[*group]] = range(len(group))
    return _Parts(rows, cols, row_step, col_step, places, len(groups[0]))


class _Common(NamedTuple):
    """The indices that an ascending range shares with progressions ``start, start + step, ...``.

    By the Chinese remainder theorem the intersection of two arithmetic progressions is one whose
    step is the least common multiple of theirs. The starts are less than the step.
    """

    firsts: Ranks
    step: int
    found: NDArray[np.bool_]  # whether there are any

    @classmethod
    def of(cls, part: range, starts: Ranks, step: int) -> _Common:
        divisor = gcd(part.step, step)
        apart, remainder = np.divmod(starts - part.start, divisor)
        period = step // divisor
        inverse = pow(part.step // divisor, -1, period) if period > 1 else 0
        firsts = part.start + part.step * (apart * inverse % period)
        found = (remainder == 0) & (firsts < part.stop) & (starts >= 0)
        return cls(firsts, part.step * period, found)


class _Lists(NamedTuple):
    """The indices that `part` shares with the blocks of ranks, as lists."""

    lists: list[range | IndexArray]
    numbers: Ranks  # of each rank's list; -1 if there are none

    @classmethod
    def of(cls, part: Indices, starts: Ranks, step: int, block: int) -> _Lists:
        indices = as_array(part)
        owner = indices // block % step
        order = np.argsort(owner, kind="stable")
        found, firsts = np.unique(owner[order], return_index=True)
        number = np.full(step, -1)
        number[found] = range(len(found))
        lists = [_range_if_even(some) for some in np.split(indices[order], firsts[1:])]
        return cls(lists, np.where(starts >= 0, number[starts], -1))


def _range_if_even(indices: IndexArray) -> range | IndexArray:
    even = evenly(indices)
    return range(even.start, even.stop, even.step or 1) if isinstance(even, slice) else indices


class Partners(NamedTuple):
    """Ranks in ascending order, and the elements that each exchanges with one rank."""

    ranks: list[int]
    parts: list[Part]

    @classmethod
    def of(cls, distribution: Distribution, part: LocalIndices, chosen: Choice) -> Partners:
        """The ranks that hold elements of a part of the matrix, and are chosen."""
        if not part.size:
            return cls([], [])
        all_parts = _parts(distribution.layout, distribution.grid)
        block = distribution.block
        if block != ELEMENTS or not (isinstance(part.rows, range) and isinstance(part.cols, range)):
            down = _Lists.of(part.rows, all_parts.rows, all_parts.row_step, block[0])
            across = _Lists.of(part.cols, all_parts.cols, all_parts.col_step, block[1])
            ranks = np.flatnonzero((down.numbers >= 0) & (across.numbers >= 0))
            ranks = ranks[chosen(ranks)]
            pairs = zip(down.numbers[ranks].tolist(), across.numbers[ranks].tolist(), strict=True)
            return cls(ranks.tolist(), [Part(down.lists[i], across.lists[j]) for i, j in pairs])
        rows = _Common.of(part.rows, all_parts.rows, all_parts.row_step)
        cols = _Common.of(part.cols, all_parts.cols, all_parts.col_step)
        ranks = np.flatnonzero(rows.found & cols.found)
        ranks = ranks[chosen(ranks)]
        firsts = zip(rows.firsts[ranks].tolist(), cols.firsts[ranks].tolist(), strict=True)
        m, n = (part.rows.stop, part.cols.stop)
        by = (rows.step, cols.step)
        parts = [Part(range(i, m, by[0]), range(j, n, by[1])) for i, j in firsts]
        return cls(ranks.tolist(), parts)


def partners(source: Distribution, result: Distribution, rank: int, *, giving: bool) -> Partners:
    """The ranks to which this rank gives elements of `source`, or from which it gets its `result`.

    Ranks with copies share the work: one takes from itself if it can, else from the copy whose
    place in the group is its number modulo the copies.
    """
    of = _parts(source.layout, source.grid)

    def chosen(ranks: Ranks) -> Any:
        takers, place = (ranks, of.places[rank]) if giving else (rank, of.places[ranks])
        return np.where(of.alike(rank)[ranks], ranks == rank, takers % of.copies == place)

    here, there = (source, result) if giving else (result, source)
    return Partners.of(there, here.local_indices(rank), chosen)


def exchanges(
    source: Distribution, result: Distribution, rank: int
) -> Iterator[tuple[tuple[int, Part], tuple[int, Part]]]:
    """The elements that a rank sends, with their taker, and those that it receives, with the giver.

    In the order of the distances; those at which this rank has nothing to do are left out.
    """
    size = source.size
    to, frm = (partners(source, result, rank, giving=giving) for giving in (True, False))
    outgoing = {(taker - rank) % size: part for taker, part in zip(*to, strict=True)}
    incoming = {(rank - giver) % size: part for giver, part in zip(*frm, strict=True)}
    for distance in sorted({*outgoing, *incoming}):
        taker, giver = (rank + distance) % size, (rank - distance) % size
        yield (
            (taker, outgoing.get(distance, NO_PART)),
            (giver, incoming.get(distance, NO_PART)),
        )


def redistribute(source: DistMatrix, result: DistMatrix, comm: MPI.Intracomm) -> None:
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
    room = Buffers()
    for (taker, sent), (giver, received) in exchanges(
        source.distribution, result.distribution, source.rank
    ):
        outgoing, incoming = _share(source, sent), _share(result, received)
        swap(comm, source.dtype, taker, outgoing, giver, incoming, "F", room)


def _share(matrix: DistMatrix, part: Part) -> Share:
    """The elements of this rank's part of a matrix at some rows and columns."""
    both = matrix.distribution.runs(matrix.rank)
    if both is None or not part.size:
        return NOTHING
    rows, cols = (
        _positions(owned, some, runs)
        for owned, some, runs in zip((matrix.rows, matrix.cols), part, both, strict=True)
    )
    return Share(matrix.stored, rows, cols)


def _positions(owned: Indices, part: range | IndexArray, runs: Runs) -> slice | IndexArray:
    if isinstance(owned, range) and isinstance(part, range):
        return positions(owned, part)
    indices = as_array(part) if isinstance(part, range) else part
    return evenly(runs.positions(indices))
