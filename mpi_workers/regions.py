"""Half-open regions of a matrix as they travel: bounds checked, cut into pieces of a stream."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from mpi_workers.failures import Failure
from mpi_workers.layout import Piece, Shape, clip

CHUNK = 1 << 20  # 1 MiB: packed while it is in cache, sent in one go


class Region(NamedTuple):
    """Global rows ``[row0, row1)`` and columns ``[col0, col1)``."""

    row0: int
    row1: int
    col0: int
    col1: int

    @property
    def shape(self) -> Shape:
        return self.row1 - self.row0, self.col1 - self.col0

    def of(self, piece: Piece) -> Piece:
        """What of `piece` lies in this region."""
        rows, cols = clip(piece.rows, self.row0, self.row1), clip(piece.cols, self.col0, self.col1)
        return Piece(rows, cols) if rows and cols else Piece(range(0), range(0))

    @classmethod
    def checked(cls, value: Any, shape: Shape) -> Region:
        """A region from a frame's map. Raises `Failure` (ShapeError) if it is not in the matrix."""
        if (
            isinstance(value, list)
            and len(value) == 4
            and all(isinstance(bound, int) and not isinstance(bound, bool) for bound in value)
        ):
            region = cls(*value)
            if 0 <= region.row0 <= region.row1 <= shape[0] and (
                0 <= region.col0 <= region.col1 <= shape[1]
            ):
                return region
        raise Failure("ShapeError", f"{value!r} is not a region of a {shape[0]} x {shape[1]} matrix")


def stream(
    shape: Shape, itemsize: int, chunk: int = CHUNK
) -> Iterator[tuple[slice, slice]]:
    """Cut an ``m x n`` block into pieces that follow each other in Fortran order.

    A piece is a few whole columns, or a part of one where a column is over `chunk` bytes.
    """
    m, n = shape
    if not m or not n:
        return
    column = m * itemsize
    if column <= chunk:
        step = chunk // column
        for j in range(0, n, step):
            yield slice(0, m), slice(j, min(j + step, n))
        return
    step = chunk // itemsize
    for j in range(n):
        for i in range(0, m, step):
            yield slice(i, min(i + step, m)), slice(j, j + 1)
