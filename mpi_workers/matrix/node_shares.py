"""The elements of a region that some ranks hold together, as boxes that both ends of a stream cut.

Ranks of one node hold runs of neighbouring rows or columns. Sent as one array, their elements are
contiguous where those of a single rank are not; the node's data endpoint splits them by rank.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from mpi_workers.matrix import copy_kernels
from mpi_workers.matrix.copy_kernels import ArrayBlock, RankPart
from mpi_workers.matrix.layout import Distribution, Grid, rank_strides
from mpi_workers.matrix.regions import CHUNK_BYTES, MIN_ROW_BYTES, Region

RANK_CHUNK_BYTES = 16 << 10  # 16 KiB of a piece for each rank: placing it has a cost per rank


class Runs(NamedTuple):
    """Indices of an axis: ``width`` neighbours from ``first`` on, again after each ``period``."""

    first: int
    width: int
    period: int

    def spans(self, start: int, stop: int) -> Iterator[Span]:
        """Those in the half-open interval: a part of a run, whole runs, a part of a run."""
        first, width, period = self
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

    def of_rank(self, shift: int, stride: int) -> tuple[slice, int, slice] | None:
        """A rank's indices ``shift, shift + stride, ...``: its runs, the place in each, and the
        positions in its local block. None if it has none here."""
        start, runs, width, period = self
        place = (shift - start) % period
        if place >= width:
            return None
        step = stride // period
        first_run = ((shift - start - place) // period) % step
        length = len(range(first_run, runs, step))
        if not length:
            return None
        local = (start + place + first_run * period - shift) // stride
        return slice(first_run, None, step), place, slice(local, local + length)


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
        """Cut into pieces of about `chunk` bytes; see `regions.stream`."""
        least = MIN_ROW_BYTES // itemsize if tiled else 1
        across = max(least, chunk // (self.rows.size * itemsize))
        for cols in self.cols.cut(max(1, across)):
            for rows in self.rows.cut(max(1, chunk // (cols.size * itemsize))):
                yield Box(rows, cols)


def chunk_bytes(ranks: int) -> int:
    """Bytes of a piece of a stream to so many ranks."""
    return max(CHUNK_BYTES, RANK_CHUNK_BYTES * ranks)


@lru_cache(maxsize=256)
def products(layout: str, grid: Grid, ranks: tuple[int, ...]) -> tuple[tuple[Runs, Runs], ...]:
    """The indices of the ranks together: rows and columns of each product, without overlap."""
    strides = [both for rank in ranks if (both := rank_strides(layout, grid, rank)) is not None]
    if not strides:
        return ()
    (_, row_stride), (_, col_stride) = strides[0]
    rows_of: defaultdict[int, set[int]] = defaultdict(set)  # shifts of rows, by shift of columns
    for (row, _), (col, _) in strides:
        rows_of[col].add(row)
    alike: defaultdict[frozenset[int], list[int]] = defaultdict(list)
    for col, rows in rows_of.items():
        alike[frozenset(rows)].append(col)
    return tuple(
        (row_runs, col_runs)
        for rows, cols in alike.items()
        for row_runs in _runs(rows, row_stride)
        for col_runs in _runs(cols, col_stride)
    )


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
        for row_runs, col_runs in products(distribution.layout, distribution.grid, tuple(ranks))
        for rows in row_runs.spans(region.row0, region.row1)
        for cols in col_runs.spans(region.col0, region.col1)
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
        both = rank_strides(distribution.layout, distribution.grid, part.rank)
        if both is None:
            continue  # a layout on the diagonal leaves ranks without elements
        (row, row_stride), (col, col_stride) = both
        rows, cols = box.rows.of_rank(row, row_stride), box.cols.of_rank(col, col_stride)
        if rows is None or cols is None:
            continue
        here = piece[rows[0], rows[1], cols[0], cols[1]]
        there = part.local[rows[2], cols[2]]
        if into_parts:
            copy_kernels.copy(there, here)
        else:
            copy_kernels.copy(here, there)


def elements_of(boxes_: Iterable[Box], rank: int, distribution: Distribution) -> int:
    """How many elements of the boxes a rank holds."""
    both = rank_strides(distribution.layout, distribution.grid, rank)
    if both is None:
        return 0
    (row, row_stride), (col, col_stride) = both
    total = 0
    for box in boxes_:
        rows, cols = box.rows.of_rank(row, row_stride), box.cols.of_rank(col, col_stride)
        if rows is not None and cols is not None:
            total += (rows[2].stop - rows[2].start) * (cols[2].stop - cols[2].start)
    return total
