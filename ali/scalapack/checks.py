"""Checks before ScaLAPACK is called: it would print an error, or end the process."""

from __future__ import annotations

from typing import Any

import numpy as np
from mpi4py import MPI

from ali.blocks import CHUNK, require, shape_text
from ali.interface import Context
from ali.scalapack.native import INT_MAX
from mpi_workers.matrix.dist_matrix import DistMatrix


def computed_in(routine: str, *matrices: DistMatrix) -> np.dtype[Any]:
    """The dtype in which to compute: NumPy's common one, with integers and bool as float64.

    Raises
    ------
    Failure
        ShapeError, if a matrix is empty or has a dimension that 32 bits do not hold.
    """
    for matrix in matrices:
        require(
            min(matrix.shape) >= 1 and max(matrix.shape) <= INT_MAX,
            "ShapeError",
            f"{routine}: a matrix is {shape_text(matrix)}; ScaLAPACK takes 1 to {INT_MAX} rows and "
            "columns",
        )
    kinds = [np.dtype(np.float64) if m.dtype.kind in "bi" else m.dtype for m in matrices]
    return np.result_type(*kinds)


def require_finite(ctx: Context, routine: str, *matrices: DistMatrix) -> None:
    """Refuse NaN and infinity, on which ScaLAPACK's pivoting and iterations fail. Collective.

    One pass over the matrices and one word from each rank.
    """
    mine = np.array([all(_finite(matrix) for matrix in matrices)], np.int32)
    every = np.zeros(1, np.int32)
    ctx.comm.Allreduce(mine, every, MPI.MIN)
    require(bool(every[0]), "LinAlgError", f"{routine}: a matrix contains NaN or infinity")


def _finite(matrix: DistMatrix) -> bool:
    if matrix.dtype.kind in "bi":
        return True
    local = matrix.local.reshape(-1, order="F")
    step = CHUNK // matrix.dtype.itemsize
    return all(np.isfinite(local[i : i + step]).all() for i in range(0, local.size, step))
