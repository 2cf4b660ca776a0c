"""QR, and least squares by QR: by panels, with an SVD of the factor where the rank is deficient.

The results are those of LAPACK's gelsd. Source: Golub, Van Loan, "Matrix Computations", 4th ed.,
5.3 and 5.5; 6.1 of ridge regression.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import scipy.linalg

from ali.blocks import (
    CHUNK,
    Array,
    block,
    float_dtype,
    frobenius,
    panel_width,
    panels,
    require_finite,
    require_range,
    require_same_rows,
)
from ali.interface import Context, routine
from ali.linalg import qr_factorization
from ali.linalg.collectives import sum_over_ranks
from ali.linalg.iterative import column_dots
from ali.linalg.native_libraries import call
from ali.linalg.products import inner, product
from ali.linalg.qr_factorization import Panel, TallQR, exceeds_share, stays_spread
from ali.linalg.rows import adjoint_in_rows, as_rows, copy_to_rows, rows_before
from ali.linalg.singular import svd_in_rows
from ali.linalg.triangular import triangular_solve
from mpi_workers.matrix.dist_matrix import DistMatrix


def minimize(
    ctx: Context, A: DistMatrix, B: DistMatrix, limit: float, values: bool, lam: float = 0.0
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
    lam : float
        Above 0: the X that minimizes ``|A X - B|^2 + lam |X|^2``, and nothing else. QR of
        ``[A; sqrt(lam) I]``, or of ``[A^H; sqrt(lam) I]`` if A is wide.
    """
    (m, n), dtype = A.shape, A.dtype
    wide, small, large = m < n, min(m, n), max(m, n)
    tall = adjoint_in_rows(ctx, A) if wide else copy_to_rows(ctx, A, dtype)
    if lam:
        tall = _above_identity(ctx, tall, lam**0.5)
    right = block(copy_to_rows(ctx, B, dtype))
    if lam and not wide:
        right = np.concatenate([right, np.zeros((len(tall.rows) - len(right), B.shape[1]), dtype)])
    reflections = qr_factorization.factor(
        ctx, tall, None if wide else right, identity_from=large if lam else None
    )
    edge = rows_before(small, ctx.rank, ctx.size)
    side = ctx.new_from_rows(right[:edge], small)
    lost = np.zeros(B.shape[1])
    if not (wide or lam):
        lost = lost + column_dots(*[right[edge:]] * 2)
    R = qr_factorization.triangle(ctx, tall)
    S: Array | None = None
    rank = small
    unit = frobenius(ctx, R) or 1.0
    block(R)[...] /= dtype.type(unit)
    if not lam and (values or qr_factorization.least_singular(ctx, R) <= limit):
        S, U, V = svd_in_rows(ctx, "lstsq", R)
        rank = int(np.count_nonzero(limit * S[:1].max(initial=0) < S))
        if wide:
            U, V = V, U
        Y = inner(ctx, block(U).conj().T, block(side))
        y, row_numbers = block(Y), np.asarray(Y.rows)
        gone = row_numbers >= rank
        lost = lost + column_dots(*[y[gone]] * 2)
        y[gone] = 0
        y[~gone] /= S[row_numbers[~gone], None]
        side = product(ctx, V, Y, "rows")
        S = S * S.dtype.type(unit)
    else:
        triangular_solve(ctx, R, side, lower=False, adjoint=wide)
    block(side)[...] /= dtype.type(unit)
    del R
    residuals = sum_over_ranks(ctx.comm, np.asarray(lost)).astype(np.zeros(0, dtype).real.dtype)
    if wide:
        side = _times_q(ctx, tall, reflections, side, n)
    return side, residuals, rank, S


def _above_identity(ctx: Context, A: DistMatrix, diagonal: float) -> DistMatrix:
    """``[A; diagonal I]``."""
    m, n = A.shape
    stack = ctx.zeros((m + n, n), A.dtype)
    edge = rows_before(m, ctx.rank, ctx.size)
    s = block(stack)
    s[:edge] = block(A)
    s[range(edge, len(s)), np.asarray(stack.rows, np.int64)[edge:] - m] = diagonal
    return stack


def _times_q(
    ctx: Context, A: DistMatrix, found: list[Panel], side: DistMatrix, m: int
) -> DistMatrix:
    """The first m rows of ``Q [side; 0]`` of a factored A."""
    X = ctx.zeros((A.shape[0], side.shape[1]), A.dtype)
    x = block(X)
    x[: len(side.rows)] = block(side)
    for panel in reversed(found):
        ctx.check()
        rows, y = qr_factorization.vectors(ctx, block(A), panel)
        qr_factorization.apply(ctx, y, panel.t, x[rows])
    return X if m == A.shape[0] else ctx.new_from_rows(x[: rows_before(m, ctx.rank, ctx.size)], m)


@routine("Q", "R")
def qr(ctx: Context, A: DistMatrix, method: str = "auto") -> tuple[DistMatrix, DistMatrix]:
    """Thin QR factorization A = Q R.

    Parameters
    ----------
    A : matrix, shape (m, n)
        Best in VC_STAR. Integers are promoted to float64.
    method : str
        "auto": the algorithm below. "scalapack", "elemental": that library's routine.

    Returns
    -------
    Q : matrix, shape (m, min(m, n)), VC_STAR
        Orthonormal columns, for A of any rank.
    R : matrix, shape (min(m, n), n), VC_STAR
        Upper triangular with a real diagonal >= 0. For A of full rank, Q and R do not depend on
        the number of ranks, except for rounding errors.

    Notes
    -----
    Where m/ranks >= 4 n and the condition number of A is below about the inverse root of the
    machine epsilon (1e7 in float64), CholeskyQR2: ``4 m n^2 / ranks`` flops in products of
    matrices, ``4 n^2`` words in ``4 log2(ranks)`` messages, Q, R and a panel of 32 MiB.
    Otherwise TSQR: ``4 m n^2 / ranks + O(n^3 log ranks)`` flops, ``2 n^2`` words in
    ``2 log2(ranks)`` messages, ``2 m n / ranks + n^2 log ranks`` words of memory. In TSQR ranks
    with at most n rows pass them on unchanged; where that would gather more than 512 columns,
    Householder vectors from TSQR of panels of 128 columns, ``4 m n^2 / ranks`` flops and the share
    of A and Q on each rank. A wide A is cut into
    ``[A1 A2]`` with a square A1 and ``R = [R1  Q^H A2]``. Q is orthonormal to rounding either
    way. Sources: Fukaya et al. 2020 (CholeskyQR2); Demmel, Grigori, Hoemmen, Langou 2012 (TSQR).

    Error: 20 eps, |A - Q R| / |A| and |Q^H Q - I|. Peak memory: 1.1 times arguments and results.
    """
    if method != "auto":
        return call(ctx, method, qr, A)
    return qr_factorization.thin_qr(ctx, A)


@routine("X", like={"X": "B"})
def lstsq(
    ctx: Context, A: DistMatrix, B: DistMatrix, rcond: float = -1.0, method: str = "auto"
) -> DistMatrix:
    """Least squares: the X of smallest norm that minimizes |A X - B|.

    Parameters
    ----------
    A : matrix, shape (m, n)
        Of any rank. Best in VC_STAR if tall, in STAR_VC if wide.
    B : matrix, shape (m, r) or (m,)
        Right-hand sides.
    rcond : float
        Singular values up to ``rcond`` times the largest count as zero; negative (the
        default): max(m, n) times the machine epsilon, as in NumPy.
    method : str
        "auto": the algorithm below. "scalapack", "elemental": that library's routine, for A
        of full rank; `rcond` is not used.

    Returns
    -------
    X : matrix, shape (n, r) or (n,), VC_STAR
        `least_squares` returns the other results of NumPy's lstsq too.

    Raises
    ------
    ShapeError
        If A and B differ in their numbers of rows.
    LinAlgError
        If A or B contains NaN or infinity.

    Notes
    -----
    With s = min(m, n), l = max(m, n): the triangle of TSQR of ``[A B]`` if A is tall (Q is not
    formed; for r > n it is: ``4 l s (s + r) / ranks`` flops, B is not copied), TSQR of A^H
    if it is wide; then the SVD of an s x s triangle on rank 0:
    ``2 l s (s + r) / ranks`` flops (``4 l s^2 / ranks`` if wide) ``+ O(s^3 log ranks) + 20 s^3``.
    Words: ``(s + r)^2 log2(ranks)``. Memory: ``l (s + r) / ranks`` (twice that if
    wide), and ``4 s^2 + s r`` on rank 0. For s above 512: QR by panels, ``4 l s^2 / ranks``
    flops, and an SVD only if A may not have full rank; the share of 6 matrices. Sources: LAPACK's
    gelsd (the same result); Demmel et al. 2012 (TSQR); Golub, Van Loan, 4th ed., 5.3.3
    (QR of ``[A B]``).

    Error: 2 eps, |A^H (A X - B)| / (|A| (|A| |X| + |B|)). Peak memory: 2.2 times arguments and
    results.
    """
    if method != "auto":
        return call(ctx, method, lstsq, A, B)
    return _least_squares(ctx, "lstsq", A, B, rcond)[0]


@routine("X", "residuals", "rank", "S", like={"X": "B"}, vectors=("residuals", "S"))
def least_squares(
    ctx: Context, A: DistMatrix, B: DistMatrix, rcond: float = -1.0
) -> tuple[DistMatrix, DistMatrix, int, DistMatrix]:
    """`lstsq` with all results of NumPy's, from one factorization.

    Parameters
    ----------
    A, B, rcond
        See `lstsq`.

    Returns
    -------
    X : matrix, shape (n, r) or (n,), VC_STAR
    residuals : vector, shape (r,), real, STAR_STAR
        ``|A X - B|^2`` of each column, for A of any rank and shape (NumPy returns them only for
        m > n and A of full rank).
    rank : int
        Number of singular values that do not count as zero.
    S : vector, shape (min(m, n),), real, STAR_STAR
        Singular values of A, descending.

    Raises
    ------
    ShapeError
        If A and B differ in their numbers of rows.
    LinAlgError
        If A or B contains NaN or infinity.

    Notes
    -----
    As `lstsq`. Residuals are norms of parts of the triangle of ``[A B]``: differences of
    nearly equal numbers are not formed. (For r > n they are norms of ``B - Q Q^H B``.)

    Error: 8 eps, of X as in `lstsq`; of the others relative to the largest element. Peak memory:
    2.2 times arguments and results.
    """
    X, residuals, rank, S = _least_squares(ctx, "least_squares", A, B, rcond)
    assert S is not None
    return X, ctx.new_replicated(residuals), rank, ctx.new_replicated(S)


def _least_squares(
    ctx: Context, name: str, A: DistMatrix, B: DistMatrix, rcond: float = -1.0, lam: float = 0.0
) -> tuple[DistMatrix, Array, int, Array | None]:
    """X; and on every rank the squares of residuals, the rank and the singular values.

    With lam above 0 X minimizes ``|A X - B|^2 + lam |X|^2``, and the others are not valid.
    """
    (m, n), r = A.shape, B.shape[1]
    require_same_rows(name, A, B)
    dtype = float_dtype(A.dtype, B.dtype)
    wide, small = m < n, min(m, n)
    local = block(ctx.to_layout(A, "STAR_VC" if wide else "VC_STAR")).astype(dtype, copy=False)
    tall = local.conj().T if wide else local
    right = block(ctx.to_layout(B, "STAR_STAR" if wide else "VC_STAR"))
    many = r > small > 0 and not (wide or lam)  # [A B] would cost r^2
    right = right if many else right.astype(dtype, copy=False)
    limit = rcond if rcond >= 0 else max(m, n) * float(np.finfo(dtype).eps)
    require_finite(ctx, name, A=tall, B=right)
    if exceeds_share(ctx, max(m, n), small) if lam else stays_spread(ctx, small):
        A, B = as_rows(ctx, A, dtype), as_rows(ctx, B, dtype)
        return minimize(ctx, A, B, limit, name != "lstsq", lam)
    # A = Q R: X = R^+ (Q^H B), and [A B] = Q [R  Q^H B]. A = (Q R)^H: X = Q (R^H)^+ B.
    # With lam rank 0 appends the rows of sqrt(lam) I to A or A^H; X is then the top of Q R^-H B.
    count = len(tall)
    whole = tall
    if lam or not (wide or many):
        more = small if lam and ctx.rank == 0 else 0
        whole = _stacked(tall, None if wide else right, more)
        np.fill_diagonal(whole[count:, :small], lam**0.5)
    factors = TallQR(ctx.comm, whole, vectors=wide or many, overwrite=whole is not tall)
    projected, rest = _projected(ctx, factors, small, right, dtype) if many else (None, None)
    X = np.empty((small, r), dtype)
    outcome: tuple[Array, int, Array | None] | None = None
    if factors.r is not None:
        triangle = factors.r[:small, :small]
        side = right if wide else factors.r[:small, small:] if projected is None else projected
        if lam:
            trans = "C" if wide else "N"
            X[...] = scipy.linalg.solve_triangular(triangle, side, trans=trans, check_finite=False)
            outcome = np.zeros(r), small, None
        else:
            u, s, vh = scipy.linalg.svd(triangle.conj().T if wide else triangle, check_finite=False)
            rank = int((s > limit * s[:1].max(initial=0)).sum())
            X[...] = vh[:rank].conj().T @ ((u[:, :rank].conj().T @ side) / s[:rank, None])
            lost = column_dots(*[u[:, rank:].conj().T @ side] * 2)
            if rest is not None:
                lost += rest
            elif not wide:
                lost += column_dots(*[factors.r[small:, small:]] * 2)
            outcome = lost.astype(s.dtype), rank, s
    outcome = ctx.comm.bcast(outcome)
    assert outcome is not None
    if wide:
        own_rows = factors.times(X if ctx.rank == 0 else None, r, dtype)
        return ctx.new_from_rows(own_rows[:count], n), *outcome
    ctx.comm.Bcast(X)
    return ctx.new_replicated(X, "VC_STAR"), *outcome


def _projected(
    ctx: Context, factors: TallQR, small: int, right: Array, dtype: np.dtype[Any]
) -> tuple[Array, Array]:
    """Q^H B on every rank, and the squares of what B has outside the range of Q. Collective."""
    Q = factors.times(np.eye(small, dtype=dtype) if factors.r is not None else None, small, dtype)
    r = right.shape[1]
    mine, rest = np.empty((small, r), dtype), np.empty(r)
    # Casts of such panels stay in the caches.
    some = list(panels(r, panel_width(len(right), dtype.itemsize, 4 * CHUNK)))
    for cols in some:
        mine[:, cols] = Q.conj().T @ right[:, cols].astype(dtype, copy=False)
    found = sum_over_ranks(ctx.comm, mine)
    for cols in some:
        ctx.check()
        rest[cols] = column_dots(*[right[:, cols] - Q @ found[:, cols]] * 2)
    return found, sum_over_ranks(ctx.comm, rest)


@routine("X", like={"X": "B"})
def ridge(ctx: Context, A: DistMatrix, B: DistMatrix, lam: float) -> DistMatrix:
    """Ridge regression: the X that minimizes |A X - B|^2 + lam |X|^2.

    Parameters
    ----------
    A : matrix, shape (m, n)
        Best in VC_STAR if tall, in STAR_VC if wide.
    B : matrix, shape (m, r) or (m,)
    lam : float
        Above 0; for 0 use `lstsq`. (Some authors write ``m lam``.)

    Returns
    -------
    X : matrix, shape (n, r) or (n,), VC_STAR

    Raises
    ------
    ShapeError
        If A and B differ in their numbers of rows.
    BadArgumentError
        If lam is not above 0.
    LinAlgError
        If A or B contains NaN or infinity.

    Notes
    -----
    TSQR of ``[A B; sqrt(lam) I 0]`` (of ``[A^H; sqrt(lam) I]`` if A is wide): no normal equations
    square the condition. With s = min(m, n), l = max(m, n): ``2 l s (s + r) / ranks +
    O(s^3 log ranks)`` flops (wide: ``4 l s^2 / ranks``), ``(s + r)^2 log2(ranks)`` words, memory
    ``l (s + r) / ranks + s^2 log ranks`` (wide: twice that). For s above 512 and above l / ranks:
    QR by panels, ``5 l s^2 / ranks`` flops; the share of 5 matrices. Source: Golub, Van Loan,
    "Matrix Computations", 4th ed., 6.1.

    Error: 1 eps, of the gradient, relative to |A| (|A| |X| + |B|). Peak memory: 2.2 times arguments
    and results.
    """
    require_range("ridge", "lam", lam, 0, above=True, note=" (for 0 use lstsq)")
    return _least_squares(ctx, "ridge", A, B, lam=lam)[0]


def _stacked(left: Array, right: Array | None, more: int = 0) -> Array:
    """``[left right]`` in Fortran order, with `more` rows of zeros."""
    m, n = left.shape
    width = n + (0 if right is None else right.shape[1])
    whole = np.zeros((m + more, width), left.dtype, order="F")
    whole[:m, :n] = left
    if right is not None:
        whole[:m, n:] = right
    return whole
