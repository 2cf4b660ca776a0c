"""Triangles and diagonals of matrices in MC_MR, from each rank's own elements."""

from __future__ import annotations

from typing import Any

import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

from ali.interface import Context
from ali.scalapack.cyclic import Cyclic
from mpi_workers.matrix.dist_matrix import DistMatrix
from mpi_workers.matrix.layout import clip
from mpi_workers.matrix.runs import Indices


def keep_lower(matrix: DistMatrix, *, unit: bool = False) -> None:
    """Zero the elements above the diagonal; `unit`: set the diagonal to ones."""
    for j, col in enumerate(matrix.cols):
        above = _before(matrix.rows, col)
        matrix.local[:above, j] = 0
        if unit and col in matrix.rows:
            matrix.local[above, j] = 1


def keep_upper(matrix: DistMatrix) -> None:
    """Zero the elements below the diagonal."""
    for j, col in enumerate(matrix.cols):
        matrix.local[_before(matrix.rows, col + 1) :, j] = 0


def _before(owned: Indices, index: int) -> int:
    """How many of the owned indices are below `index`."""
    return len(clip(owned, 0, index))


def diagonal(ctx: Context, matrix: Cyclic, offset: int = 0) -> NDArray[Any]:
    """The diagonal `offset` columns above the main one, on every rank. Collective: its length."""
    at, values = matrix.diagonal(offset)
    mine = np.zeros(max(0, min(matrix.m, matrix.n - offset)), matrix.data.dtype)
    mine[at] = values
    everything = np.empty_like(mine)
    ctx.comm.Allreduce(mine, everything, MPI.SUM)
    return everything


def phases(values: NDArray[Any]) -> NDArray[Any]:
    """``v / abs(v)``, and 1 for zero."""
    length = np.abs(values)
    found: NDArray[Any] = np.where(length > 0, values, 1) / np.where(length > 0, length, 1)
    return found.astype(values.dtype)


def scale_rows(matrix: DistMatrix, factors: NDArray[Any]) -> None:
    """Multiply row i by ``factors[i]``."""
    if matrix.local.size:
        matrix.local[...] *= factors[np.array(matrix.rows), None]


def scale_cols(matrix: DistMatrix, factors: NDArray[Any]) -> None:
    """Multiply column j by ``factors[j]``."""
    if matrix.local.size:
        matrix.local[...] *= factors[np.array(matrix.cols)]


def set_real_diagonal(matrix: DistMatrix) -> None:
    """Take rounding's imaginary parts off a diagonal that is real."""
    if matrix.dtype.kind == "c":
        for j, col in enumerate(matrix.cols):
            if col in matrix.rows:
                i = matrix.rows.index(col)
                matrix.local[i, j] = matrix.local[i, j].real
