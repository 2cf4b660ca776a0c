"""Singular values, eigenvalues, and functions of them."""

from __future__ import annotations

from ali.blocks import require_square
from ali.elemental.views import LOWER, MAX_NORM, Elemental, set_diagonal
from ali.interface import Context, routine
from mpi_workers.matrix.dist_matrix import DistMatrix


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
    with Elemental(ctx) as el:
        (A,) = el.floats(A)
        el.finite("svd", A)
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
    with Elemental(ctx) as el:
        (A,) = el.floats(A)
        el.finite("singular_values", A)
        S = el.empty((min(A.shape), 1), A.local.real.dtype, "STAR_STAR")
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
    with Elemental(ctx) as el:
        (A,) = el.floats(A)
        el.finite("eigh", A)
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
    with Elemental(ctx) as el:
        (A,) = el.floats(A)
        el.finite("polar", A)
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
    with Elemental(ctx) as el:
        (A,) = el.floats(A)
        el.finite("pinv", A)
        m, n = A.shape
        if el.number("NormDist", A.dtype, A, MAX_NORM) == 0:
            return el.zeros((n, m), A.dtype)
        work = el.own(A.dtype)
        el("CopyDist", A.dtype, A, work)
        el("PseudoinverseDist", A.dtype, work)
        return el.taken(work, A.dtype)
