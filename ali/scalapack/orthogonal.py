"""Orthogonal factorizations and least squares."""

from __future__ import annotations

import numpy as np

from ali.blocks import keep_triangle, phases, require, require_same_rows, shape_text
from ali.interface import Context, routine
from ali.scalapack.cyclic import Call, diagonal, scale_cols, scale_rows, set_real_diagonal
from mpi_workers.matrix.dist_matrix import DistMatrix


@routine("Q", "R")
def qr(ctx: Context, A: DistMatrix) -> tuple[DistMatrix, DistMatrix]:
    """Thin QR factorization A = Q R.

    Parameters
    ----------
    A : matrix, shape (m, n)
        Best in MC_MR. Integers are promoted to float64.

    Returns
    -------
    Q : matrix, shape (m, min(m, n)), MC_MR
        Orthonormal columns, for any rank of A.
    R : matrix, shape (min(m, n), n), MC_MR
        Upper triangular with a real diagonal >= 0, as `linalg.qr` gives it.

    Raises
    ------
    LinAlgError
        If A contains NaN or infinity.

    Notes
    -----
    ``4 (m n s - (m + n) s^2 / 2 + s^3 / 3) / ranks`` flops with s = min(m, n), some
    ``m n log(ranks) / sqrt(ranks)`` words and ``n log(ranks)`` messages per rank: for a very tall
    A `linalg.qr` sends far fewer. Memory for a copy of A and the results, and a further copy
    where it is in blocks (docs/scalapack.md). Cannot be interrupted while it computes. Source:
    ScaLAPACK Users' Guide, ``p?geqrf``, ``p?orgqr`` (``p?ungqr``).

    Error: 30 eps, |A - Q R| / |A| and |Q^H Q - I|. Peak memory: 1.7 times arguments and results.
    """
    (m, n), k = A.shape, min(A.shape)
    call = Call(ctx, "qr", "geqrf", A)
    a = call.copy(A)
    tau = np.zeros(a.cols + a.block, call.dtype)
    call.run_with_work("p?geqrf", m, n, *a.submatrix, tau)
    turn, _ = phases(diagonal(ctx, a))
    R = call.leading(a, k, n)
    call.run_with_work("p?orgqr", m, k, k, *a.submatrix, tau)
    Q = call.result(a) if n == k else call.leading(a, m, k)
    keep_triangle(R, lower=False)
    scale_rows(R, turn.conj())
    set_real_diagonal(R)
    scale_cols(Q, turn)
    return Q, R


def triangle(ctx: Context, A: DistMatrix) -> DistMatrix:
    """R of A = Q R, up to signs, without Q; A has at least as many rows as columns. Collective."""
    n = A.shape[1]
    call = Call(ctx, "svdvals", "geqrf", A)
    a = call.copy(A)
    call.run_with_work("p?geqrf", *A.shape, *a.submatrix, np.zeros(a.cols + a.block, call.dtype))
    R = call.leading(a, n, n)
    keep_triangle(R, lower=False)
    return R


@routine("L", "Q")
def lq(ctx: Context, A: DistMatrix) -> tuple[DistMatrix, DistMatrix]:
    """Thin LQ factorization A = L Q.

    Parameters
    ----------
    A : matrix, shape (m, n)
        Best in MC_MR. Integers are promoted to float64.

    Returns
    -------
    L : matrix, shape (m, min(m, n)), MC_MR
        Lower triangular with a real diagonal >= 0.
    Q : matrix, shape (min(m, n), n), MC_MR
        Orthonormal rows, for any rank of A.

    Raises
    ------
    LinAlgError
        If A contains NaN or infinity.

    Notes
    -----
    Costs as much as `qr` of A^H. Cannot be interrupted while it computes. Source: ScaLAPACK
    Users' Guide, ``p?gelqf``, ``p?orglq`` (``p?unglq``).

    Error: 30 eps, |A - L Q| / |A| and |Q Q^H - I|. Peak memory: 2.3 times arguments and results.
    """
    (m, n), k = A.shape, min(A.shape)
    call = Call(ctx, "lq", "geqrf", A)
    a = call.copy(A)
    tau = np.zeros(a.rows + a.block, call.dtype)
    call.run_with_work("p?gelqf", m, n, *a.submatrix, tau)
    turn, _ = phases(diagonal(ctx, a))
    L = call.leading(a, m, k)
    call.run_with_work("p?orglq", k, n, k, *a.submatrix, tau)
    Q = call.result(a) if m == k else call.leading(a, k, n)
    keep_triangle(L, lower=True)
    scale_cols(L, turn.conj())
    set_real_diagonal(L)
    scale_rows(Q, turn)
    return L, Q


@routine("X", like={"X": "B"})
def lstsq(ctx: Context, A: DistMatrix, B: DistMatrix) -> DistMatrix:
    """Least squares: the X that makes the norm of A X - B smallest.

    Parameters
    ----------
    A : matrix, shape (m, n)
        Of full rank. Any layouts (best MC_MR) and dtypes.
    B : matrix, shape (m, k)
        Each column is a problem of its own. Integers are promoted to float64.

    Returns
    -------
    X : matrix, shape (n, k), MC_MR
        For a wide A, where many X solve A X = B, those with the smallest norm.

    Raises
    ------
    ShapeError
        If A and B differ in their number of rows.
    LinAlgError
        If A has not full rank: the smallest diagonal element of its triangular factor is
        within ``max(m, n)`` roundings of the largest. For such an A take `svd`. Also if a matrix
        contains NaN or infinity.

    Notes
    -----
    QR (LQ for a wide A): ``(2 l s^2 - 2/3 s^3 + 4 l s k) / ranks`` flops with l = max(m, n),
    s = min(m, n). Memory for copies of A and of B with l rows, twice where they are in blocks
    (docs/scalapack.md). Cannot be interrupted while it computes. Source: ScaLAPACK Users' Guide,
    ``p?gels``.

    Error: 2 eps, |A^H (A X - B)| / (|A| (|A| |X| + |B|)). Peak memory: 3.1 times arguments and
    results.
    """
    (m, n), k = A.shape, B.shape[1]
    require_same_rows("lstsq", A, B)
    call = Call(ctx, "lstsq", "geqrf", A, B)
    a, b = call.copy(A), call.copy(B, max(m, n))
    call.run_with_work("p?gels", "N", m, n, k, *a.submatrix, *b.submatrix)
    lengths = np.abs(diagonal(ctx, a))
    limit = max(m, n) * float(np.finfo(call.dtype).eps) * float(lengths.max())
    require(
        float(lengths.min()) > limit,
        "LinAlgError",
        f"lstsq: A ({shape_text(A)}) does not have full rank, to within rounding: use svd",
    )
    return call.result(b) if m <= n else call.leading(b, n, k)
