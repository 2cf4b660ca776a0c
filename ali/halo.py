"""The elements around a rank's block of a matrix, for stencils of partial differential equations.

Two exchanges between neighbours on the grid: columns first, then rows with the columns that have
arrived, so that corners need no messages of their own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from mpi_workers.failures import Failure
from mpi_workers.matrix.dist_matrix import DistMatrix
from mpi_workers.matrix.layout import BLOCK

if TYPE_CHECKING:
    from mpi_workers.rank.gang import Gang

TAG = 21


def halo(
    gang: Gang, matrix: DistMatrix, width: int, fill: complex, out: NDArray[Any] | None
) -> NDArray[Any]:
    """See `ali.interface.Context.halo`."""
    _check(matrix, width)
    m, n = matrix.local.shape
    shape = m + 2 * width, n + 2 * width
    if out is None:
        out = np.empty(shape, matrix.dtype, order="F")
    elif out.shape != shape or out.dtype != matrix.dtype:
        raise ValueError(f"halo: out is {out.shape} of {out.dtype}, not {shape} of {matrix.dtype}")
    for edge in (out[:width], out[m + width :], out[:, :width], out[:, n + width :]):
        edge[...] = fill
    out[width : m + width, width : n + width] = matrix.local
    if matrix.local.size:
        height = matrix.grid[0]
        row, col = gang.rank % height, gang.rank // height
        _swap(gang, matrix, out.T, 1, (col, gang.rank, height), width)
        _swap(gang, matrix, out, 0, (row, gang.rank, 1), width)
    return out


def _check(matrix: DistMatrix, width: int) -> None:
    if matrix.layout != BLOCK:
        raise Failure(
            "LayoutError",
            f"halo: the matrix is in {matrix.layout}; convert it with to_layout to {BLOCK}, in "
            "which each rank has one block of neighbouring rows and columns",
        )
    if width < 1:
        raise Failure("BadArgumentError", f"halo: width must be at least 1; got {width}")
    for length, size, what in zip(matrix.shape, matrix.distribution.block, ROWS, strict=True):
        if size < min(width, length):
            raise Failure(
                "ShapeError",
                f"halo: a width of {width} needs as many {what} in a block; those of this matrix "
                f"have {size}: use fewer ranks or a smaller width",
            )


ROWS = "rows", "columns"


def _swap(
    gang: Gang,
    matrix: DistMatrix,
    lines: NDArray[Any],
    axis: int,
    place: tuple[int, int, int],
    width: int,
) -> None:
    """Exchange the first and last lines of the block with the neighbours along an axis.

    `place`: this rank's row or column on the grid, its number, and the distance to the next one.
    """
    length, size = matrix.shape[axis], matrix.distribution.block[axis]
    mine, rank, step = place
    counts = [max(0, min(size, length - k * size)) for k in (mine - 1, mine, mine + 1)]
    before = min(width, counts[0]) if mine else 0
    own, after = counts[1], min(width, counts[2])
    first = np.ascontiguousarray(lines[width : width + min(width, own)])
    last = np.ascontiguousarray(lines[own + width - min(width, own) : own + width])
    head = np.empty((before, lines.shape[1]), lines.dtype)
    tail = np.empty((after, lines.shape[1]), lines.dtype)
    requests = []
    for arriving, leaving, neighbour in ((head, first, rank - step), (tail, last, rank + step)):
        if len(arriving):
            requests.append(gang.comm.Irecv(_raw(arriving), neighbour, TAG))
            requests.append(gang.comm.Isend(_raw(leaving), neighbour, TAG))
    for request in requests:
        request.Wait()
    lines[width - before : width] = head
    lines[own + width : own + width + after] = tail


def _raw(array: NDArray[Any]) -> NDArray[np.uint8]:
    return array.reshape(-1).view(np.uint8)
