"""Leading singular vectors of a tall matrix by ARPACK, with products on all ranks.

Source: Gittens et al., "Alchemist: An Apache Spark <=> MPI Interface",
Concurrency Computat. Pract. Exper. 31, 2019 (truncated SVD by ARPACK on the Gram
matrix, which is never formed); Lehoucq, Sorensen, Yang, "ARPACK Users' Guide",
SIAM, 1998.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import scipy.linalg
from scipy.sparse import issparse
from scipy.sparse.linalg import ArpackError, ArpackNoConvergence, LinearOperator, eigsh

from ali.blocks import CHUNK, Array, panels
from ali.interface import Context
from mpi_workers.failures import Failure

SEED = 2018
Rows: TypeAlias = Any  # ndarray or csr_array


def basis_size(rank: int, n: int) -> int:
    """The number of vectors that ARPACK keeps to find `rank` of `n`: its default."""
    return min(n, max(2 * rank + 1, 20))


def right_vectors(
    ctx: Context, local: Rows, rank: int, scale: float, tol: float, max_iterations: int
) -> Array:
    """Orthonormal basis of the leading right singular vectors of X, on every rank. Collective.

    ARPACK runs on rank 0, and the other ranks multiply: ranks whose processors round differently
    would otherwise take different decisions and deadlock.

    Parameters
    ----------
    local : ndarray or csr_array, shape (local_m, n)
        This rank's rows of X; float or complex.
    rank : int
        Number of vectors; ``basis_size(rank, n) < n``.
    scale : float
        A norm of X: the operator is ``X^H X / scale^2``, which neither over- nor underflows.
    tol, max_iterations
        ARPACK's; 0 means machine precision, and ``10 n`` restarts.

    Returns
    -------
    ndarray, shape (n, rank)

    Raises
    ------
    Failure
        LinAlgError on every rank, if ARPACK does not converge.

    Notes
    -----
    A product costs ``4 local_m n`` flops and two messages of ``n`` words. Memory:
    ``n basis_size`` on rank 0, ``n rank`` elsewhere.
    """
    n, dtype = local.shape[1], local.dtype
    message = np.empty(n + 1, dtype)  # a vector, and whether to continue
    found = np.empty((n, rank), dtype)
    failure = ""
    if ctx.rank == 0:
        try:
            found[...] = _arpack(ctx, local, message, rank, scale, tol, max_iterations)
        except ArpackNoConvergence as error:
            failure = (
                f"ARPACK found {len(error.eigenvalues)} of {rank} singular values before "
                "max_iterations: allow more, give a larger tol, or ask for fewer"
            )
        except ArpackError as error:
            failure = f"ARPACK failed: {error}"
        message[n] = 0
        ctx.comm.Bcast(message)
    else:
        while True:
            ctx.comm.Bcast(message)
            if message[n] == 0:
                break
            ctx.comm.Reduce(_gram_times(local, message[:n], scale), None)
    failure = ctx.comm.bcast(failure)
    if failure:
        raise Failure("LinAlgError", f"truncated_svd: {failure}")
    ctx.comm.Bcast(found)
    return found


def _arpack(
    ctx: Context,
    local: Rows,
    message: Array,
    rank: int,
    scale: float,
    tol: float,
    max_iterations: int,
) -> Array:
    n, dtype = local.shape[1], local.dtype
    kept = basis_size(rank, n)
    product = np.empty(n, dtype)
    count = 0

    def multiply(x: Array) -> Array:
        nonlocal count
        count += 1
        message[:n] = x.reshape(n)
        message[n] = 1
        ctx.comm.Bcast(message)
        ctx.comm.Reduce(_gram_times(local, message[:n], scale), product)
        # The number of products is not known beforehand: one basis counts as half of the work,
        # the next as half of the rest.
        ctx.progress(1 - 0.5 ** (count / kept), f"ARPACK: {count} products")
        return product.copy()

    random = np.random.default_rng(SEED)
    start = np.asarray(random.standard_normal(n), dtype=dtype)
    operator = LinearOperator((n, n), matvec=multiply, dtype=dtype)
    _, vectors = eigsh(
        operator,
        rank,
        which="LM",
        v0=start,
        ncv=kept,
        tol=tol,
        maxiter=max_iterations or None,
        rng=random,
    )
    # For complex matrices SciPy uses ARPACK's solver for general matrices, whose vectors of a
    # multiple value (zero, for a matrix of low rank) are not orthogonal.
    orthonormal, _ = scipy.linalg.qr(vectors, mode="economic", check_finite=False)
    return np.asarray(orthonormal)


def _gram_times(local: Rows, x: Array, scale: float) -> Array:
    """This rank's part of ``X^H X x / scale^2``, in one pass over its rows."""
    if issparse(local):
        return np.asarray((local.T @ ((local @ x) / scale).conj()).conj() / scale)
    result = np.zeros_like(x)
    rows = max(64, CHUNK // max(1, local.shape[1] * local.itemsize))
    for some in panels(local.shape[0], rows):
        part = local[some]
        y = (part @ x) / scale
        result += (y.conj() @ part).conj()  # not part.conj().T: that copies
    return result / scale
