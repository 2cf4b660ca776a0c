"""Single elements that two lists of indices name: ``A[rows, cols]``, and assignments to them."""

from __future__ import annotations

from typing import Any

import numpy as np
from mpi4py import MPI

from ali.blocks import Array, require
from ali.interface import Context, routine
from mpi_workers.matrix.dist_matrix import DistMatrix

KEPT_NBYTES = 1 << 20  # 1 MiB: longer results of `pick` are distributed


@routine("B")
def pick(
    ctx: Context, A: DistMatrix, row_list: bytes, col_list: bytes, shape: list[int]
) -> DistMatrix:
    """Single elements: ``A[rows, cols]`` of two lists.

    Parameters
    ----------
    A : matrix
    row_list, col_list : bytes
        Indices, little-endian int64, 0 to the length - 1.
    shape : list of int
        Of the result.

    Returns
    -------
    B : array of that shape, dtype of A
        STAR_STAR up to 1 MiB, else VC_STAR.

    Notes
    -----
    Every rank receives all elements of the result.
    """
    found = np.zeros(len(row_list) // 8, A.dtype)
    if any(group[0] == ctx.rank for group in A.distribution.owners()):
        mine, i, j = _own(A, row_list, col_list)
        found[mine] = A.local[i, j]
    every = np.empty_like(found)
    ctx.comm.Allreduce(found.view(np.uint8), every.view(np.uint8), MPI.BOR)
    layout = "STAR_STAR" if every.nbytes <= KEPT_NBYTES else "VC_STAR"
    return ctx.new_replicated(every.reshape(shape), layout)


def _own(A: DistMatrix, row_list: bytes, col_list: bytes) -> tuple[Array, Array, Array]:
    """Which of the listed elements this rank has, and their places in its block."""
    down, across = (np.frombuffer(x, "<i8").astype(np.int64) for x in (row_list, col_list))
    both = A.distribution.runs(A.rank)
    if both is None:
        return down[:0], down[:0], down[:0]
    rows, cols = both
    mine = np.flatnonzero(rows.holds(down) & cols.holds(across))
    return mine, rows.positions(down[mine]), cols.positions(across[mine])


@routine(writes=("A",))
def put_elements(
    ctx: Context,
    A: DistMatrix,
    row_list: bytes,
    col_list: bytes,
    shape: list[int],
    value: DistMatrix,
) -> None:
    """Write to single elements: ``A[rows, cols] = value`` of two lists.

    Parameters
    ----------
    A : matrix
        It is changed.
    row_list, col_list, shape
        As in `pick`. Of elements that occur twice, the last one counts.
    value : array
        Broadcasts to that shape; it is converted to the dtype of A.

    Raises
    ------
    ShapeError
        If the value does not broadcast.

    Notes
    -----
    Every rank receives all of the value.
    """
    given = ctx.to_layout(value, "STAR_STAR").local.reshape(value.array_shape)
    while given.ndim > len(shape) and given.shape[0] == 1:
        given = given[0]  # as NumPy does for the right-hand side
    try:
        every = np.broadcast_to(given, shape).reshape(-1)
    except ValueError:
        every = None
    require(
        every is not None,
        "ShapeError",
        f"a value of shape {value.array_shape} does not broadcast to the selection, {tuple(shape)}",
    )
    assert every is not None
    mine, i, j = _own(A, row_list, col_list)
    with np.errstate(all="ignore"):
        A.local[i, j] = castable(every[mine], A.dtype).astype(A.dtype)


def castable(values: Array, dtype: np.dtype[Any]) -> Array:
    """Without imaginary parts if `dtype` has none; as bool an imaginary part counts."""
    return values if dtype.kind in "bc" else values.real
