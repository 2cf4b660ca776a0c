"""Thin QR: the choice of the algorithm by shape and condition."""

from __future__ import annotations

import numpy as np

from ali.blocks import Array, block, floating
from ali.interface import Context
from ali.linalg import householder
from ali.linalg.cholesky_qr import cholesky_qr
from ali.linalg.cyclic_rows import copy_to_rows
from ali.linalg.gemm import inner
from ali.linalg.tsqr import TallQR
from mpi_workers.matrix.dist_matrix import DistMatrix

# Order up to which a matrix may be gathered on rank 0: 2 MiB of float64. CPU time of order 512 on 2
# ranks: QR 0.018 s on rank 0 and 0.033 by panels, SVD 0.06 and 0.26; QR is level at order 1024.
ON_ONE_RANK = 512


def stays_spread(ctx: Context, n: int) -> bool:
    """Whether matrices of order n are too large to be gathered on rank 0."""
    return ctx.size > 1 and n > ON_ONE_RANK


def exceeds_share(ctx: Context, rows: int, cols: int) -> bool:
    """Whether ``cols x cols`` elements exceed a rank's share of ``rows x cols``, and its limit."""
    return stays_spread(ctx, cols) and rows // ctx.size < cols


def thin_qr(ctx: Context, A: DistMatrix) -> tuple[DistMatrix, DistMatrix]:
    """Q, R in VC_STAR with a real diagonal >= 0 of R; see `ali.linalg.qr`. Collective."""
    (m, n), k = A.shape, min(A.shape)
    if exceeds_share(ctx, m, k):  # TSQR would gather a part
        return _by_panels(ctx, A)
    local = floating(block(ctx.to_layout(A, "VC_STAR")))
    found = cholesky_qr(ctx, local, m)
    if found is not None:
        return found
    factors = TallQR(ctx.comm, local[:, :k])
    signs: Array | None = None
    corner = ctx.empty((k, k), local.dtype, "CIRC_CIRC")  # whole on rank 0
    if factors.r is not None:
        turn, length = _phases(np.diagonal(factors.r))
        signs = np.diag(turn)
        corner.local[...] = turn.conj()[:, None] * factors.r
        np.fill_diagonal(corner.local, length)
    own = factors.times(signs, k, local.dtype)
    Q = ctx.new_from_rows(own, m)
    R = ctx.to_layout(corner, "VC_STAR")
    if n > k:
        rest = inner(ctx, own.conj().T, local[:, k:])
        R, left = ctx.empty((k, n), local.dtype), R
        block(R)[:, :k] = block(left)
        block(R)[:, k:] = block(rest)
    return Q, R


def _by_panels(ctx: Context, A: DistMatrix) -> tuple[DistMatrix, DistMatrix]:
    dtype = floating(np.empty(0, A.dtype)).dtype
    Q = copy_to_rows(ctx, A, dtype)
    found = householder.factor(ctx, Q)
    R = householder.triangle(ctx, Q)
    Q = householder.form_q(ctx, Q, found)
    r = block(R)
    k, mine = R.shape[0], range(len(R.rows))
    diagonal = np.empty(k, dtype)
    for q, part in enumerate(ctx.comm.allgather(r[mine, R.rows])):
        diagonal[q :: ctx.size] = part
    turn, length = _phases(diagonal)
    r *= turn[R.rows, None].conj()
    r[mine, R.rows] = length[R.rows]
    block(Q)[...] *= turn
    return Q, R


def _phases(diagonal: Array) -> tuple[Array, Array]:
    """The phases (1 where it is 0) and the absolute values of a diagonal."""
    wide = np.result_type(diagonal.dtype, np.float64)  # divides subnormal numbers exactly
    length = np.abs(diagonal.astype(wide))
    turn = np.where(length > 0, diagonal, 1) / np.where(length > 0, length, 1)
    return turn.astype(diagonal.dtype), length
