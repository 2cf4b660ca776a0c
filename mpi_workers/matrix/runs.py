"""Indices of an axis that lie in runs of neighbours: those of one rank, or of several."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias, overload

import numpy as np
from numpy.typing import NDArray

IndexArray = NDArray[np.int64]


class Runs(NamedTuple):
    """Indices of an axis: `width` neighbours from `first` on, again after each `period`.

    ``first + width <= period``, so every index from 0 on belongs to the period of its run.
    """

    first: int
    width: int
    period: int

    def of_blocks(self, size: int) -> Runs:
        """The indices in the blocks of `size` indices whose numbers these are."""
        return self if size == 1 else Runs(self.first * size, self.width * size, self.period * size)

    def count(self, stop: int) -> int:
        """How many of them are less than `stop`."""
        whole, rest = divmod(stop - self.first, self.period)
        return 0 if stop <= self.first else whole * self.width + min(rest, self.width)

    def at(self, position: int) -> int:
        """The index at a position."""
        run, place = divmod(position, self.width)
        return self.first + run * self.period + place

    def members(self, start: int, stop: int) -> Indices:
        """Those in the half-open interval: a range if they are one."""
        first, width, period = self
        if width == 1:
            low = first if start <= first else first - (first - start) // period * period
            return range(low, max(low, stop), period)
        before, after = self.count(start), self.count(stop)
        if before >= after:
            return range(0)
        low, high = self.at(before), self.at(after - 1) + 1
        if high - low == after - before:
            return range(low, high)
        return BlockIndices(self, low, high)

    def holds(self, indices: IndexArray) -> NDArray[np.bool_]:
        """Which of some indices belong to the runs."""
        inside: NDArray[np.bool_] = (indices - self.first) % self.period < self.width
        return inside

    def positions(self, indices: IndexArray) -> IndexArray:
        """The positions of indices that belong to the runs."""
        run, place = np.divmod(indices - self.first, self.period)
        found: IndexArray = run * self.width + place
        return found


@dataclass(frozen=True, slots=True)
class BlockIndices(Sequence[int]):
    """Ascending indices in several blocks, from `start` up to `stop`, which is exclusive.

    Both bounds are those of members, so that equal indices are equal objects. An object behaves
    as a `range` does: `len`, membership, positions, `index`, cuts ``[a:b]``; `np.asarray` is fast.
    """

    runs: Runs
    start: int
    stop: int

    def __len__(self) -> int:
        return self.runs.count(self.stop) - self.runs.count(self.start)

    @overload
    def __getitem__(self, at: int, /) -> int: ...
    @overload
    def __getitem__(self, at: slice, /) -> Indices: ...
    def __getitem__(self, at: int | slice, /) -> int | Indices:
        before = self.runs.count(self.start)
        if isinstance(at, slice):
            first, last, step = at.indices(len(self))
            if step != 1:
                raise ValueError(f"indices in blocks cannot be taken in steps of {step}")
            return self.runs.members(self.runs.at(before + first), self.runs.at(before + last))
        position = range(len(self))[at]
        return self.runs.at(before + position)

    def __iter__(self) -> Iterator[int]:
        for part in self.ranges():
            yield from part

    def __contains__(self, index: object) -> bool:
        first, width, period = self.runs
        return (
            isinstance(index, (int, np.integer))
            and self.start <= int(index) < self.stop
            and (int(index) - first) % period < width
        )

    def index(self, value: int, start: int = 0, stop: int | None = None) -> int:
        """The position of a member. Raises `ValueError` if it is not one."""
        if value in self:
            position = self.runs.count(value) - self.runs.count(self.start)
            if start <= position and (stop is None or position < stop):
                return position
        raise ValueError(f"{value!r} is not one of the indices")

    def ranges(self) -> Iterator[range]:
        """The parts of blocks, in order."""
        first, width, period = self.runs
        head = self.start - (self.start - first) % period
        for low in range(head, self.stop, period):
            yield range(max(low, self.start), min(low + width, self.stop))

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        if copy is False:
            raise ValueError("the indices are computed into a new array: leave out copy=False")
        first, width, period = self.runs
        positions = np.arange(self.runs.count(self.start), self.runs.count(self.stop))
        run, place = np.divmod(positions, width)
        return (first + run * period + place).astype(dtype or np.int64, copy=False)


Indices: TypeAlias = range | BlockIndices


def as_array(indices: Indices) -> IndexArray:
    """Indices as an array; of a range much faster than `np.asarray`."""
    if isinstance(indices, range):
        return np.arange(indices.start, indices.stop, indices.step, dtype=np.int64)
    found: IndexArray = np.asarray(indices)
    return found


def spacing(indices: Indices) -> int:
    """How many indices of the axis there are for each of these."""
    if isinstance(indices, range):
        return indices.step
    return indices.runs.period // indices.runs.width


def block_length(indices: Indices) -> int:
    """How many indices a slice selects: all of a range, those of a block."""
    return len(indices) if isinstance(indices, range) else indices.runs.width


def selector(indices: Indices, origin: int = 0) -> slice | IndexArray:
    """Selects indices from an axis whose first index is `origin`: a slice if they rise evenly."""
    if isinstance(indices, range):
        return slice(
            indices.start - origin, max(indices.start, indices.stop) - origin, indices.step
        )
    return as_array(indices) - origin


def evenly(positions: IndexArray) -> slice | IndexArray:
    """Positions as a slice if they rise evenly: a view, and much faster."""
    if positions.size < 2:
        return slice(int(positions[0]), int(positions[0]) + 1) if positions.size else slice(0, 0)
    steps = np.diff(positions)
    step = int(steps[0])
    if step > 0 and (steps == step).all():
        return slice(int(positions[0]), int(positions[-1]) + 1, step)
    return positions


def taken(array: NDArray[Any], rows: slice | IndexArray, cols: slice | IndexArray) -> NDArray[Any]:
    """The elements in some rows and columns: a view if slices select both."""
    if isinstance(rows, slice) or isinstance(cols, slice):
        found: NDArray[Any] = array[rows, cols]
        return found
    if abs(array.strides[0]) < abs(array.strides[1]):  # in the order of the memory
        return taken(array.T, cols, rows).T
    return array[np.ix_(rows, cols)]


def put(
    array: NDArray[Any], rows: slice | IndexArray, cols: slice | IndexArray, values: Any
) -> None:
    """Replace the elements in some rows and columns."""
    if isinstance(rows, slice) or isinstance(cols, slice):
        array[rows, cols] = values
    elif abs(array.strides[0]) < abs(array.strides[1]):
        array.T[np.ix_(cols, rows)] = values.T
    else:
        array[np.ix_(rows, cols)] = values
