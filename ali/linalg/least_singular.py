"""An estimate of the smallest singular value of a triangular matrix."""

from __future__ import annotations

import math

import numpy as np

from ali.blocks import Array, block
from ali.interface import Context
from ali.linalg.cyclic_rows import gather_rows
from ali.linalg.norm_estimate import norm_estimate
from ali.linalg.triangular import triangular_solve
from mpi_workers.matrix.dist_matrix import DistMatrix

SLACK = 0.1  # the estimate of the norm of the inverse may be several times too small


def least_singular(ctx: Context, R: DistMatrix) -> float:
    """A value that the smallest singular value hardly ever undercuts; 0 if it is noise. Collective.

    Parameters
    ----------
    R : DistMatrix, shape (m, n) with m >= n, VC_STAR
        Only the upper triangle of its first n rows is read. Its norm is about 1.
    """
    n, r = R.shape[1], block(R)
    count = len(range(ctx.rank, n, ctx.size))
    diagonal = r[range(count), R.rows[:count]]
    if min(ctx.comm.allgather(float(np.abs(diagonal).min(initial=1)))) <= np.finfo(R.dtype).eps:
        return 0.0

    def solved(B: Array, adjoint: bool) -> Array:
        X = ctx.new_replicated(B, "VC_STAR")
        triangular_solve(ctx, R, X, lower=False, adjoint=adjoint)
        return gather_rows(ctx, block(X), 0, n)

    with np.errstate(all="ignore"):
        size = norm_estimate(ctx, n, R.dtype, lambda B: solved(B, False), lambda B: solved(B, True))
    return SLACK / (size * n**0.5) if math.isfinite(size) and size > 0 else 0.0
