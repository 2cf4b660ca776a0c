"""Eigenvalues and eigenvectors of a Hermitian matrix that stays distributed."""

from __future__ import annotations

import numpy as np

from ali.blocks import Array, block, panel_width, panels
from ali.interface import Context
from ali.linalg import reflectors, tridiagonal
from ali.linalg.divide_conquer import tridiagonal_eigh
from mpi_workers.matrix.dist_matrix import DistMatrix


def eigenpairs(ctx: Context, A: DistMatrix, scale: float) -> tuple[Array, DistMatrix]:
    """Eigenvalues, ascending, and eigenvectors. Collective.

    Parameters
    ----------
    A : DistMatrix, shape (n, n), VC_STAR, floating point
        Hermitian; overwritten.
    scale : float
        Its Frobenius norm.

    Returns
    -------
    values : ndarray, shape (n,), real
        The same on every rank.
    V : DistMatrix, shape (n, n), VC_STAR

    Notes
    -----
    Tridiagonal form, divide and conquer in float64, and the vectors times the reflections: ``2 +
    4/3 + 2`` times ``n^3 / ranks`` flops; ``3 n^2`` words received. Memory per rank: its share of 4
    matrices.
    """
    n, local = A.shape[0], block(A)
    kind = np.zeros(0, A.dtype).real.dtype
    if scale:
        local /= kind.type(scale)
    diagonal, beside, found = tridiagonal.reduce(ctx, A)
    values, Z = tridiagonal_eigh(ctx, diagonal.astype(np.float64), beside.astype(np.float64))
    ctx.progress(0.8, "eigenvectors")
    order = np.argsort(values, kind="stable")
    V = ctx.empty((n, n), A.dtype)
    v = block(V)
    for some in panels(n, panel_width(n, 8)):
        v[:, some] = block(Z)[:, order[some]]
    del Z
    for panel in reversed(found):
        ctx.check()
        rows, y = reflectors.vectors(ctx, local, panel)
        reflectors.apply(ctx, y, panel.t, v[rows])
    return (values[order] * scale).astype(kind), V
