"""Leading right singular vectors of a tall matrix from its Gram matrix: one pass, half the digits.

Squaring loses half the digits: singular values below the square root of the machine epsilon
(times the largest) are noise. For a small Gram matrix this is the fastest method.
Source: Golub, Van Loan, "Matrix Computations", 4th ed., section 8.6.
"""

from __future__ import annotations

import numpy as np
import scipy.linalg

from ali.blocks import Array, panel_width, panels
from ali.interface import Context
from ali.linalg.collectives import sum_over_ranks


def leading_vectors(ctx: Context, local: Array, rank: int, scale: float) -> Array:
    """Orthonormal basis of the leading right singular vectors of X, on every rank. Collective.

    Parameters
    ----------
    local : ndarray, shape (local_m, n)
        This rank's rows of X; float or complex.
    rank : int
        Number of vectors, at most n.
    scale : float
        A norm of X. The Gram matrix is that of ``X / scale`` if squares could over- or underflow.

    Returns
    -------
    ndarray, shape (n, rank)

    Notes
    -----
    ``local_m n^2`` flops (twice that where complex), ``n^2`` words up a tree of ranks, then
    ``9 n^3`` flops at most on rank 0; memory ``3 n^2`` words and a
    panel of 32 MiB.
    """
    n, dtype = local.shape[1], local.dtype
    gram = np.zeros((n, n), dtype)
    limits = np.finfo(dtype)
    safe = float(limits.tiny) ** 0.25 < scale < float(limits.max) ** 0.25
    for some in panels(local.shape[0], panel_width(n, local.itemsize)):
        part = local[some] if safe else local[some] / dtype.type(scale)
        gram += part.T @ part if dtype.kind == "f" else part.conj().T @ part
        ctx.check()
    ctx.progress(0.5, "Gram matrix")
    whole = sum_over_ranks(ctx.comm, gram)
    basis = np.empty((n, rank), dtype)
    if ctx.rank == 0:
        _, vectors = scipy.linalg.eigh(
            whole, subset_by_index=[n - rank, n - 1], check_finite=False, overwrite_a=True
        )
        basis[...] = vectors[:, ::-1]
    ctx.comm.Bcast(basis)
    return basis
