"""Joins adjacent small blocks into panels, which are written as one block.

Cutting a block by layout has a cost per block and rank, and one per column. For small or low
blocks a copy into a panel costs less; other blocks are written from where they are.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mpi_workers.matrix.copy_kernels import ArrayBlock

PANEL = 16 << 20  # 16 MiB: the largest panel


class _Box(NamedTuple):
    """A rectangle of the matrix that some blocks cover."""

    row0: int
    col0: int
    row1: int
    col1: int
    members: tuple[int, ...]

    @property
    def size(self) -> int:
        return (self.row1 - self.row0) * (self.col1 - self.col0)

    def continues(self, other: _Box, axis: int) -> bool:
        """Whether the other one begins where this one ends, and is as wide (high)."""
        if axis == 1:
            return (self.row0, self.row1, self.col1) == (other.row0, other.row1, other.col0)
        return (self.col0, self.col1, self.row1) == (other.col0, other.col1, other.row0)

    def join(self, other: _Box) -> _Box:
        return _Box(self.row0, self.col0, other.row1, other.col1, (*self.members, *other.members))


def panels(
    blocks: Sequence[ArrayBlock],
    dtype: np.dtype[Any],
    is_small: Callable[[NDArray[Any]], bool],
    share_out: Callable[[Callable[[int], object], Sequence[int]], None],
) -> Iterator[Sequence[ArrayBlock]]:
    """The same elements in larger blocks, where blocks are adjacent.

    Those that are not small come as they are, all at once. What is yielded must be
    used before the next is asked for. `share_out` runs a function for each of some numbers, in
    this thread or in several.
    """
    most = PANEL // dtype.itemsize
    boxes, whole = [], []
    for i, block in enumerate(blocks):
        (r, c), (m, n) = block.origin, block.array.shape
        if is_small(block.array):
            boxes.append(_Box(r, c, r + m, c + n, (i,)))
        else:
            whole.append(block)
    boxes.sort(key=lambda box: (box.row0, box.col0))
    joined = _joined(_joined(boxes, 1, most), 0, most)
    whole += [blocks[box.members[0]] for box in joined if len(box.members) == 1]
    if whole:
        yield whole
    for box in joined:
        if len(box.members) == 1:
            continue
        panel = _scratch()[: box.size * dtype.itemsize].view(dtype)
        panel = panel.reshape(box.row1 - box.row0, box.col1 - box.col0)

        share_out(partial(_place, blocks, box, panel), box.members)
        yield [ArrayBlock(panel, (box.row0, box.col0))]


def _place(blocks: Sequence[ArrayBlock], box: _Box, panel: NDArray[Any], i: int) -> None:
    """Copy a member of a box to where it belongs in the box's panel."""
    (r, c), (m, n) = blocks[i].origin, blocks[i].array.shape
    r, c = r - box.row0, c - box.col0
    np.copyto(panel[r : r + m, c : c + n], blocks[i].array, casting="same_kind")


def _joined(boxes: Sequence[_Box], axis: int, most: int) -> list[_Box]:
    found: list[_Box] = []
    for box in boxes:
        if found and found[-1].continues(box, axis) and found[-1].size + box.size <= most:
            found[-1] = found[-1].join(box)
        else:
            found.append(box)
    return found


_own = threading.local()


def _scratch() -> NDArray[np.uint8]:
    """This thread's memory for a panel: warm after the first."""
    if not hasattr(_own, "scratch"):
        _own.scratch = np.empty(PANEL, np.uint8)
    scratch: NDArray[np.uint8] = _own.scratch
    return scratch
