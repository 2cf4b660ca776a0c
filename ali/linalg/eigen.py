"""Eigenvalues and eigenvectors of Hermitian matrices."""

from __future__ import annotations

import numpy as np
import scipy.linalg

from ali.blocks import (
    Array,
    block,
    float_dtype,
    frobenius,
    require,
    require_choice,
    require_square,
)
from ali.interface import Context, routine
from ali.linalg.cyclic_rows import copy_to_rows
from ali.linalg.hermitian_eigen import eigenpairs
from ali.linalg.native_libraries import METHODS, call
from ali.linalg.polar import adjoint_in_rows
from mpi_workers.matrix.dist_matrix import DistMatrix

ON_ONE_RANK = 400  # order up to which rank 0 computes: below, messages take longer than LAPACK
LAPACK_LIMIT = 30_000  # the order at which LAPACK's 32-bit integers end


@routine("W", "V", vectors=("W",))
def eigh(ctx: Context, A: DistMatrix, method: str = "auto") -> tuple[DistMatrix, DistMatrix]:
    """Eigenvalues and eigenvectors of a Hermitian matrix: A V = V diag(W).

    Parameters
    ----------
    A : matrix, shape (n, n)
        Hermitian; only its lower triangle is read. Integers are promoted to float64.
    method : str
        "auto": the algorithm below. "scalapack" or "elemental": the routine of that library, which
        must be installed on the nodes; see the results of `load_library`.

    Returns
    -------
    W : vector, shape (n,), real, STAR_STAR
        Ascending.
    V : matrix, shape (n, n), VC_STAR
        Orthonormal columns.

    Raises
    ------
    ShapeError
        If A is not square.
    BadArgumentError
        If `method` is unknown.
    LibraryNotFoundError, LibraryLoadError
        If the native library is not there.
    LinAlgError
        If A contains NaN or infinity, or LAPACK does not converge.

    Notes
    -----
    Reduction to a tridiagonal matrix, divide and conquer, and the vectors times the reflections:
    at most ``16/3 n^3 / ranks`` flops, an eighth of them at the speed of memory; ``3 n^2`` words
    and ``2 n log2(ranks)`` messages. Each rank holds its share of 4 matrices. For n up to 400, or
    on one rank, LAPACK's evd on rank 0. For a few eigenvalues of a large positive semidefinite
    matrix use `truncated_svd`. Sources: Golub, Van Loan, 4th ed., 8.3; Gu, Eisenstat 1995.

    Error: 40 eps, |A - V W V^H| / |A| and |V^H V - I|. Peak memory: 2.5 times arguments and
    results.
    """
    n = require_square("eigh", A)
    require_choice("eigh", "method", method, METHODS)
    if method != "auto":
        W, V = call(ctx, method, "eigh", A)
        return W, V
    dtype = float_dtype(A.dtype)
    rows = copy_to_rows(ctx, A, dtype)
    lower = block(rows)
    for i, row in enumerate(rows.rows):
        lower[i, row + 1 :] = 0  # the upper triangle may hold NaN
    scale = frobenius(ctx, rows)
    require(
        np.isfinite(scale) and scale <= float(np.finfo(dtype).max),
        "LinAlgError",
        f"eigh: A contains NaN or infinity, or is too large (its norm is {scale})",
    )
    if n <= (ON_ONE_RANK if ctx.size > 1 else LAPACK_LIMIT):
        return _on_one_rank(ctx, rows)
    index = range(len(rows.rows)), rows.rows
    lower[index] = lower[index].real / 2
    lower += block(adjoint_in_rows(ctx, rows))
    values, V = eigenpairs(ctx, rows, scale)
    return ctx.new_replicated(values), V


def _on_one_rank(ctx: Context, rows: DistMatrix) -> tuple[DistMatrix, DistMatrix]:
    n, dtype = rows.shape[0], rows.dtype
    V = ctx.empty((n, n), dtype, "CIRC_CIRC")  # fails here if memory is short
    spare = ctx.empty((2 * n, n), dtype, "CIRC_CIRC")  # the memory that LAPACK will use
    del spare
    whole = ctx.to_layout(rows, "CIRC_CIRC")
    W: Array = np.empty(n, np.zeros(0, dtype).real.dtype)
    failure = ""
    if ctx.rank == 0:
        try:
            W[...], V.local[...] = scipy.linalg.eigh(
                whole.local, overwrite_a=True, check_finite=False, driver="evd"
            )
        except scipy.linalg.LinAlgError as error:
            failure = str(error)
    failure = ctx.comm.bcast(failure)
    require(not failure, "LinAlgError", f"eigh: {failure}")
    ctx.comm.Bcast(W)
    return ctx.new_replicated(W), ctx.to_layout(V, "VC_STAR")
