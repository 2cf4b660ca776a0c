"""Factorizations."""

from __future__ import annotations

import numpy as np

from ali.blocks import require, require_square, shape_text
from ali.elemental.views import LEFT, LOWER, MAX_NORM, NORMAL, Elemental, set_diagonal
from ali.interface import Context, routine
from mpi_workers.matrix.dist_matrix import DistMatrix


@routine("L")
def cholesky(ctx: Context, A: DistMatrix) -> DistMatrix:
    """Cholesky factorization A = L L^H.

    Parameters
    ----------
    A : matrix, shape (n, n)
        Hermitian positive definite; only its lower triangle is looked at. Integers are
        promoted to float64.

    Returns
    -------
    L : matrix, shape (n, n), MC_MR
        Lower triangular with a positive diagonal; factored in place in a copy of A.

    Raises
    ------
    ShapeError
        If A is not square.
    RoutineError
        If A is not positive definite, or contains NaN or infinity.

    Notes
    -----
    Blocked, right-looking: ``n^3 / (3 ranks)`` flops, ``O(n^2 (1/height + 1/width))`` words,
    a copy of A. Source: Poulson et al., TOMS 39(2), 2013.

    Error: 2 eps, |A - L L^H| / |A|. Peak memory: 1.8 times arguments and results.
    """
    require_square("cholesky", A)
    with Elemental(ctx) as el:
        (A,) = el.floats(A)
        el.finite("cholesky", A)
        L = el.copy(A)
        el("CholeskyDist", L.dtype, LOWER, L)
        el("MakeTrapezoidalDist", L.dtype, LOWER, L, 0)
    return L


@routine("L", "U", "P", vectors=("P",))
def lu(ctx: Context, A: DistMatrix) -> tuple[DistMatrix, DistMatrix, DistMatrix]:
    """LU factorization with partial pivoting: ``A[P] = L U``.

    Parameters
    ----------
    A : matrix, shape (m, n)
        Integers are promoted to float64.

    Returns
    -------
    L : matrix, shape (m, min(m, n)), MC_MR
        Unit lower trapezoidal.
    U : matrix, shape (min(m, n), n), MC_MR
        Upper trapezoidal. Both are cut, on each rank, out of the copy of A that Elemental
        factors in place.
    P : vector, shape (m,), int64, STAR_STAR
        The row of A that comes to each place.

    Raises
    ------
    RoutineError
        If a pivot is exactly zero, or A contains NaN or infinity.

    Notes
    -----
    ``m n min(m, n) / ranks`` flops to first order (``2/3 n^3 / ranks`` if square),
    ``O(m n (1/height + 1/width))`` words, one search per pivot; a copy of A and the factors.
    Source: Poulson et al., TOMS 39(2), 2013.

    Error: 8 eps, |A[P] - L U| / |A|. Peak memory: 1.9 times arguments and results.
    """
    m, k = A.shape[0], min(A.shape)
    with Elemental(ctx) as el:
        (A,) = el.floats(A)
        el.finite("lu", A)
        packed, swaps = el.copy(A), el.permutation()
        el("LUPartialPivDist", packed.dtype, packed, swaps)
        P = el.indices(swaps, m)
        L, U = ctx.empty((m, k), packed.dtype, "MC_MR"), _upper(ctx, packed, k)
    if L.local.size:
        below = np.array(L.rows)[:, None] > np.array(L.cols)[None, :]
        L.local[...] = np.where(below, packed.local[:, : len(L.cols)], 0)
    set_diagonal(L, 1)
    return L, U, P


@routine("Q", "R")
def qr(ctx: Context, A: DistMatrix) -> tuple[DistMatrix, DistMatrix]:
    """Thin QR factorization A = Q R.

    Parameters
    ----------
    A : matrix, shape (m, n)
        Integers are promoted to float64.

    Returns
    -------
    Q : matrix, shape (m, min(m, n)), MC_MR
        Orthonormal columns; made in place in a copy of A (if A is wide, one copy more).
    R : matrix, shape (min(m, n), n), MC_MR
        Upper trapezoidal, with a real diagonal >= 0.

    Raises
    ------
    RoutineError
        If A contains NaN or infinity.

    Notes
    -----
    Blocked Householder: ``4 m n min(m, n) / ranks`` flops to first order with Q,
    ``O(m n (1/height + 1/width))`` words and one reduction per column, which is where it loses
    to `linalg.qr` (TSQR) if A is tall and narrow; it is made for A near square. Sources:
    Schreiber and Van Loan 1989; Poulson et al., TOMS 39(2), 2013.

    Error: 25 eps, |A - Q R| / |A| and |Q^H Q - I|. Peak memory: 4.2 times arguments and results.
    """
    (m, n), k = A.shape, min(A.shape)
    with Elemental(ctx) as el:
        (A,) = el.floats(A)
        el.finite("qr", A)
        R = el.empty((k, n), A.dtype)
        if m >= n:
            Q = el.copy(A)
            el("QRExplicitDist", A.dtype, Q, R)
        else:
            work = el.own(A.dtype)
            el("CopyDist", A.dtype, A, work)
            el("QRExplicitDist", A.dtype, work, R)
            Q = el.taken(work, A.dtype)
    return Q, R


@routine("Q", "R", "P", vectors=("P",))
def qr_pivoted(ctx: Context, A: DistMatrix) -> tuple[DistMatrix, DistMatrix, DistMatrix]:
    """QR factorization with column pivoting: ``A[:, P] = Q R``.

    Parameters
    ----------
    A : matrix, shape (m, n)
        Integers are promoted to float64.

    Returns
    -------
    Q : matrix, shape (m, min(m, n)), MC_MR
        Orthonormal columns.
    R : matrix, shape (min(m, n), n), MC_MR
        Upper trapezoidal, its diagonal real and >= 0, falling (within rounding): where it
        becomes small, the numerical rank of A ends.
    P : vector, shape (n,), int64, STAR_STAR
        The column of A that comes to each place.

    Raises
    ------
    RoutineError
        If A contains NaN or infinity.

    Notes
    -----
    Businger and Golub's pivoting, in matrix-vector products: ``4 m n min(m, n) / ranks`` flops
    at the speed of memory, several reductions per column; a copy of A, and R is cut out of
    it on each rank. Source: Businger and Golub, Numer. Math. 7, 1965.

    Error: 25 eps, |A[:, P] - Q R| / |A| and |Q^H Q - I|. Peak memory: 2.2 times arguments and
    results.
    """
    (m, n), k = A.shape, min(A.shape)
    with Elemental(ctx) as el:
        (A,) = el.floats(A)
        el.finite("qr_pivoted", A)
        packed, swaps = el.copy(A), el.permutation()
        real = packed.local.real.dtype
        scalars, signs = el.own(A.dtype, "MD_STAR"), el.own(real, "MD_STAR")
        el("QRColPivDist", A.dtype, packed, scalars, signs, swaps)
        Q, R = el.zeros((m, k), A.dtype), _upper(ctx, packed, k)
        set_diagonal(Q, 1)
        el("ApplyQAfterQRDist", A.dtype, LEFT, NORMAL, packed, scalars, signs, Q)
        P = el.indices(swaps, n)
    return Q, R, P


@routine("P", "Z", vectors=("P",))
def interpolative(ctx: Context, A: DistMatrix, rank: int) -> tuple[DistMatrix, DistMatrix]:
    """Interpolative decomposition: the columns of A from a few of them.

    ``A[:, P]`` is nearly ``A[:, P[:r]] [I Z]``.

    Parameters
    ----------
    A : matrix, shape (m, n)
        Integers are promoted to float64.
    rank : int
        How many columns to keep, 1 to min(m, n - 1).

    Returns
    -------
    P : vector, shape (n,), int64, STAR_STAR
        Indices of A's columns, the r that are kept first.
    Z : matrix, shape (r, n - r), MC_MR
        r is `rank`, or the numerical rank of A where that is smaller. One copy.

    Raises
    ------
    BadArgumentError
        For another rank.
    RoutineError
        If A is zero, or contains NaN or infinity.

    Notes
    -----
    `rank` steps of a QR with column pivoting: ``4 m n rank / ranks`` flops at the speed of
    memory, a copy of A. Sources: Businger and Golub 1965; Cheng, Gimbutas, Martinsson,
    Rokhlin, "On the compression of low rank matrices", SIAM J. Sci. Comput. 26(4), 2005.

    Error: 1.5 times the first singular value that is left out. Peak memory: 4.3 times arguments
    and results.
    """
    m, n = A.shape
    most = min(m, n - 1)
    require(
        1 <= rank <= most,
        "BadArgumentError",
        f"interpolative: rank={rank}; it must be 1 to {most} for a {shape_text(A)} matrix",
    )
    with Elemental(ctx) as el:
        (A,) = el.floats(A)
        el.finite("interpolative", A)
        require(
            el.number("NormDist", A.dtype, A, MAX_NORM) > 0,
            "RoutineError",
            "interpolative: A is zero",
        )
        swaps, found = el.permutation(), el.own(A.dtype)
        control = el.control("QR", A.dtype, boundRank=True, maxRank=rank)
        el("IDDist", A.dtype, A, swaps, found, control, False)
        return el.indices(swaps, n), el.taken(found, A.dtype)


def _upper(ctx: Context, packed: DistMatrix, k: int) -> DistMatrix:
    """The upper trapezoid of the first k rows, which lie on the same ranks."""
    U = ctx.empty((k, packed.shape[1]), packed.dtype, "MC_MR")
    if U.local.size:
        below = np.array(U.rows)[:, None] > np.array(U.cols)[None, :]
        U.local[...] = np.where(below, 0, packed.local[: len(U.rows)])
    return U
