"""Polar decomposition by QDWH iterations, whose matrices no rank holds whole.

The iterations are rational functions that bring all singular values to 1, at most six in float64.
Sources: Nakatsukasa, Bai, Gygi, "Optimizing Halley's iteration for computing the matrix polar
decomposition", SIAM J. Matrix Anal. Appl. 31(5), 2010; Nakatsukasa, Higham, "Stable and efficient
spectral divide and conquer algorithms for the symmetric eigenvalue decomposition and the SVD",
SIAM J. Sci. Comput. 35(3), 2013.
"""

from __future__ import annotations

import math

import numpy as np

from ali.blocks import (
    block,
    finite_norm,
    float_dtype,
    panel_width,
    panels,
)
from ali.interface import Context, routine
from ali.linalg import qr_factorization
from ali.linalg.local_products import multiply
from ali.linalg.products import inner, product
from ali.linalg.rows import adjoint_in_rows, copy_to_rows, gather_rows, rows_before
from ali.linalg.triangular import cholesky_in_place, triangular_solve
from mpi_workers.matrix.dist_matrix import DistMatrix

CHOLESKY_BELOW = 100.0  # weights c for which Cholesky is stable (Nakatsukasa, Higham 2013)


@routine("Q", "P")
def polar(ctx: Context, A: DistMatrix) -> tuple[DistMatrix, DistMatrix]:
    """Polar decomposition A = Q P.

    Parameters
    ----------
    A : matrix, shape (m, n)
        Best in VC_STAR. Integers are promoted to float64.

    Returns
    -------
    Q : matrix, shape (m, n), VC_STAR
        Orthonormal columns (rows if m < n): the nearest such matrix to A. If A does not have full
        rank, its columns are orthonormal only in the range of A.
    P : matrix, shape (n, n), VC_STAR
        Hermitian positive semidefinite.

    Raises
    ------
    LinAlgError
        If A contains NaN or infinity, or its norm is too large for its dtype.

    Notes
    -----
    QDWH, with s = min(m, n): QR, and if m and n differ the decomposition of its R; then up to three
    iterations of ``9 s^3 / ranks`` flops and as many of ``3 s^3 / ranks``; ``2 m n s / ranks`` for
    P. A rank receives some ``3 s^2`` words in an iteration, and holds its share of 5 matrices.
    Sources: see ali/linalg/polar_factor.py.

    Error: 10 eps, |A - Q P| / |A| and |Q^H Q - I|. Peak memory: 2.0 times arguments and results.
    """
    dtype = float_dtype(A.dtype)
    wide = A.shape[0] < A.shape[1]
    A = copy_to_rows(ctx, A, dtype)
    Q = unitary_factor(ctx, "polar", adjoint_in_rows(ctx, A) if wide else A)
    if wide:
        Q = adjoint_in_rows(ctx, Q)
    return Q, hermitian_factor(ctx, Q, A)


def hermitian_factor(ctx: Context, Q: DistMatrix, A: DistMatrix) -> DistMatrix:
    """The Hermitian part of Q^H A, both in VC_STAR. Collective."""
    P = inner(ctx, block(Q).conj().T, block(A))
    mirror = adjoint_in_rows(ctx, P)
    local = block(P)
    local += block(mirror)
    local *= 0.5
    return P


def unitary_factor(ctx: Context, name: str, A: DistMatrix) -> DistMatrix:
    """The nearest matrix to A with orthonormal columns; m >= n, VC_STAR, floating. Collective."""
    scale = finite_norm(ctx, name, A)
    m, n = A.shape
    if scale == 0:
        return ctx.new_replicated(np.eye(m, n, dtype=A.dtype), "VC_STAR")
    if m > n:
        Q, R = qr_factorization.thin_qr(ctx, A)
        return product(ctx, Q, unitary_factor(ctx, name, R), "rows")
    X = ctx.empty_like(A)
    np.divide(block(A), A.dtype.type(scale), out=block(X))
    eps = float(np.finfo(A.dtype).eps)
    R = copy_to_rows(ctx, X, X.dtype)
    qr_factorization.factor(ctx, R)
    least = max(eps, qr_factorization.least_singular(ctx, R))
    del R
    step = 0
    while abs(1 - least) > 10 * eps:
        a, b, c = _weights(least)
        if c > CHOLESKY_BELOW:
            _by_qr(ctx, X, a, b, c)
        else:
            X = _by_cholesky(ctx, X, a, b, c)
        least = min(1.0, least * (a + b * least**2) / (1 + c * least**2))
        step += 1
        ctx.progress(1 - 0.6**step, f"{name}: QDWH iteration {step}")
    return X


def _weights(least: float) -> tuple[float, float, float]:
    """Of ``x (a + b x^2) / (1 + c x^2)``, which brings values in [least, 1] the closest to 1."""
    square = least * least
    d = (4 * (1 - square) / square**2) ** (1 / 3)
    root = math.sqrt(1 + d)
    a = root + 0.5 * math.sqrt(8 - 4 * d + 8 * (2 - square) / (square * root))
    b = (a - 1) ** 2 / 4
    return a, b, a + b - 1


def _by_qr(ctx: Context, X: DistMatrix, a: float, b: float, c: float) -> None:
    """``X = b/c X + (a - b/c)/sqrt(c) Q1 Q2^H`` with ``[sqrt(c) X; I] = [Q1; Q2] R``."""
    n, x = X.shape[0], block(X)
    count = len(x)
    stack = ctx.zeros((2 * n, n), X.dtype)
    s = block(stack)
    np.multiply(x, X.dtype.type(c**0.5), out=s[:count])
    below = np.asarray(stack.rows, np.int64)[count:] - n  # int64 also without rows
    s[range(count, len(s)), below] = 1
    qr_factorization.form_q(ctx, stack, qr_factorization.factor(ctx, stack, identity_from=n))
    x *= X.dtype.type(b / c)
    s[:count] *= X.dtype.type((a - b / c) / c**0.5)
    for some in panels(n, panel_width(n, X.dtype.itemsize)):
        mine = slice(*(rows_before(n + i, ctx.rank, ctx.size) for i in (some.start, some.stop)))
        right = gather_rows(ctx, s[mine], n + some.start, n + some.stop)
        multiply(s[:count], right.conj().T, x[:, some], add=1)


def _by_cholesky(ctx: Context, X: DistMatrix, a: float, b: float, c: float) -> DistMatrix:
    """``b/c X + (a - b/c) (I + c X X^H)^-1 X``, in a new matrix; X is overwritten."""
    n, x = X.shape[0], block(X)
    Z = ctx.empty_like(X)
    z = block(Z)
    for some in panels(n, min(1024, panel_width(n, X.dtype.itemsize))):
        ctx.check()
        at = rows_before(some.start, ctx.rank, ctx.size)  # the lower triangle suffices
        mine = slice(at, rows_before(some.stop, ctx.rank, ctx.size))
        right = gather_rows(ctx, x[mine], some.start, some.stop)
        z[at:, some] = X.dtype.type(c) * multiply(x[at:], right.conj().T)
    z[range(len(X.rows)), X.rows] += 1
    cholesky_in_place(ctx, Z)
    Y = copy_to_rows(ctx, X, X.dtype)
    triangular_solve(ctx, Z, Y, lower=True)
    triangular_solve(ctx, Z, Y, lower=True, adjoint=True)
    block(Y)[...] *= X.dtype.type(a - b / c)
    x *= X.dtype.type(b / c)
    block(Y)[...] += x
    return Y
