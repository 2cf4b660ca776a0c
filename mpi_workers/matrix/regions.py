"""Half-open regions of a matrix in frames: bounds checked, cut into pieces of a stream."""

from __future__ import annotations

import reprlib
from collections.abc import Iterator
from typing import NamedTuple

from mpi_workers.failures import Failure
from mpi_workers.matrix.layout import LocalIndices, Shape, clip

CHUNK_BYTES = 512 << 10  # 512 KiB: stays in cache while it is packed and sent
_BOUNDS = [int] * 4  # their types: bool is excluded
MIN_ROW_BYTES = 2 << 10  # 2 KiB of each row: a tile of a C-ordered array uses whole cache lines


class Region(NamedTuple):
    """Global rows ``[row0, row1)`` and columns ``[col0, col1)``."""

    row0: int
    row1: int
    col0: int
    col1: int

    @property
    def shape(self) -> Shape:
        return self.row1 - self.row0, self.col1 - self.col0

    def of(self, local_indices: LocalIndices) -> LocalIndices:
        """The part of `local_indices` that lies in this region."""
        rows, cols = (
            clip(local_indices.rows, self.row0, self.row1),
            clip(local_indices.cols, self.col0, self.col1),
        )
        return LocalIndices(rows, cols) if rows and cols else LocalIndices(range(0), range(0))

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


def stream(
    shape: Shape, itemsize: int, chunk: int = CHUNK_BYTES, *, tiled: bool = False
) -> Iterator[tuple[slice, slice]]:
    """Cut an ``m x n`` block into pieces of at most `chunk` bytes, from top to bottom, then right.

    Both ends of a stream cut in the same way.

    Parameters
    ----------
    shape, itemsize : (int, int), int
        Of the block.
    chunk : int
        Most bytes of a piece.
    tiled : bool
        False: as many whole columns as fit, or a part of one column; the pieces are in Fortran
        order. True: at least `MIN_ROW_BYTES` of each row, for a C-ordered array at one end.
    """
    m, n = shape
    if not m or not n:
        return
    across = min(n, max(MIN_ROW_BYTES // itemsize if tiled else 1, chunk // (m * itemsize)))
    down = min(m, max(1, chunk // (across * itemsize)))
    for j in range(0, n, across):
        for i in range(0, m, down):
            yield slice(i, min(i + down, m)), slice(j, min(j + across, n))
