"""Singular value decompositions that no rank holds whole: QR, polar factor, eigenvectors.

``A = Q H`` and ``H = V S V^H`` give ``A = (Q V) S V^H``. Source: Nakatsukasa, Higham, "Stable and
efficient spectral divide and conquer algorithms for the symmetric eigenvalue decomposition and the
SVD", SIAM J. Sci. Comput. 35(3), 2013.
"""

from __future__ import annotations

import numpy as np
import scipy.linalg

from ali.blocks import Array, block, frobenius
from ali.interface import Context
from ali.linalg import householder, tridiagonal
from ali.linalg.gemm import product
from ali.linalg.hermitian_eigen import eigenpairs
from ali.linalg.polar import hermitian_factor, unitary_factor
from ali.linalg.thin_qr import thin_qr
from mpi_workers.matrix.dist_matrix import DistMatrix

NOISE = 100.0  # roundings of the largest value, below which vectors of U are not orthogonal yet


def svd_in_rows(ctx: Context, name: str, A: DistMatrix) -> tuple[Array, DistMatrix, DistMatrix]:
    """S on every rank, U and V in VC_STAR, of a floating A in VC_STAR with m >= n. Collective.

    Notes
    -----
    QR of A, unless it is square; then some ``40 n^3 / ranks`` flops, nearly all in products. Memory
    per rank: its share of 6 matrices of order n.
    """
    if A.shape[0] > A.shape[1]:
        Q, R = thin_qr(ctx, A)
        S, left, V = svd_in_rows(ctx, name, R)
        return S, product(ctx, Q, left, "rows"), V
    n = A.shape[1]
    unitary = unitary_factor(ctx, name, A)
    H = hermitian_factor(ctx, unitary, A)
    # Minus H, so that its eigenvalues ascend as the singular values descend.
    block(H)[...] *= -1
    values, V = eigenpairs(ctx, H, frobenius(ctx, H))
    del H
    S = np.abs(values)
    U = product(ctx, unitary, V, "rows")
    del unitary
    if n and S.min() <= NOISE * n * float(np.finfo(A.dtype).eps) * S.max():
        # QDWH does not bring the directions of singular values at the level of noise to length 1.
        found = householder.factor(ctx, U)
        turn = np.empty(n, A.dtype)
        mine = block(U)[range(len(U.rows)), U.rows]
        for q, part in enumerate(ctx.comm.allgather(mine)):
            turn[q :: ctx.size] = np.where(part == 0, 1, part / np.abs(np.where(part, part, 1)))
        U = householder.form_q(ctx, U, found)
        block(U)[...] *= turn
    return _descending(S, U, V)


def _descending(S: Array, U: DistMatrix, V: DistMatrix) -> tuple[Array, DistMatrix, DistMatrix]:
    """Sorted: eigenvalues that are zero but for rounding may have the other sign."""
    order = np.argsort(-S, kind="stable")
    moved = np.flatnonzero(order != np.arange(len(S)))
    for matrix in (U, V):
        local = block(matrix)
        local[:, moved] = local[:, order[moved]]
    return S[order], U, V


def singular_values_in_rows(ctx: Context, name: str, A: DistMatrix) -> Array:
    """S alone, on every rank; see `svd_in_rows`. Collective."""
    if A.shape[0] > A.shape[1]:
        A = thin_qr(ctx, A)[1]
    H = hermitian_factor(ctx, unitary_factor(ctx, name, A), A)
    kind = np.zeros(0, A.dtype).real.dtype
    scale = frobenius(ctx, H)
    if scale:
        block(H)[...] /= kind.type(scale)
    diagonal, beside, _ = tridiagonal.reduce(ctx, H)
    S = np.empty(len(diagonal))
    if ctx.rank == 0:
        found = scipy.linalg.eigvalsh_tridiagonal(
            diagonal.astype(np.float64), beside.astype(np.float64)
        )
        S[...] = np.sort(np.abs(found))[::-1] * scale
    ctx.comm.Bcast(S)
    return S.astype(kind)
