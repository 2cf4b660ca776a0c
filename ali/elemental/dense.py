"""Products, norms, linear systems, factorizations, singular values and eigenvalues."""

from __future__ import annotations

import math

from ali.blocks import (
    block,
    keep_triangle,
    product_sizes,
    require,
    require_choice,
    require_finite,
    require_range,
    require_same_rows,
    require_square,
    set_diagonal,
    shape_text,
)
from ali.elemental.library import positive
from ali.elemental.views import (
    ADJOINT,
    LEFT,
    LOWER,
    MAX_NORM,
    NORMAL,
    TRANSPOSE,
    Elemental,
    started,
)
from ali.interface import Context, routine
from mpi_workers.matrix.dist_matrix import DistMatrix

ORIENTATIONS = {"N": NORMAL, "T": TRANSPOSE, "C": ADJOINT}
NORMS = {"1": 0, "inf": 1, "max": MAX_NORM, "nuc": 4, "fro": 5, "2": 6}  # ElNormType
BY_SVD = ("2", "nuc")


@routine("C")
def matmul(
    ctx: Context,
    A: DistMatrix,
    B: DistMatrix,
    transpose_a: str = "N",
    transpose_b: str = "N",
) -> DistMatrix:
    """Matrix product C = op(A) op(B).

    Parameters
    ----------
    A, B : matrix
        With op(A) of shape (m, k) and op(B) of shape (k, n). Best in MC_MR. Dtypes are
        promoted to a common floating one (integers and bool to float64).
    transpose_a, transpose_b : str
        op: "N" takes the matrix as it is, "T" its transpose, "C" its conjugate transpose.

    Returns
    -------
    C : matrix, shape (m, n), MC_MR
        Written by Elemental where it stays; no copy.

    Raises
    ------
    ShapeError
        If op(A)'s columns and op(B)'s rows differ in number.
    BadArgumentError
        For another letter.

    Notes
    -----
    SUMMA with the largest of the three matrices stationary: ``2 m n k / ranks`` flops; of the
    other two, ``m k / height + k n / width`` words (and likewise) per rank; panels of 128
    vectors of memory, and a copy of an operand that is not in MC_MR. Sources: van de Geijn and
    Watts 1997 (SUMMA); Schatz, van de Geijn, Poulson 2016; Poulson et al., TOMS 39(2), 2013.

    Error: 4 eps, relative to |C|. Peak memory: 2.5 times arguments and results.
    """
    m, _, n = product_sizes(A, B, transpose_a, transpose_b)
    with Elemental(ctx) as el:
        A, B = el.floats(A, B)
        C = el.zeros((m, n), A.dtype)
        one, zero = el.number_of(1, C.dtype), el.number_of(0, C.dtype)
        ops = ORIENTATIONS[transpose_a], ORIENTATIONS[transpose_b]
        el("GemmDist", C.dtype, *ops, one, A, B, zero, C)
    return C


@routine("X", like={"X": "B"})
def solve(ctx: Context, A: DistMatrix, B: DistMatrix) -> DistMatrix:
    """Solution X of A X = B, by LU with partial pivoting.

    Parameters
    ----------
    A : matrix, shape (n, n)
    B : matrix, shape (n, k)
        Dtypes are promoted to a common floating one.

    Returns
    -------
    X : matrix, shape (n, k), MC_MR
        Solved in place in a copy of B.

    Raises
    ------
    ShapeError
        If A is not square or B has not n rows.
    RoutineError
        If A is exactly singular, or A or B contains NaN or infinity.

    Notes
    -----
    ``(2/3 n^3 + 2 n^2 k) / ranks`` flops, ``O(n^2 (1/height + 1/width))`` words and ``O(n)``
    pivot searches; a copy of A and one of B. Source: Poulson et al., TOMS 39(2), 2013.

    Error: 2 eps, |A X - B| / (|A| |X| + |B|). Peak memory: 4.9 times arguments and results.
    """
    require_square("solve", A)
    require_same_rows("solve", A, B)
    with started(ctx, "solve", A=A, B=B) as (el, A, B):
        X: DistMatrix = el.copy(B)
        el("LinearSolveDist", X.dtype, A, X)
    return X


@routine("X", like={"X": "B"})
def lstsq(ctx: Context, A: DistMatrix, B: DistMatrix) -> DistMatrix:
    """Least squares: the X that makes ||A X - B|| least; if A is wide, the shortest such X.

    Parameters
    ----------
    A : matrix, shape (m, n)
        Of full rank: for others use `pinv`.
    B : matrix, shape (m, k)
        Dtypes are promoted to a common floating one.

    Returns
    -------
    X : matrix, shape (n, k), MC_MR
        One copy if A is tall: Elemental works in columns of m.

    Raises
    ------
    ShapeError
        If B has not m rows.
    RoutineError
        If R (or L) has an exact zero on its diagonal, or A or B contains NaN or infinity.

    Notes
    -----
    Householder QR (LQ if wide): ``2 m n min(m, n) / ranks`` flops to first order,
    ``O((m n + n^2) (1/height + 1/width))`` words, a copy of A. Source: Golub and Van Loan,
    "Matrix Computations", section 5.3; Poulson et al., TOMS 39(2), 2013.

    Error: 2 eps, |A^H (A X - B)| / (|A| (|A| |X| + |B|)). Peak memory: 4.3 times arguments and
    results.
    """
    require_same_rows("lstsq", A, B)
    with started(ctx, "lstsq", A=A, B=B) as (el, A, B):
        X: DistMatrix = el.zeros((A.shape[1], B.shape[1]), A.dtype)
        el("LeastSquaresDist", X.dtype, NORMAL, A, B, X)
    return X


@routine("X", like={"X": "B"})
def ridge(ctx: Context, A: DistMatrix, B: DistMatrix, lam: float) -> DistMatrix:
    """Ridge regression: the X that makes ||A X - B||^2 + lam ||X||^2 least.

    Parameters
    ----------
    A : matrix, shape (m, n)
        Of any rank, tall or wide.
    B : matrix, shape (m, k)
        Dtypes are promoted to a common floating one.
    lam : float
        Weight > 0, in the units of A's squared singular values.

    Returns
    -------
    X : matrix, shape (n, k), MC_MR
        One copy: Elemental works in columns of m + n.

    Raises
    ------
    ShapeError
        If B has not m rows.
    BadArgumentError
        If lam is not positive and finite.
    RoutineError
        If A or B contains NaN or infinity.

    Notes
    -----
    Least squares by QR with ``sqrt(lam) I`` below A and zeros below B, which does not square
    A's condition number (Elemental's own ridge does, and takes no wide A): about
    ``2 (m + n) n^2 / ranks`` flops and two copies of ``(m + n) (n + k) / ranks`` words. Source:
    Bjorck, "Numerical Methods for Least Squares Problems", 1996.

    Error: 2 eps, the gradient, relative to |A| (|A| |X| + |B|). Peak memory: 4.3 times arguments
    and results.
    """
    require_same_rows("ridge", A, B)
    positive("ridge", "lam", lam)
    (m, n), k = A.shape, B.shape[1]
    with started(ctx, "ridge", A=A, B=B) as (el, A, B):
        stacked, below = el.zeros((m + n, n), A.dtype), el.zeros((m + n, k), A.dtype)
        for source, target in ((A, stacked), (B, below)):
            top = ctx.to_layout(source, "MC_MR").local
            if top.size:  # the first m rows of the longer matrix lie on the same ranks
                target.local[: len(top)] = top
        set_diagonal(stacked, math.sqrt(lam), -m)
        X: DistMatrix = el.zeros((n, k), A.dtype)
        el("LeastSquaresDist", X.dtype, NORMAL, stacked, below, X)
    return X


@routine("norm")
def norm(ctx: Context, A: DistMatrix, ord: str = "fro") -> float:
    """A norm of A.

    Parameters
    ----------
    A : matrix, shape (m, n)
        Integers are promoted to float64.
    ord : str
        "fro" (Frobenius), "1" (largest column sum), "inf" (largest row sum), "max" (largest
        element), "2" (largest singular value), "nuc" (sum of the singular values).

    Raises
    ------
    BadArgumentError
        For another ord.
    RoutineError
        For "2" and "nuc", if A contains NaN or infinity.

    Notes
    -----
    One pass and a reduction of at most m or n numbers, in the precision of A; for "2" and
    "nuc" the cost of `singular_values`. Source: Poulson et al., TOMS 39(2), 2013.

    Error: 40 eps, relative to the norm. Peak memory: 1.1 times arguments and results.
    """
    require_choice("norm", "ord", ord, tuple(NORMS))
    with Elemental(ctx) as el:
        (A,) = el.floats(A)
        if ord in BY_SVD:
            require_finite(ctx, "norm", A=A.local)
        return el.number("NormDist", A.dtype, A, NORMS[ord])


@routine("cond")
def cond(ctx: Context, A: DistMatrix, ord: str = "2") -> float:
    """Condition number of A in a norm.

    Parameters
    ----------
    A : matrix, shape (m, n)
        Square, but for ord "2". Integers are promoted to float64.
    ord : str
        "2" (the ratio of the extreme singular values), "1", "inf", "fro" or "max".

    Returns
    -------
    float
        inf where Elemental finds A exactly singular. In the precision of A: beyond about
        1e7 (single) or 1e16 (double) only the magnitude means anything.

    Raises
    ------
    BadArgumentError
        For another ord.
    ShapeError
        If A is not square and the ord is not "2".
    RoutineError
        If A contains NaN or infinity.

    Notes
    -----
    "2" costs `singular_values`, "fro" too; the others an explicit inverse, ``2 n^3 / ranks``
    flops. A copy of A. Source: Higham, "Accuracy and Stability of Numerical Algorithms", 2002.

    Error: 8 eps, relative, of a well-conditioned A. Peak memory: 5.2 times arguments and results.
    """
    require_choice("cond", "ord", ord, ("2", "1", "inf", "fro", "max"))
    if ord != "2":
        require_square("cond", A)
    with started(ctx, "cond", A=A) as (el, A):
        found = el.number("ConditionDist", A.dtype, A, NORMS[ord])
    return found if found == found else math.inf


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
    with started(ctx, "cholesky", A=A) as (el, A):
        L: DistMatrix = el.copy(A)
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
    with started(ctx, "lu", A=A) as (el, A):
        packed, swaps = el.copy(A), el.permutation()
        el("LUPartialPivDist", packed.dtype, packed, swaps)
        P = el.indices(swaps, m)
        L, U = ctx.empty((m, k), packed.dtype, "MC_MR"), _upper(ctx, packed, k)
    lower = block(L)
    lower[...] = block(packed)[:, : lower.shape[1]]
    keep_triangle(L, lower=True)
    return set_diagonal(L, 1), U, P


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
    with started(ctx, "qr", A=A) as (el, A):
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
    with started(ctx, "qr_pivoted", A=A) as (el, A):
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
    matrix = f" for a {shape_text(A)} matrix"
    require_range("interpolative", "rank", rank, 1, min(m, n - 1), note=matrix)
    with started(ctx, "interpolative", A=A) as (el, A):
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
    upper = block(U)
    upper[...] = block(packed)[: len(upper)]
    keep_triangle(U, lower=False)
    return U


@routine("S", "U", "V", vectors=("S",))
def svd(ctx: Context, A: DistMatrix) -> tuple[DistMatrix, DistMatrix, DistMatrix]:
    """Thin singular value decomposition A = U diag(S) V^H.

    Parameters
    ----------
    A : matrix, shape (m, n)
        Integers are promoted to float64.

    Returns
    -------
    S : vector, shape (min(m, n),), real, STAR_STAR
        Descending.
    U : matrix, shape (m, min(m, n)), MC_MR
    V : matrix, shape (n, min(m, n)), MC_MR
        Orthonormal columns. Elemental writes all three where they stay; no copy.

    Raises
    ------
    RoutineError
        If A contains NaN or infinity, or the iteration does not converge.

    Notes
    -----
    Reduction to a bidiagonal matrix (through a QR where A is much taller than wide), its
    singular vectors by divide and conquer, and back: about
    ``(4 m n^2 + 8 n^3) / ranks`` flops for m >= n, half of those in the reduction at the speed
    of memory, ``O(m n (1/height + 1/width))`` words in O(n) reductions; three matrices of A's
    size. Sources: Chan 1982; Gu and Eisenstat 1995; Poulson et al., TOMS 39(2), 2013.

    Error: 50 eps, |A - U S V^H| / |A|, |U^H U - I| and |V^H V - I|. Peak memory: 2.7 times
    arguments and results.
    """
    (m, n), k = A.shape, min(A.shape)
    with started(ctx, "svd", A=A) as (el, A):
        S = el.empty((k, 1), A.local.real.dtype, "STAR_STAR")
        U, V = el.empty((m, k), A.dtype), el.empty((n, k), A.dtype)
        el("SVDDist", A.dtype, A, U, S, V)
    return S, U, V


@routine("S", vectors=("S",))
def singular_values(ctx: Context, A: DistMatrix) -> DistMatrix:
    """Singular values of A.

    Parameters
    ----------
    A : matrix, shape (m, n)
        Integers are promoted to float64.

    Returns
    -------
    S : vector, shape (min(m, n),), real, STAR_STAR
        Descending.

    Raises
    ------
    RoutineError
        If A contains NaN or infinity, or the iteration does not converge.

    Notes
    -----
    Reduction to a bidiagonal matrix and QR iterations: ``(4 m n^2 - 4/3 n^3) / ranks`` flops
    for m >= n (``2 m n^2 + 2 n^3`` where A is much taller than wide), half of them at the speed
    of memory, and ``O(n^2)`` on every rank; a copy of A. Sources: Demmel and Kahan 1990; Chan
    1982; Poulson et al., TOMS 39(2), 2013.

    Error: 12 eps, relative to the largest singular value. Peak memory: 4.3 times arguments and
    results.
    """
    with started(ctx, "singular_values", A=A) as (el, A):
        S: DistMatrix = el.empty((min(A.shape), 1), A.local.real.dtype, "STAR_STAR")
        el("SingularValuesDist", A.dtype, A, S)
    return S


@routine("S", vectors=("S",))
def svdvals(ctx: Context, A: DistMatrix) -> DistMatrix:
    """Singular values of A: `singular_values` under the name that other libraries have for it.

    Parameters
    ----------
    A : matrix, shape (m, n)

    Returns
    -------
    S : vector, shape (min(m, n),), real, STAR_STAR
        Descending.

    Notes
    -----
    Cost, errors and sources: see `singular_values`.

    Error: 12 eps, relative to the largest singular value. Peak memory: 4.3 times arguments and
    results.
    """
    return singular_values(ctx, A)


@routine("W", "V", vectors=("W",))
def eigh(ctx: Context, A: DistMatrix) -> tuple[DistMatrix, DistMatrix]:
    """Eigenvalues and eigenvectors of a Hermitian matrix: A = V diag(W) V^H.

    Parameters
    ----------
    A : matrix, shape (n, n)
        Hermitian; only its lower triangle is looked at. Integers are promoted to float64.

    Returns
    -------
    W : vector, shape (n,), real, STAR_STAR
        Ascending.
    V : matrix, shape (n, n), MC_MR
        Orthonormal columns, where eigenvalues crowd to some thousand roundings. One copy
        on several ranks, for which Elemental pads it.

    Raises
    ------
    ShapeError
        If A is not square.
    RoutineError
        If A contains NaN or infinity, or the iteration does not converge.

    Notes
    -----
    Reduction to a tridiagonal matrix, its eigenvectors by MRRR in double precision, and back:
    ``(4/3 + 2) n^3 / ranks`` flops and ``O(n^2 / ranks)`` for MRRR, half of the reduction at the
    speed of memory, ``O(n^2 (1/height + 1/width))`` words in O(n) reductions; a copy of A and
    two matrices of V's size. Sources: Petschow, Peise, Bientinesi 2013 (PMRRR); Dhillon and
    Parlett 2004; Poulson et al., TOMS 39(2), 2013.

    Error: 400 eps, |A - V W V^H| / |A| and |V^H V - I|. Peak memory: 4.2 times arguments and
    results.
    """
    require_square("eigh", A)
    n = A.shape[0]
    with started(ctx, "eigh", A=A) as (el, A):
        W = el.zeros((n, 1), A.local.real.dtype, "STAR_STAR")
        V = el.zeros((n, n), A.dtype)
        if el.number("NormDist", A.dtype, A, MAX_NORM) == 0:  # for which Elemental sets no V
            return W, set_diagonal(V, 1)
        el("HermitianEigPairDist", A.dtype, LOWER, el.copy(A), W, V)
    return W, V


@routine("Q", "P")
def polar(ctx: Context, A: DistMatrix) -> tuple[DistMatrix, DistMatrix]:
    """Polar decomposition A = Q P.

    Parameters
    ----------
    A : matrix, shape (m, n)
        Integers are promoted to float64.

    Returns
    -------
    Q : matrix, shape (m, n), MC_MR
        Orthonormal columns (rows if A is wide): the nearest such matrix to A.
    P : matrix, shape (n, n), MC_MR
        Hermitian positive semidefinite. Both written where they stay; no copy.

    Raises
    ------
    RoutineError
        If A contains NaN or infinity, or the iteration does not converge.

    Notes
    -----
    Through the SVD: its cost, two products, and three matrices of A's size besides the copy.
    Source: Higham, "Functions of Matrices", chapter 8, 2008.

    Error: 80 eps, |A - Q P| / |A| and |Q^H Q - I|. Peak memory: 4.6 times arguments and results.
    """
    with started(ctx, "polar", A=A) as (el, A):
        Q, P = el.copy(A), el.zeros((A.shape[1], A.shape[1]), A.dtype)
        el("PolarDecompDist", A.dtype, Q, P)
        mirror = "MakeHermitianDist" if A.dtype.kind == "c" else "MakeSymmetricDist"
        el(mirror, A.dtype, LOWER, P)  # Elemental sets P's lower triangle alone
    return Q, P


@routine("X")
def pinv(ctx: Context, A: DistMatrix) -> DistMatrix:
    """Pseudoinverse of A (Moore and Penrose).

    Parameters
    ----------
    A : matrix, shape (m, n)
        Of any rank. Singular values below ``max(m, n) eps`` times the largest count as
        zero. Integers are promoted to float64.

    Returns
    -------
    X : matrix, shape (n, m), MC_MR
        One copy.

    Raises
    ------
    RoutineError
        If A contains NaN or infinity, or the iteration does not converge.

    Notes
    -----
    Through the SVD: its cost, one product, and three matrices of A's size besides the copy.
    Source: Golub and Van Loan, "Matrix Computations", section 5.5.

    Error: 400 eps, of an X of a well-conditioned A, relative to |X|. Peak memory: 3.6 times
    arguments and results.
    """
    with started(ctx, "pinv", A=A) as (el, A):
        m, n = A.shape
        if el.number("NormDist", A.dtype, A, MAX_NORM) == 0:
            return ctx.zeros((n, m), A.dtype, "MC_MR")
        work = el.own(A.dtype)
        el("CopyDist", A.dtype, A, work)
        el("PseudoinverseDist", A.dtype, work)
        X: DistMatrix = el.taken(work, A.dtype)
    return X
