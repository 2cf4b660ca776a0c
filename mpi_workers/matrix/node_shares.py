"""The elements of a region, or of some rows, that some ranks hold together: boxes of a stream.

Both ends compute them from the layout.

Ranks of one node hold runs of neighbouring rows or columns. Sent as one array, their elements are
contiguous where those of a single rank are not; the node's data endpoint splits them by rank.
"""

from __future__ import annotations

import itertools
import reprlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from mpi_workers.failures import Failure
from mpi_workers.matrix import copy_kernels
from mpi_workers.matrix.copy_kernels import ArrayBlock, RankPart
from mpi_workers.matrix.layout import (
    NOTHING,
    Distribution,
    Grid,
    LocalIndices,
    Runs,
    Shape,
    clip,
    contiguous,
    rank_runs,
)
from mpi_workers.matrix.sparse_rows import of_layout

_BOUNDS = [int] * 4  # their types: bool is excluded


class Region(NamedTuple):
    """Global rows ``[row0, row1)`` and columns ``[col0, col1)``."""

    row0: int
    row1: int
    col0: int
    col1: int

    @property
    def shape(self) -> Shape:
        return self.row1 - self.row0, self.col1 - self.col0

    def check_within(self, other: Region) -> None:
        """Raise `Failure` (ShapeError) unless this is a part of another region."""
        if (
            self.row0 < other.row0
            or self.row1 > other.row1
            or (self.col0 < other.col0 or self.col1 > other.col1)
        ):
            words = f"{list(self)} is not in the region {list(other)} of the transfer"
            raise Failure("ShapeError", words)

    def parts(self, most: int) -> Iterator[Region]:
        """Parts of at most `most` elements, but at least one: whole rows, where one fits."""
        width = max(1, min(self.col1 - self.col0, most))
        height = max(1, most // width)
        for row in range(self.row0, self.row1, height):
            for col in range(self.col0, self.col1, width):
                yield Region(row, min(row + height, self.row1), col, min(col + width, self.col1))

    def of(self, local_indices: LocalIndices) -> LocalIndices:
        """The part of `local_indices` that lies in this region."""
        rows, cols = (
            clip(local_indices.rows, self.row0, self.row1),
            clip(local_indices.cols, self.col0, self.col1),
        )
        return LocalIndices(rows, cols) if rows and cols else NOTHING

    @classmethod
    def checked(cls, value: object, shape: Shape) -> Region:
        """A region from a frame's map. Raises `Failure` (ShapeError) if it is not in the matrix."""
        if isinstance(value, list) and list(map(type, value)) == _BOUNDS:
            region = cls(*value)
            if 0 <= region.row0 <= region.row1 <= shape[0] and (
                0 <= region.col0 <= region.col1 <= shape[1]
            ):
                return region
        raise Failure(
            "ShapeError",
            f"{reprlib.repr(value)} is not a region of a {shape[0]} x {shape[1]} matrix",
        )


# A piece of a stream. A small one would stay in a nearer cache, but placing it costs some 50 us and
# more per rank. A row of a C-ordered array is cut if it is longer than `ROW_BYTES`: others are
# contiguous in the client's array, and sent from there. Spark's Java code cuts in the same way.
PIECE_BYTES = 4 << 20  # 4 MiB: another size needs another VERSION in frames.py
RANK_PIECE_BYTES = 128 << 10  # 128 KiB of it for each rank
ROW_BYTES = 32 << 10  # 32 KiB


class Place(NamedTuple):
    """Indices of a rank in a span: the runs, the places in each of them, the local positions."""

    runs: slice
    places: slice
    local: slice

    @property
    def size(self) -> int:
        return int(self.local.stop - self.local.start)


def spans(runs: Runs, start: int, stop: int) -> Iterator[Span]:
    """The indices in the half-open interval: a part of a run, whole runs, a part of a run."""
    first, width, period = runs
    k = (start - first) // period
    head = first + k * period
    if head < start:  # the interval begins in this run, or after it
        cut = min(head + width, stop)
        if start < cut:
            yield Span(start, 1, cut - start, period)
        head += period
    whole = max(0, (stop - head - width) // period + 1)
    if whole:
        yield Span(head, whole, width, period)
    rest = head + whole * period
    if rest < stop:
        yield Span(rest, 1, stop - rest, period)


class Span(NamedTuple):
    """`runs` runs of `width` indices, the first at `start`, one every `period`."""

    start: int
    runs: int
    width: int
    period: int

    @property
    def size(self) -> int:
        return self.runs * self.width

    def cut(self, most: int) -> Iterator[Span]:
        """The same indices, at most `most` at a time."""
        start, runs, width, period = self
        if width > most:
            for k in range(runs):
                for offset in range(0, width, most):
                    head = start + k * period + offset
                    yield Span(head, 1, min(most, width - offset), period)
            return
        step = most // width
        for k in range(0, runs, step):
            yield Span(start + k * period, min(step, runs - k), width, period)

    def of_rank(self, its: Runs) -> Iterator[Place]:
        """The indices of a rank: one place, but in layouts with several blocks per rank."""
        start, runs, width, period = self
        if runs == 1 or (period == 1 and its.width > 1):  # an interval
            stop = start + runs * width
            for part in contiguous(its.members(start, stop)):
                if part:
                    inside = slice(part.start - start, part.stop - start, part.step)
                    local = its.count(part.start)
                    here = slice(local, local + len(part))
                    one = slice(0, 1)
                    yield Place(one, inside, here) if runs == 1 else Place(inside, one, here)
            return
        place = (its.first - start) % period
        if place >= width:
            return
        step = its.period // period
        first_run = ((its.first - start - place) // period) % step
        length = len(range(first_run, runs, step))
        if length:
            local = its.count(start + place + first_run * period)
            places = slice(place, place + its.width)
            here = slice(local, local + length * its.width)
            yield Place(slice(first_run, None, step), places, here)


class Box(NamedTuple):
    """Elements at some rows and columns."""

    rows: Span
    cols: Span

    @property
    def size(self) -> int:
        return self.rows.size * self.cols.size

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return self.rows.runs, self.rows.width, self.cols.runs, self.cols.width

    def transposed(self) -> Box:
        return Box(self.cols, self.rows)

    def view(self, array: NDArray[Any], row0: int, col0: int) -> NDArray[Any]:
        """The elements in an array whose first element is global ``(row0, col0)``; 4-D."""
        rows, cols = self
        down, right = array.strides
        corner = array[rows.start - row0 :, cols.start - col0 :]
        strides = (rows.period * down, down, cols.period * right, right)
        return as_strided(corner, self.shape, strides)

    def pieces(self, itemsize: int, chunk: int, *, tiled: bool) -> Iterator[Box]:
        """Cut into pieces of about `chunk` bytes; `tiled`: of a C-ordered array (`ROW_BYTES`)."""
        least = ROW_BYTES // itemsize if tiled else 1
        across = max(least, chunk // (self.rows.size * itemsize))
        for cols in self.cols.cut(max(1, across)):
            for rows in self.rows.cut(max(1, chunk // (cols.size * itemsize))):
                yield Box(rows, cols)


def chunk_bytes(ranks: int) -> int:
    """Bytes of a piece of a stream to this many ranks."""
    return max(PIECE_BYTES, RANK_PIECE_BYTES * ranks)


def products(distribution: Distribution, ranks: Sequence[int]) -> tuple[tuple[Runs, Runs], ...]:
    """The indices of the ranks together: rows and columns of each product, without overlap."""
    return _products(distribution.layout, distribution.grid, distribution.block, tuple(ranks))


@lru_cache(maxsize=256)
def _products(
    layout: str, grid: Grid, block: Shape, ranks: tuple[int, ...]
) -> tuple[tuple[Runs, Runs], ...]:
    parts = [both for rank in ranks if (both := rank_runs(layout, grid, rank)) is not None]
    if not parts or of_layout(layout) is not None:
        return tuple(parts)
    row_period, col_period = parts[0][0].period, parts[0][1].period
    rows_of: defaultdict[int, set[int]] = defaultdict(set)  # first rows, by first column
    for rows, cols in parts:
        rows_of[cols.first].add(rows.first)
    alike: defaultdict[frozenset[int], list[int]] = defaultdict(list)
    for col, firsts in rows_of.items():
        alike[frozenset(firsts)].append(col)
    return tuple(
        (_of_blocks(row_runs, block[0]), _of_blocks(col_runs, block[1]))
        for firsts, columns in alike.items()
        for row_runs in _runs(firsts, row_period)
        for col_runs in _runs(columns, col_period)
    )


def _of_blocks(runs: Runs, size: int) -> Runs:
    return runs if runs.width == runs.period else runs.of_blocks(size)


def _runs(shifts: Iterable[int], stride: int) -> list[Runs]:
    """The indices with these remainders modulo `stride`."""
    ordered = sorted(shifts)
    period = next(
        p
        for p in range(1, stride + 1)
        if stride % p == 0 and len({s % p for s in ordered}) * (stride // p) == len(ordered)
    )
    found: list[Runs] = []
    for shift in sorted({s % period for s in ordered}):
        if found and found[-1].first + found[-1].width == shift:
            found[-1] = found[-1]._replace(width=found[-1].width + 1)
        else:
            found.append(Runs(shift, 1, period))
    return found


def boxes(distribution: Distribution, ranks: Sequence[int], region: Region) -> list[Box]:
    """The elements of a region that the ranks hold."""
    return [
        Box(rows, cols)
        for row_runs, col_runs in products(distribution, ranks)
        for rows in spans(row_runs, region.row0, region.row1)
        for cols in spans(col_runs, region.col0, region.col1)
    ]


def exchange(
    piece: NDArray[Any],
    box: Box,
    parts: Sequence[RankPart],
    distribution: Distribution,
    *,
    into_parts: bool,
    stream: bool = False,
) -> None:
    """Copy between a box of elements, a 4-D array, and the local blocks of ranks.

    `stream`: write past the cache, see `copy_kernels.exchange`.
    """
    if box.rows.width == box.cols.width == box.rows.period == box.cols.period == 1:
        block = ArrayBlock(piece[:, 0, :, 0], (box.rows.start, box.cols.start))
        copy_kernels.exchange([block], parts, into_parts=into_parts, stream=stream)
        return
    for part in parts:
        for rows, cols in _places(box, part.rank, distribution):
            here = piece[rows.runs, rows.places, cols.runs, cols.places]
            there = part.local[rows.local, cols.local]
            if 1 in here.shape[:2] and 1 in here.shape[2:]:
                here = here.reshape(there.shape)  # a view: an axis of length 1 is joined
                to, frm = (there, here) if into_parts else (here, there)
                copy_kernels.copy(to, frm)
            elif into_parts:
                there.reshape(here.shape)[...] = here  # a view: axes are only split
            else:
                here[...] = there.reshape(here.shape)


def _places(box: Box, rank: int, distribution: Distribution) -> Iterator[tuple[Place, Place]]:
    """Where a box's elements of a rank are; none if it is off the grid's diagonal (MD)."""
    both = distribution.runs(rank)
    if both is not None:
        yield from itertools.product(box.rows.of_rank(both[0]), box.cols.of_rank(both[1]))


def elements_of(boxes_: Iterable[Box], rank: int, distribution: Distribution) -> int:
    """How many elements of the boxes a rank holds."""
    return sum(
        rows.size * cols.size for box in boxes_ for rows, cols in _places(box, rank, distribution)
    )


Indices = NDArray[np.int64]
Array = NDArray[Any]


class RowGroup(NamedTuple):
    """Some of the rows, and the columns that the ranks hold of them."""

    rows: Indices  # global
    cols: Indices

    @property
    def size(self) -> int:
        return len(self.rows) * len(self.cols)


def row_groups(
    distribution: Distribution, ranks: Sequence[int], rows: Indices
) -> Iterator[RowGroup]:
    """The elements of some rows that the ranks hold, without overlap."""
    n = distribution.shape[1]
    for row_runs, col_runs in products(distribution, ranks):
        some = rows[row_runs.holds(rows)]
        if len(some):
            every = np.arange(n)
            yield RowGroup(some, every[col_runs.holds(every)])


def place(
    elements: Array, group: RowGroup, parts: Sequence[RankPart], distribution: Distribution
) -> Iterator[tuple[int, int]]:
    """Copy a group's elements into the local blocks of ranks; how many went into each."""
    for rank, _, local in parts:
        both = distribution.runs(rank)
        if both is None or not local.size:
            continue
        down, here_rows = _of_rank(group.rows, both[0])
        across, here_cols = _of_rank(group.cols, both[1])
        if len(down) and len(across):
            local[np.ix_(down, across)] = elements[np.ix_(here_rows, here_cols)]
            yield rank, len(down) * len(across)


def _of_rank(indices: Indices, its: Runs) -> tuple[Indices, Indices]:
    """Positions in a rank's block of those indices that it holds, and their places in `indices`."""
    here = np.flatnonzero(its.holds(indices))
    return its.positions(indices[here]), here


def checked_rows(value: object, shape: tuple[int, int]) -> Indices:
    """Row numbers from a frame's map. Raises `Failure` (ShapeError) if they are not ascending."""
    if isinstance(value, bytes) and value and len(value) % 8 == 0:
        rows = np.frombuffer(value, "<i8").astype(np.int64)
        if rows[0] >= 0 and rows[-1] < shape[0] and (np.diff(rows) > 0).all():
            return rows
    words = f"'rows' must be ascending numbers of rows of a {shape[0]} x {shape[1]} matrix"
    raise Failure("ShapeError", words)
