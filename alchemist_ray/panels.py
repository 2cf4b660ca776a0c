"""Small blocks that lie beside each other: copied together, and written as one.

Cutting a block by layout has a price per block, and one thread does it. A copy into a panel that
stays in the cache costs less than that.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Origin = tuple[int, int]

PANEL = 8 << 20  # 8 MiB: what small blocks are gathered up to


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
    blocks: Sequence[Array], origins: Sequence[Origin], dtype: np.dtype[Any]
) -> Iterator[tuple[Array, Origin]]:
    """The same elements in larger pieces, as far as blocks lie beside each other.

    What is yielded must be used before the next is asked for.
    """
    most = PANEL // dtype.itemsize
    boxes = [
        _Box(r, c, r + block.shape[0], c + block.shape[1], (i,))
        for i, (block, (r, c)) in enumerate(zip(blocks, origins, strict=True))
    ]
    boxes.sort(key=lambda box: (box.row0, box.col0))
    for box in _joined(_joined(boxes, 1, most), 0, most):
        if len(box.members) == 1:
            yield blocks[box.members[0]], origins[box.members[0]]
            continue
        panel = _scratch()[: box.size * dtype.itemsize].view(dtype)
        panel = panel.reshape(box.row1 - box.row0, box.col1 - box.col0)
        for i in box.members:
            (r, c), (m, n) = origins[i], blocks[i].shape
            r, c = r - box.row0, c - box.col0
            np.copyto(panel[r : r + m, c : c + n], blocks[i], casting="same_kind")
        yield panel, (box.row0, box.col0)


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
