"""Eigenvalues and eigenvectors of a real tridiagonal matrix: divide and conquer, rows in VC_STAR.

The matrix is cut in two halves and a rank-one matrix. Every rank has its rows of both halves'
eigenvectors and multiplies them by the eigenvectors of the rank-one problem, which it computes a
panel at a time: only vectors are communicated. Source: see ali/linalg/secular.py.
"""

from __future__ import annotations

import numpy as np
import scipy.linalg

from ali.blocks import Array, block, panel_width, panels
from ali.interface import Context
from ali.linalg.cyclic_rows import rows_before
from ali.linalg.secular import Deflated, RankOne, deflate
from mpi_workers.matrix.dist_matrix import DistMatrix

LEAF = 256  # order of a matrix that LAPACK solves on rank 0
WIDTH = 512  # columns of a panel, at most


def tridiagonal_eigh(ctx: Context, d: Array, e: Array) -> tuple[Array, DistMatrix]:
    """Eigenvalues, unordered, and eigenvectors of a tridiagonal matrix. Collective.

    Parameters
    ----------
    d, e : ndarray of float64, shapes (n,) and (n - 1,)
        Diagonal and subdiagonal, the same on every rank.

    Returns
    -------
    values : ndarray, shape (n,)
        The same on every rank.
    Z : DistMatrix, shape (n, n), VC_STAR
        Column i belongs to value i.

    Notes
    -----
    At most ``4/3 n^3 / ranks`` flops in products of matrices, and ``O(n^2)`` on every rank. Memory:
    1.5 matrices, and panels of ``512 n`` words.
    """
    n = len(d)
    half = n // 2 // ctx.size * ctx.size  # so that the second half begins on rank 0
    if n <= LEAF or half == 0:
        values, vectors = np.empty(n), np.empty((n, n))
        if ctx.rank == 0:
            values[...], vectors[...] = scipy.linalg.eigh_tridiagonal(d, e, lapack_driver="stevd")
        ctx.comm.Bcast(values)
        ctx.comm.Bcast(vectors)
        return values, ctx.new_replicated(vectors, "VC_STAR")
    ctx.check()
    rho, cut = abs(float(e[half - 1])), d.copy()
    cut[half - 1 : half + 1] -= rho
    upper, Z1 = tridiagonal_eigh(ctx, cut[:half], e[: half - 1])
    lower, Z2 = tridiagonal_eigh(ctx, cut[half:], e[half:])
    z = np.concatenate([_row(ctx, Z1, half - 1), _row(ctx, Z2, 0) * np.sign(e[half - 1])])
    left: Deflated | None = None
    if ctx.rank == 0:  # alone: other ranks may round differently
        left = deflate(np.concatenate([upper, lower]), z, rho)
    left = ctx.comm.bcast(left)
    assert left is not None
    return _merged(ctx, left, Z1, Z2)


def _row(ctx: Context, Z: DistMatrix, i: int) -> Array:
    """Row i of Z, on every rank."""
    mine = i % ctx.size == ctx.rank
    row = block(Z)[i // ctx.size].copy() if mine else np.empty(Z.shape[1])
    ctx.comm.Bcast(row, i % ctx.size)
    return row


def _merged(
    ctx: Context, left: Deflated, Z1: DistMatrix, Z2: DistMatrix
) -> tuple[Array, DistMatrix]:
    n, half, kept = len(left.d), Z1.shape[0], left.kept
    rank_one = RankOne(ctx, left.d[kept], left.z, left.rho) if kept.size else None
    values = np.concatenate([rank_one.values if rank_one else left.d[:0], left.d[left.known]])
    Z = ctx.empty((n, n), np.float64)
    out, top = block(Z), rows_before(half, ctx.rank, ctx.size)
    for some in panels(n, min(WIDTH, panel_width(n, 8))):
        ctx.check()
        U = np.zeros((n, some.stop - some.start))
        solved = slice(some.start, min(some.stop, len(kept)))
        if rank_one is not None and solved.start < solved.stop:
            U[kept, : solved.stop - solved.start] = rank_one.vectors(solved)
        for j in range(max(some.start, len(kept)), some.stop):
            U[left.known[j - len(kept)], j - some.start] = 1
        for p, q, c, s in reversed(left.rotations):
            U[p], U[q] = c * U[p] - s * U[q], s * U[p] + c * U[q]
        np.matmul(block(Z1), U[:half], out=out[:top, some])
        np.matmul(block(Z2), U[half:], out=out[top:, some])
    return values, Z
