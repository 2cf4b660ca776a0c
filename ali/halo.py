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

UP, DOWN = 21, 22  # tags: with two blocks along an axis both neighbours may be the same rank
Periodic = bool | tuple[bool, bool]


def halo(
    gang: Gang,
    matrix: DistMatrix,
    width: int,
    fill: complex,
    out: NDArray[Any] | None,
    periodic: Periodic,
) -> NDArray[Any]:
    """See `ali.interface.Context.halo`."""
    around = (periodic, periodic) if isinstance(periodic, bool) else periodic
    _check(matrix, width, around)
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
        _swap(gang, matrix, out.T, 1, (col, height), width, around[1])
        _swap(gang, matrix, out, 0, (row, 1), width, around[0])
    return out


def _check(matrix: DistMatrix, width: int, around: tuple[bool, bool]) -> None:
    if matrix.layout != BLOCK:
        raise Failure(
            "LayoutError",
            f"halo: the matrix is in {matrix.layout}; convert it with to_layout to {BLOCK}, in "
            "which each rank has one block of neighbouring rows and columns",
        )
    if not isinstance(width, int | np.integer) or width < 1:
        raise Failure(
            "BadArgumentError", f"halo: width must be an integer of at least 1; got {width!r}"
        )
    for length, size, what, wraps in zip(
        matrix.shape, matrix.distribution.block, ROWS, around, strict=True
    ):
        last = length - (length - 1) // size * size if length else 0
        if wraps and 0 < last < width:
            raise Failure(
                "ShapeError",
                f"halo: periodic, a width of {width} needs as many {what} in every block; the last "
                f"block of this matrix has {last}: use another number of ranks or a smaller width",
            )
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
    place: tuple[int, int],
    width: int,
    periodic: bool,
) -> None:
    """Exchange the first and last lines of the block with the neighbours along an axis.

    `place`: this rank's row or column on the grid, and the distance to the next rank.
    """
    length, size = matrix.shape[axis], matrix.distribution.block[axis]
    mine, step = place
    blocks = -(-length // size)  # further ranks have no elements
    ahead, behind = mine - 1, mine + 1
    if periodic:
        ahead, behind = ahead % blocks, behind % blocks
    before, own, after = (
        max(0, min(size, length - k * size)) if k >= 0 else 0 for k in (ahead, mine, behind)
    )
    before, after = min(width, before), min(width, after)
    first = np.ascontiguousarray(lines[width : width + min(width, own)])
    last = np.ascontiguousarray(lines[own + width - min(width, own) : own + width])
    head = np.empty((before, lines.shape[1]), lines.dtype)
    tail = np.empty((after, lines.shape[1]), lines.dtype)
    requests = []
    for arriving, leaving, there, tags in (
        (head, first, ahead, (DOWN, UP)),
        (tail, last, behind, (UP, DOWN)),
    ):
        if len(arriving):
            neighbour = gang.rank + (there - mine) * step
            requests.append(gang.comm.Irecv(_raw(arriving), neighbour, tags[0]))
            requests.append(gang.comm.Isend(_raw(leaving), neighbour, tags[1]))
    for request in requests:
        request.Wait()
    lines[width - before : width] = head
    lines[own + width : own + width + after] = tail


def _raw(array: NDArray[Any]) -> NDArray[np.uint8]:
    return array.reshape(-1).view(np.uint8)
