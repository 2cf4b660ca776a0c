"""A matrix cut into boxes, which ranks read or write at once, and their assignment to ranks.

Every rank computes all of it from the matrix's shape and the file's grain, so nothing is sent.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple, TypeGuard

import numpy as np
from numpy.typing import NDArray

from mpi_workers.matrix.layout import Shape

PIECE = 16 << 20  # 16 MiB: sequential for a disk, small next to a rank's part
SEVERAL = 4  # least number of boxes per rank: one more or less is a small imbalance
HULL = 4  # indices in a range of this many times their number are read with the gaps

Array = NDArray[Any]
Pick = range | NDArray[np.int64]  # indices of a file, in the order of the matrix


class Box(NamedTuple):
    """A region of a matrix, as ranges of step 1 of its rows and columns."""

    rows: range
    cols: range

    @property
    def shape(self) -> Shape:
        return len(self.rows), len(self.cols)


class Grain(NamedTuple):
    """The smallest unit that a format reads or writes: its chunks.

    Attributes
    ----------
    rows, cols : int
        Height and width of regular chunks.
    bands : sequence of int, optional
        First rows of chunks of unequal heights; instead of `rows`.
    by_columns : bool
        Columns are contiguous in the file.
    columns_apart : bool
        Some columns of a band can be read alone, for their share of the time.
    """

    rows: int = 1
    cols: int = 1
    bands: Sequence[int] | None = None
    by_columns: bool = False
    columns_apart: bool = False

    def elements(self, shape: Shape) -> int:
        """Elements of the largest chunk of a file of this shape."""
        heights = [self.rows] if self.bands is None else np.diff([*self.bands, shape[0]])
        return int(max(heights, default=0)) * self.cols


def share(count: int, rank: int, size: int) -> range:
    """The contiguous part of `count` items that a rank of `size` has."""
    return range(count * rank // size, count * (rank + 1) // size)


def cut(shape: Shape, itemsize: int, size: int, grain: Grain) -> list[Box]:
    """Boxes of about `PIECE` bytes, in the file's order, that tile a matrix along its grain.

    No chunk lies in two boxes. Each rank has several boxes where the chunks allow.
    """
    if grain.by_columns:
        turned = cut(shape[::-1], itemsize, size, Grain(grain.cols, grain.rows))
        return [Box(box.cols, box.rows) for box in turned]
    m, n = shape
    if not m or not n:
        return []
    fair = -(-m // (SEVERAL * size))
    boxes = []
    bands = _bands(m, fair, n * itemsize, grain)
    for start, stop in bands:
        width = n
        if grain.columns_apart:
            width = _width(n, (stop - start) * itemsize, len(bands), size)
        elif (stop - start) * n * itemsize > 2 * PIECE:
            width = max(1, PIECE // ((stop - start) * itemsize * grain.cols)) * grain.cols
        for col in range(0, n, width):
            boxes.append(Box(range(start, stop), range(col, min(col + width, n))))
    return boxes


def _width(n: int, column_bytes: int, bands: int, size: int) -> int:
    """Columns of a box of about `PIECE` bytes; ranks have equally many boxes of few bands."""
    count = -(-n * column_bytes // PIECE)
    if bands < SEVERAL * size:
        fair = size // math.gcd(size, bands)
        count = -(-max(1, count) // fair) * fair
    return -(-n // min(n, count))


def _bands(m: int, fair: int, row_bytes: int, grain: Grain) -> list[tuple[int, int]]:
    """Half-open bands of rows: whole chunks of about `PIECE` bytes, or of `fair` rows if fewer."""
    most = max(1, min(fair, PIECE // max(1, row_bytes)))
    if grain.bands is None:
        height = max(1, most // grain.rows) * grain.rows
        return [(a, min(a + height, m)) for a in range(0, m, height)]
    found = []
    starts = [*grain.bands, m]
    first = starts[0]
    for here, after in pairwise(starts[1:]):
        if after - first > most:
            found.append((first, here))
            first = here
    found.append((first, m))
    return [(a, b) for a, b in found if b > a]


def chosen(grain: Grain, rows: Pick, cols: Pick, shape: Shape) -> Grain:
    """The grain of a matrix of some rows and columns of a file."""
    if len(cols) != shape[1] or not _is_run(cols):
        grain = grain._replace(cols=1)
    if _is_run(rows) and len(rows) == shape[0]:
        return grain
    if grain.bands is None and grain.rows == 1:
        return grain
    index = np.asarray(rows, np.int64)
    chunk = (
        index // grain.rows
        if grain.bands is None
        else np.searchsorted(np.asarray(grain.bands), index, "right")
    )
    starts = [0, *(np.flatnonzero(np.diff(chunk)) + 1).tolist()]
    return grain._replace(rows=1, bands=starts)


def _is_run(pick: Pick) -> TypeGuard[range]:
    return isinstance(pick, range) and pick.step == 1


def runs(pick: Pick) -> list[tuple[slice, range, Any]]:
    """Contiguous ranges to read for these indices: target, range to read, selection from it.

    Close indices are read together with the gaps between them.
    """
    if _is_run(pick):
        return [(slice(0, len(pick)), pick, slice(None))]
    index = np.asarray(pick, np.int64)
    low, high = int(index.min()), int(index.max()) + 1
    if high - low <= HULL * len(index):
        return [(slice(0, len(index)), range(low, high), index - low)]
    breaks = [0, *(np.flatnonzero(np.diff(index) != 1) + 1).tolist(), len(index)]
    return [
        (slice(a, b), range(int(index[a]), int(index[b - 1]) + 1), slice(None))
        for a, b in pairwise(breaks)
    ]


def gathered(read: Callable[[range, range], Array], rows: Pick, cols: Pick) -> Array:
    """Any rows and columns, through a function that reads contiguous ranges of both."""
    down, across = runs(rows), runs(cols)
    if len(down) == len(across) == 1:
        (_, these_rows, keep_rows), (_, these_cols, keep_cols) = down[0], across[0]
        found: Array = read(these_rows, these_cols)[keep_rows][:, keep_cols]
        return found
    out: Array | None = None
    for to_rows, these_rows, keep_rows in down:
        for to_cols, these_cols, keep_cols in across:
            part = read(these_rows, these_cols)[keep_rows][:, keep_cols]
            if out is None:
                out = np.empty((len(rows), len(cols)), part.dtype)
            out[to_rows, to_cols] = part
    assert out is not None  # neither is empty
    return out
