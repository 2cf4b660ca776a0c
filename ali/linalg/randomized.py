"""A basis of the dominant row space of a tall matrix, from products with random vectors.

Source: Halko, Martinsson, Tropp, "Finding structure with randomness", SIAM Review 53(2), 2011,
algorithm 4.4.
"""

from __future__ import annotations

import numpy as np
import scipy.linalg

from ali.blocks import Array
from ali.interface import Context
from ali.linalg.collectives import sum_over_ranks
from ali.linalg.creation import normal_rows
from ali.linalg.tsqr import TallQR

PURPOSE = 2  # random streams different from those of `random_normal`


def range_basis(
    ctx: Context, local: Array, size: int, scale: float, power_iterations: int, seed: int
) -> Array:
    """Orthonormal basis of the row space of ``Q^H X``, on every rank. Collective.

    Q is a basis of the range of ``X (X^H X)^power_iterations W`` for a random W: X is approximately
    ``X Z Z^H`` with the returned basis Z.

    Parameters
    ----------
    local : ndarray, shape (local_m, n)
        This rank's rows of X; float or complex.
    size : int
        Number of vectors; at most n and the number of rows of X.
    scale : float
        A norm of X; products are divided by it.

    Returns
    -------
    ndarray, shape (n, size)
    """
    n, dtype = local.shape[1], local.dtype
    basis = normal_rows(n, size, seed, PURPOSE)
    if np.dtype(dtype).kind == "c":
        basis = basis + 1j * normal_rows(n, size, seed, PURPOSE + 1)
    basis = (basis / n**0.5).astype(dtype)
    for step in range(power_iterations + 1):
        ctx.check()
        factors = TallQR(ctx.comm, (local @ basis) / dtype.type(scale))
        identity = np.eye(size, dtype=dtype) if factors.r is not None else None
        q = factors.times(identity, size, dtype)
        product = sum_over_ranks(ctx.comm, (q.conj().T @ local).conj().T / dtype.type(scale))
        basis = np.empty((n, size), dtype)
        if ctx.rank == 0:
            basis[...], _ = scipy.linalg.qr(product, mode="economic", check_finite=False)
        ctx.comm.Bcast(basis)
        ctx.progress((step + 1) / (power_iterations + 2), f"iteration {step + 1}")
    return basis
