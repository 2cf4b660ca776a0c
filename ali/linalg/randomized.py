"""A basis of the dominant row space of a tall matrix, from products with random vectors.

Sources: Musco, Musco, "Randomized block Krylov methods for stronger and faster approximate singular
value decomposition", NIPS 2015 (algorithm 2); Halko, Martinsson, Tropp, "Finding structure with
randomness", SIAM Review 53(2), 2011.
"""

from __future__ import annotations

import numpy as np

from ali.blocks import Array
from ali.interface import Context
from ali.linalg.collectives import sum_over_ranks
from ali.linalg.creation import normal_rows
from ali.linalg.cyclic_rows import gather_rows
from ali.linalg.tsqr import TallQR

PURPOSE = 2  # random streams different from those of `random_normal`; the next are used as well


def krylov_basis(
    ctx: Context, local: Array, size: int, scale: float, steps: int, seed: int
) -> tuple[Array, Array]:
    """Orthonormal basis K of the span of ``W, G W, ..., G^steps W``, and X K. Collective.

    G is ``X^H X`` and W is random, with `size` columns. The space contains that of subspace
    iteration, ``G^steps W``, for the same passes over X: measured on spectra from exponential decay
    to noise, the singular values are 3 to 1000 times as accurate after 7 passes, for 1.4 times the
    CPU time (6000 x 600, size 30).

    Parameters
    ----------
    local : ndarray, shape (local_m, n)
        This rank's rows of X; float or complex.
    size : int
        ``size (steps + 1)`` is at most n and the number of rows of X.
    scale : float
        A norm of X; products are divided by it.

    Returns
    -------
    products : ndarray, shape (local_m, size (steps + 1))
        This rank's rows of X K.
    basis : ndarray, shape (local_n, size (steps + 1))
        This rank's rows of K, in VC_STAR.

    Notes
    -----
    ``2 steps + 1`` passes over X. Each block is orthogonalized against the blocks before, twice
    (once suffices unless X has a low rank), and by TSQR.
    """
    n, dtype = local.shape[1], local.dtype
    width = size * (steps + 1)
    products = np.empty((len(local), width), dtype, order="F")
    basis = np.empty((len(range(ctx.rank, n, ctx.size)), width), dtype, order="F")
    new = _random(ctx, n, size, seed, dtype)
    for step in range(steps + 1):
        ctx.check()
        here = slice(step * size, (step + 1) * size)
        for _ in range(2 if step else 1):
            known = basis[:, : here.start]
            new = new - known @ sum_over_ranks(ctx.comm, known.conj().T @ new)
            new = _orthonormal(ctx, new)
        basis[:, here] = new
        products[:, here] = local @ gather_rows(ctx, new, 0, n)
        ctx.progress((step + 1) / (steps + 2), f"block {step + 1} of {steps + 1}")
        if step == steps:
            break
        ahead = products[:, here] / dtype.type(scale)
        ahead = sum_over_ranks(ctx.comm, (ahead.conj().T @ local) / dtype.type(scale))
        # Where X maps all blocks to zero, the rounding errors added here are as good as any vector.
        noise = _random(ctx, n, size, seed + step + 1, dtype) * dtype.type(np.finfo(dtype).eps)
        new = ahead.conj().T[ctx.rank :: ctx.size] + noise
    return products, basis


def _random(ctx: Context, n: int, size: int, seed: int, dtype: np.dtype[np.generic]) -> Array:
    """This rank's rows of random vectors of length 1 or so."""
    mine = range(ctx.rank, n, ctx.size)
    found = normal_rows(mine, size, seed, PURPOSE)
    if np.dtype(dtype).kind == "c":
        found = found + 1j * normal_rows(mine, size, seed, PURPOSE + 1)
    return np.asarray((found / n**0.5).astype(dtype))


def _orthonormal(ctx: Context, mine: Array) -> Array:
    factors = TallQR(ctx.comm, mine)
    size = mine.shape[1]
    identity = np.eye(size, dtype=mine.dtype) if factors.r is not None else None
    return factors.times(identity, size, mine.dtype)
