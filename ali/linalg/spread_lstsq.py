"""Least squares of which no rank holds more than its share: QR by panels, then an SVD if needed.

The results are those of LAPACK's gelsd. Source: Golub, Van Loan, "Matrix Computations", 4th ed.,
5.3 and 5.5; 6.1 of ridge regression.
"""

from __future__ import annotations

import numpy as np

from ali.blocks import Array, block, frobenius
from ali.interface import Context
from ali.linalg import householder, reflectors
from ali.linalg.collectives import sum_over_ranks
from ali.linalg.cyclic_rows import copy_to_rows, rows_before
from ali.linalg.gemm import inner, product
from ali.linalg.iterative import column_dots
from ali.linalg.least_singular import least_singular
from ali.linalg.polar import adjoint_in_rows
from ali.linalg.polar_svd import svd_in_rows
from ali.linalg.reflectors import Panel
from ali.linalg.triangular import triangular_solve
from mpi_workers.matrix.dist_matrix import DistMatrix


def minimize(
    ctx: Context, A: DistMatrix, B: DistMatrix, limit: float, values: bool
) -> tuple[DistMatrix, Array, int, Array | None]:
    """X, the squares of residuals, the rank, and with `values` the singular values. Collective.

    Parameters
    ----------
    A, B : DistMatrix, floating point, of the same dtype, finite
    limit : float
        Singular values up to it times the largest count as zero.
    values : bool
        Whether the singular values are wanted. If not, and A has full rank for certain, there is
        no SVD, which takes twenty times as long as the QR.
    """
    (m, n), r, dtype = A.shape, B.shape[1], A.dtype
    wide, small = m < n, min(m, n)
    tall = adjoint_in_rows(ctx, A) if wide else copy_to_rows(ctx, A, dtype)
    right = copy_to_rows(ctx, B, dtype)
    lost = np.zeros(r)
    found = householder.factor(ctx, tall, None if wide else block(right))
    edge = rows_before(small, ctx.rank, ctx.size)
    side = ctx.new_from_rows(block(right)[:edge], small)
    if not wide:
        lost = lost + column_dots(*[block(right)[edge:]] * 2)
    R = householder.triangle(ctx, tall)
    S: Array | None = None
    rank = small
    unit = frobenius(ctx, R) or 1.0
    block(R)[...] /= dtype.type(unit)
    if values or least_singular(ctx, R) <= limit:
        S, U, V = svd_in_rows(ctx, "lstsq", R)
        rank = int(np.count_nonzero(limit * S[:1].max(initial=0) < S))
        if wide:
            U, V = V, U
        Y = inner(ctx, block(U).conj().T, block(side))
        y, mine = block(Y), np.asarray(Y.rows)
        gone = mine >= rank
        lost = lost + column_dots(*[y[gone]] * 2)
        y[gone] = 0
        y[~gone] /= S[mine[~gone], None]
        side = product(ctx, V, Y, "rows")
        S = S * S.dtype.type(unit)
    else:
        triangular_solve(ctx, R, side, lower=False, adjoint=wide)
    block(side)[...] /= dtype.type(unit)
    del R
    residuals = sum_over_ranks(ctx.comm, np.asarray(lost)).astype(np.zeros(0, dtype).real.dtype)
    if not wide:
        return side, residuals, rank, S
    return _times_q(ctx, tall, found, side), residuals, rank, S


def _times_q(ctx: Context, A: DistMatrix, found: list[Panel], side: DistMatrix) -> DistMatrix:
    """``Q [side; 0]`` of a factored A."""
    X = ctx.zeros((A.shape[0], side.shape[1]), A.dtype)
    x = block(X)
    x[: len(side.rows)] = block(side)
    for panel in reversed(found):
        ctx.check()
        rows, y = reflectors.vectors(ctx, block(A), panel)
        reflectors.apply(ctx, y, panel.t, x[rows])
    return X


def regularized(ctx: Context, A: DistMatrix, B: DistMatrix, lam: float) -> DistMatrix:
    """The X that minimizes ``|A X - B|^2 + lam |X|^2``. Collective.

    Parameters
    ----------
    A, B : DistMatrix, floating point, of the same dtype, finite
    lam : float
        Above 0.

    Notes
    -----
    QR by panels of ``[A; sqrt(lam) I]``, or of ``[A^H; sqrt(lam) I]`` if A is wide: some
    ``5 l s^2 / ranks`` flops with s = min(m, n), l = max(m, n). Memory per rank: its share of 5
    matrices.
    """
    (m, n), r, dtype = A.shape, B.shape[1], A.dtype
    wide, small, large = m < n, min(m, n), max(m, n)
    edge = rows_before(large, ctx.rank, ctx.size)
    stack = ctx.zeros((large + small, small), dtype)
    s = block(stack)
    s[:edge] = block(adjoint_in_rows(ctx, A) if wide else copy_to_rows(ctx, A, dtype))
    below = np.asarray(stack.rows)[edge:] - large
    s[range(edge, len(s)), below] = lam**0.5
    right = None
    if not wide:
        right = np.zeros((len(s), r), dtype)
        right[:edge] = block(copy_to_rows(ctx, B, dtype))
    found = householder.factor(ctx, stack, right, identity_from=large)
    R = householder.triangle(ctx, stack)
    if right is not None:
        X = ctx.new_from_rows(right[: len(R.rows)], small)
        triangular_solve(ctx, R, X, lower=False)
        return X
    side = copy_to_rows(ctx, B, dtype)
    triangular_solve(ctx, R, side, lower=False, adjoint=True)
    del R
    return ctx.new_from_rows(block(_times_q(ctx, stack, found, side))[:edge], n)
