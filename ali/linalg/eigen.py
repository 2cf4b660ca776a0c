"""Eigenvalues and eigenvectors of Hermitian matrices of moderate size."""

from __future__ import annotations

import numpy as np
import scipy.linalg

from ali.blocks import block, float_dtype, frobenius, require, require_square, shape_text
from ali.interface import Context, routine
from ali.linalg.systems import copy_to_rows
from mpi_workers.matrix.dist_matrix import DistMatrix

LIMIT = 30_000  # above, LAPACK on one rank would take hours, and its 32-bit integers overflow


@routine("W", "V", vectors=("W",))
def eigh(ctx: Context, A: DistMatrix) -> tuple[DistMatrix, DistMatrix]:
    """Eigenvalues and eigenvectors of a Hermitian matrix: A V = V diag(W).

    Parameters
    ----------
    A : matrix, shape (n, n)
        Hermitian, n up to 30000; only its lower triangle is read. Integers are promoted to
        float64.

    Returns
    -------
    W : vector, shape (n,), real, STAR_STAR
        Ascending.
    V : matrix, shape (n, n), VC_STAR
        Orthonormal columns.

    Raises
    ------
    ShapeError
        If A is not square, or larger than the limit.
    ResourceError
        If rank 0's node has too little memory.
    RoutineError
        If A contains NaN or infinity, or LAPACK does not converge.

    Notes
    -----
    Not distributed: A is gathered on rank 0, LAPACK's evr runs there, and V is distributed: about
    ``9 n^3`` flops on one rank, ``2 n^2`` words, ``3 n^2`` words of memory on rank 0, which are
    checked first. For a few eigenvalues of a large positive semidefinite matrix use
    `truncated_svd`; for all of a large one, load the library "scalapack" or "elemental".

    Error: 500 eps, |A - V W V^H| / |A| and |V^H V - I|. Peak memory: 5.0 times arguments and
    results.
    """
    n = require_square("eigh", A)
    require(
        n <= LIMIT,
        "ShapeError",
        f"eigh: A is {shape_text(A)}, and this eigh runs on one rank, for n up to {LIMIT}: load "
        'the library "scalapack" or "elemental", or use truncated_svd for the leading ones',
    )
    dtype = float_dtype(A.dtype)
    V = ctx.empty((n, n), dtype, "CIRC_CIRC")  # fails here if memory is short
    spare = ctx.empty((n, n), dtype, "CIRC_CIRC")  # the memory that LAPACK will use
    del spare
    rows = copy_to_rows(ctx, A, dtype)
    lower = block(rows)
    for i, row in enumerate(rows.rows):
        lower[i, row + 1 :] = 0  # the upper triangle may hold NaN
    scale = frobenius(ctx, rows)
    require(
        np.isfinite(scale),
        "RoutineError",
        f"eigh: A contains NaN or infinity (its norm is {scale})",
    )
    whole = ctx.to_layout(rows, "CIRC_CIRC")
    W = np.empty(n, np.zeros(0, dtype).real.dtype)
    failure = ""
    if ctx.rank == 0:
        try:
            W[...], V.local[...] = scipy.linalg.eigh(
                whole.local, overwrite_a=True, check_finite=False, driver="evr"
            )
        except scipy.linalg.LinAlgError as error:
            failure = str(error)
    failure = ctx.comm.bcast(failure)
    require(not failure, "RoutineError", f"eigh: {failure}")
    ctx.comm.Bcast(W)
    return ctx.new_replicated(W), ctx.to_layout(V, "VC_STAR")
