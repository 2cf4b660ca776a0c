"""QR, and least squares through it."""

from __future__ import annotations

import numpy as np
import scipy.linalg

from ali.blocks import Array, block, floating, require, shape_text
from ali.interface import Context, routine
from ali.linalg.collectives import sum_over_ranks
from ali.linalg.gemm import inner
from ali.linalg.tsqr import TallQR
from mpi_workers.matrix.dist_matrix import DistMatrix


@routine("Q", "R")
def qr(ctx: Context, A: DistMatrix) -> tuple[DistMatrix, DistMatrix]:
    """Thin QR factorization A = Q R.

    Parameters
    ----------
    A : matrix, shape (m, n)
        Best in VC_STAR. Integers are promoted to float64.

    Returns
    -------
    Q : matrix, shape (m, min(m, n)), VC_STAR
        Orthonormal columns, whatever the rank of A.
    R : matrix, shape (min(m, n), n), VC_STAR
        Upper triangular with a real diagonal >= 0: for an A of full rank, Q and R do not
        depend on the number of ranks (but for rounding).

    Notes
    -----
    TSQR, made for m/ranks > n: ``4 m n^2 / ranks + O(n^3 log ranks)`` flops, ``2 n^2`` words
    in ``2 log2(ranks)`` messages on the longest way, ``m n / ranks + n^2 log ranks`` memory.
    Ranks with no more than n rows hand them on as they are: the closer A is to square, the
    more of it is gathered on rank 0 and factored there, for m = n all of it (``m n``
    memory, ``4 m n^2`` flops on rank 0). A wide A is cut into ``[A1 A2]`` with a square A1
    and ``R = [R1  Q^H A2]``. Source: Demmel, Grigori, Hoemmen, Langou 2012.
    """
    (m, n), k = A.shape, min(A.shape)
    local = floating(block(ctx.to_layout(A, "VC_STAR")))
    factors = TallQR(ctx.comm, local[:, :k])
    signs: Array | None = None
    corner = ctx.empty((k, k), local.dtype, "CIRC_CIRC")  # whole on rank 0
    if factors.r is not None:
        diagonal = np.diagonal(factors.r)
        length = np.abs(diagonal)
        phases = np.where(length > 0, diagonal, 1) / np.where(length > 0, length, 1)
        signs = np.diag(phases).astype(local.dtype)
        corner.local[...] = phases.conj()[:, None] * factors.r
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


@routine("X")
def lstsq(ctx: Context, A: DistMatrix, B: DistMatrix, rcond: float = -1.0) -> DistMatrix:
    """Least squares: the X of the smallest norm among those with the smallest |A X - B|.

    Parameters
    ----------
    A : matrix, shape (m, n)
        Of any rank. Best in VC_STAR where tall, in STAR_VC where wide.
    B : matrix, shape (m, r)
        Right-hand sides.
    rcond : float
        Singular values up to ``rcond`` times the largest count as zero; negative (the
        default): max(m, n) times the machine epsilon, as NumPy's.

    Returns
    -------
    X : matrix, shape (n, r), VC_STAR
        `matrix_rank` and `svdvals` tell the rest of what NumPy's returns.

    Raises
    ------
    ShapeError
        If A and B differ in their numbers of rows.
    RoutineError
        If A or B holds NaN or inf.

    Notes
    -----
    With s = min(m, n), l = max(m, n): TSQR of A (or of A^H) down to an s x s triangle, whose
    SVD is taken on rank 0: ``4 l s^2 / ranks + O(s^3 log ranks) + 20 s^3`` flops, and two
    products with r columns. Words: ``s^2 log2(ranks)`` and ``s r log2(ranks)``. Memory: ``l s /
    ranks``, and ``4 s^2 + s r`` on rank 0: made for s up to some thousands. Sources: LAPACK's
    gelsd in what it gives; Demmel et al. 2012 (TSQR).
    """
    (m, n), r = A.shape, B.shape[1]
    require(
        B.shape[0] == m,
        "ShapeError",
        f"lstsq: A is {shape_text(A)} and B is {shape_text(B)}; they must have as many rows",
    )
    dtype = np.result_type(A.dtype, B.dtype, np.float32)
    wide, small = m < n, min(m, n)
    local = block(ctx.to_layout(A, "STAR_VC" if wide else "VC_STAR")).astype(dtype, copy=False)
    tall = local.conj().T if wide else local
    right = block(ctx.to_layout(B, "STAR_STAR" if wide else "VC_STAR")).astype(dtype, copy=False)
    limit = rcond if rcond >= 0 else max(m, n) * float(np.finfo(dtype).eps)
    _refuse_nonfinite(ctx, "lstsq", tall, right)
    factors = TallQR(ctx.comm, tall)
    # A = Q R: X = R^+ (Q^H B). A = (Q R)^H: X = Q (R^H)^+ B.
    side = right if wide else _q_adjoint_times(ctx, factors, right, small, dtype)
    X = np.empty((small, r), dtype)
    if factors.r is not None:
        u, s, vh = scipy.linalg.svd(factors.r.conj().T if wide else factors.r, check_finite=False)
        rank = int((s > limit * s[0]).sum())
        X[...] = vh[:rank].conj().T @ ((u[:, :rank].conj().T @ side) / s[:rank, None])
    if wide:
        return ctx.new_from_rows(factors.times(X if ctx.rank == 0 else None, r, dtype), n)
    ctx.comm.Bcast(X)
    return ctx.new_replicated(X, "VC_STAR")


@routine("X")
def ridge(ctx: Context, A: DistMatrix, B: DistMatrix, lam: float) -> DistMatrix:
    """Ridge regression: the X that makes |A X - B|^2 + lam |X|^2 least.

    Parameters
    ----------
    A : matrix, shape (m, n)
        Best in VC_STAR where tall, in STAR_VC where wide.
    B : matrix, shape (m, r)
    lam : float
        Above 0; `lstsq` is what 0 would be. (Some write ``m lam`` here.)

    Returns
    -------
    X : matrix, shape (n, r), VC_STAR

    Raises
    ------
    ShapeError
        If A and B differ in their numbers of rows.
    BadArgumentError
        If lam is not above 0.
    RoutineError
        If A or B holds NaN or inf.

    Notes
    -----
    TSQR of ``[A; sqrt(lam) I]`` (of ``[A^H; sqrt(lam) I]`` where A is wide), so that no normal
    equations square the condition. With s = min(m, n), l = max(m, n): ``4 l s^2 / ranks +
    O(s^3 log ranks)`` flops, ``s^2 log2(ranks)`` words, memory ``l s / ranks + s^2 log ranks``:
    made for s up to some thousands; beyond, `conjugate_gradient` or `random_features_ridge`.
    Source: Golub, Van Loan, "Matrix Computations", 4th ed., 6.1.
    """
    (m, n), r = A.shape, B.shape[1]
    require(
        B.shape[0] == m,
        "ShapeError",
        f"ridge: A is {shape_text(A)} and B is {shape_text(B)}; they must have as many rows",
    )
    require(lam > 0, "BadArgumentError", f"ridge: lam={lam} is not above 0 (lstsq needs none)")
    dtype = np.result_type(A.dtype, B.dtype, np.float32)
    wide, small = m < n, min(m, n)
    local = block(ctx.to_layout(A, "STAR_VC" if wide else "VC_STAR")).astype(dtype, copy=False)
    tall = local.conj().T if wide else local
    right = block(ctx.to_layout(B, "STAR_STAR" if wide else "VC_STAR")).astype(dtype, copy=False)
    _refuse_nonfinite(ctx, "ridge", tall, right)
    count = tall.shape[0]
    if ctx.rank == 0:
        tall = np.concatenate([tall, lam**0.5 * np.eye(small, dtype=dtype)])
    factors = TallQR(ctx.comm, tall)
    X = np.empty((small, r), dtype)
    if wide:  # X = A^H (A A^H + lam)^-1 B, and Q R = [A^H; sqrt(lam)]: X is the top of Q R^-H B
        if factors.r is not None:
            X[...] = scipy.linalg.solve_triangular(factors.r, right, trans="C", check_finite=False)
        found = factors.times(X if ctx.rank == 0 else None, r, dtype)[:count]
        return ctx.new_from_rows(found, n)
    padded = np.zeros((tall.shape[0], r), dtype)
    padded[:count] = right
    side = _q_adjoint_times(ctx, factors, padded, small, dtype)
    if factors.r is not None:
        X[...] = scipy.linalg.solve_triangular(factors.r, side, check_finite=False)
    ctx.comm.Bcast(X)
    return ctx.new_replicated(X, "VC_STAR")


def _q_adjoint_times(
    ctx: Context, factors: TallQR, right: Array, small: int, dtype: np.dtype[np.generic]
) -> Array:
    """``Q^H B`` on every rank, from this rank's rows of B."""
    identity = np.eye(small, dtype=dtype) if factors.r is not None else None
    own = factors.times(identity, small, dtype)
    return sum_over_ranks(ctx.comm, own.conj().T @ right)


def _refuse_nonfinite(ctx: Context, name: str, *arrays: Array) -> None:
    bad = np.array([not np.isfinite(array).all() for array in arrays], np.int64)
    found = sum_over_ranks(ctx.comm, bad)
    for what, count in zip("AB", found.tolist(), strict=False):
        require(count == 0, "RoutineError", f"{name}: {what} holds NaN or inf")
