"""Blocks one below the other, which are sent to another node as one array.

A message for each block costs both ends some 100 us, and a copy into one array another pass.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any, cast

import numpy as np

from mpi_workers.data.steps import Step
from mpi_workers.matrix.copy_kernels import Array
from mpi_workers.matrix.node_shares import Box, spans
from mpi_workers.matrix.regions import Region
from mpi_workers.matrix.runs import Runs


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
