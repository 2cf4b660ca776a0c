"""Cholesky and LU: factors, solutions, inverses, determinants, condition."""

from __future__ import annotations

import math

import numpy as np

from ali.blocks import (
    Array,
    block,
    float_dtype,
    require,
    require_choice,
    require_same_rows,
    require_square,
)
from ali.interface import Context, routine
from ali.linalg.cyclic_rows import as_rows, copy_to_rows
from ali.linalg.elimination import (
    NOT_FINITE,
    Elimination,
    eliminate,
    parity,
    solved,
    solved_adjoint,
)
from ali.linalg.indexing import diagonal_of
from ali.linalg.native_libraries import METHODS, call
from ali.linalg.norm_estimate import norm_estimate
from ali.linalg.reductions import largest_sum
from ali.linalg.singular import singular_values
from ali.linalg.triangular import cholesky_in_place, triangular_solve
from mpi_workers.matrix.dist_matrix import DistMatrix

ASSUMPTIONS = ("general", "positive")


@routine("L")
def cholesky(ctx: Context, A: DistMatrix) -> DistMatrix:
    """Cholesky factor: the lower triangular L with A = L L^H.

    Parameters
    ----------
    A : matrix, shape (n, n)
        Hermitian positive definite. Only its lower triangle and the real parts of its
        diagonal are read. Best in VC_STAR; integers are promoted to float64.

    Returns
    -------
    L : matrix, shape (n, n), VC_STAR
        With a real diagonal > 0.

    Raises
    ------
    ShapeError
        If A is not square.
    LinAlgError
        If a leading minor is not positive definite (the message states its order), or A holds
        NaN.

    Notes
    -----
    ``n^3 / (3 ranks)`` flops (and ``128^2 n / 3`` on rank 0); a rank receives ``n^2 / 2`` words
    in two messages for each panel of 128 columns. Memory: L, and a panel of ``128 n`` words.
    Source: LAPACK's potrf; see ali/linalg/triangular.py.

    Error: 1 eps, |A - L L^H| / |A|. Peak memory: 1.5 times arguments and results.
    """
    require_square("cholesky", A)
    return _cholesky(ctx, "cholesky", A)


@routine("X", like={"X": "B"})
def solve(
    ctx: Context, A: DistMatrix, B: DistMatrix, assume: str = "general", method: str = "auto"
) -> DistMatrix:
    """Solve A X = B.

    Parameters
    ----------
    A : matrix, shape (n, n)
    B : matrix, shape (n, r) or (n,)
        Right-hand sides. Best in VC_STAR, as A.
    assume : str
        "general": LU with partial pivoting. "positive": A is Hermitian positive definite, and
        only its lower triangle is read; half the work, by Cholesky.
    method : str
        "auto": the algorithm below. "scalapack", "elemental": that library's LU.

    Returns
    -------
    X : matrix, shape (n, r) or (n,), VC_STAR
        In the common floating dtype of A and B (float64 for integers).

    Raises
    ------
    ShapeError
        If A is not square, or the numbers of rows differ.
    BadArgumentError
        If `assume` is unknown.
    LinAlgError
        If a pivot is exactly zero, A contains NaN or infinity, or A is not positive definite with
        "positive". A nearly singular A is not detected: see `condest`.

    Notes
    -----
    ``2/3 n^3 / ranks`` flops, ``2 n^2 r / ranks`` for the right-hand sides. A rank receives
    ``n^2 + 2 n r`` words. The pivots of a panel are chosen by a tournament among the ranks. Rows
    are not exchanged: ranks that have given pivots have less to do later. "positive" takes a third
    of the memory. Sources: Grigori, Demmel, Xiang 2011 (tournament); LAPACK's gesv, posv; see
    ali/linalg/elimination.py.

    Error: 2 eps, |A X - B| / (|A| |X| + |B|). Peak memory: 4.2 times arguments and results.
    """
    require_square("solve", A)
    require_same_rows("solve", A, B)
    require_choice("solve", "assume", assume, ASSUMPTIONS)
    require_choice("solve", "method", method, METHODS)
    if method != "auto":
        found: DistMatrix = call(ctx, method, "solve", A, B)
        return found
    dtype = float_dtype(A.dtype, B.dtype)
    if assume == "positive":
        L = _cholesky(ctx, "solve", A, dtype)
        X = copy_to_rows(ctx, B, dtype)
        triangular_solve(ctx, L, X, lower=True)
        triangular_solve(ctx, L, X, lower=True, adjoint=True)
        return X
    elimination = eliminate(ctx, as_rows(ctx, A, dtype), as_rows(ctx, B, dtype))
    _refuse_singular("solve", elimination)
    assert elimination.Y is not None
    triangular_solve(ctx, elimination.U, elimination.Y, lower=False)
    return elimination.Y


@routine("X", like={"X": "B"})
def solve_triangular(
    ctx: Context, A: DistMatrix, B: DistMatrix, lower: bool = True, adjoint: bool = False
) -> DistMatrix:
    """Solve A X = B, or A^H X = B, with a triangular A.

    Parameters
    ----------
    A : matrix, shape (n, n)
        Best in VC_STAR. The other triangle is not read.
    B : matrix, shape (n, r) or (n,)
    lower : bool
        Which triangle of A.
    adjoint : bool
        Whether to solve with A^H.

    Returns
    -------
    X : matrix, shape (n, r) or (n,), VC_STAR

    Raises
    ------
    ShapeError
        If A is not square, or the numbers of rows differ.
    LinAlgError
        If the diagonal of A holds a zero.

    Notes
    -----
    ``n^2 r / ranks`` flops; a rank receives ``n (r + 128)`` words in two messages (adjoint:
    and a tree) for each block of 128 rows. Memory: X. Source: LAPACK's trtrs.

    Error: 0.5 eps, |A X - B| / (|A| |X| + |B|). Peak memory: 1.2 times arguments and results.
    """
    require_square("solve_triangular", A)
    require_same_rows("solve_triangular", A, B)
    dtype = float_dtype(A.dtype, B.dtype)
    X = copy_to_rows(ctx, B, dtype)
    zero = triangular_solve(ctx, as_rows(ctx, A, dtype), X, lower=lower, adjoint=adjoint)
    require(
        zero == 0,
        "LinAlgError",
        f"solve_triangular: A is singular: element ({zero - 1}, {zero - 1}) of its diagonal is 0",
    )
    return X


@routine("X")
def inv(ctx: Context, A: DistMatrix) -> DistMatrix:
    """Inverse X of A. To solve a system, `solve` is faster and more accurate.

    Parameters
    ----------
    A : matrix, shape (n, n)

    Returns
    -------
    X : matrix, shape (n, n), VC_STAR

    Raises
    ------
    ShapeError
        If A is not square.
    LinAlgError
        If a pivot is exactly zero, or A contains NaN or infinity.

    Notes
    -----
    `solve` with the identity: ``8/3 n^3 / ranks`` flops, ``3 n^2`` words received.

    Error: 2 eps, |A X - I| / (|A| |X| + |I|). Peak memory: 3.4 times arguments and results.
    """
    require_square("inv", A)
    X, elimination = _inverse(ctx, A)
    _refuse_singular("inv", elimination)
    return X


@routine("det")
def det(ctx: Context, A: DistMatrix) -> complex:
    """Determinant. For large matrices it often over- or underflows: see `slogdet`.

    Parameters
    ----------
    A : matrix, shape (n, n)

    Returns
    -------
    det : complex
        With an imaginary part of 0 if A is real. 0 if a pivot is exactly zero.

    Raises
    ------
    ShapeError
        If A is not square.
    LinAlgError
        If A contains NaN or infinity.

    Notes
    -----
    As `slogdet`.

    Error: 5 eps, relative, of a well-conditioned A. Peak memory: 4.2 times arguments and results.
    """
    require_square("det", A)
    sign, sizes = _pivots(ctx, "det", A)
    mantissa, exponent = 1.0, 0
    for size in sizes.tolist():  # logarithms would lose digits
        mantissa, more = math.frexp(mantissa * size)
        exponent += more
    try:
        return sign * math.ldexp(mantissa, exponent)
    except OverflowError:
        # inf times the sign would turn a part that is 0 into nan.
        return complex(*(math.copysign(math.inf, x) if x else 0.0 for x in (sign.real, sign.imag)))


@routine("sign", "logabsdet")
def slogdet(ctx: Context, A: DistMatrix) -> tuple[complex, float]:
    """Sign and logarithm of the determinant: it is ``sign * exp(logabsdet)``.

    Parameters
    ----------
    A : matrix, shape (n, n)

    Returns
    -------
    sign : complex
        Of absolute value 1 (1 or -1 if A is real), or 0.
    logabsdet : float
        Natural logarithm of the absolute value; -inf for a determinant of 0.

    Raises
    ------
    ShapeError
        If A is not square.
    LinAlgError
        If A contains NaN or infinity.

    Notes
    -----
    LU: ``2/3 n^3 / ranks`` flops, ``n^2`` words received.
    Error: 0.5 eps, of logabsdet, relative. Peak memory: 4.2 times arguments and results.
    """
    require_square("slogdet", A)
    sign, sizes = _pivots(ctx, "slogdet", A)
    return sign, math.fsum(np.log(sizes).tolist()) if sign else -math.inf


@routine("cond")
def condest(ctx: Context, A: DistMatrix, ord: str = "1") -> float:
    """Condition number ``|A| |A^-1|``: the largest amplification of relative errors in `solve`.

    Parameters
    ----------
    A : matrix, shape (n, n); any shape for "2"
    ord : str
        "1": in the 1-norm, |A^-1| being estimated. "2": largest over smallest singular value.

    Returns
    -------
    cond : float
        At least 1; inf for a singular matrix. "1": a lower bound, in practice within a factor of 3
        and nearly always the condition number.

    Raises
    ------
    BadArgumentError
        If `ord` is neither "1" nor "2".
    ShapeError
        For "1", if A is not square.
    LinAlgError
        If A contains NaN or infinity.

    Notes
    -----
    "1": LU, and at most 10 solutions with 4 right-hand sides (Higham, Tisseur 2000): ``2/3 n^3 /
    ranks`` flops; measured beside the explicit inverse, n = 2000: 0.4 of the CPU time.
    "2": as `svdvals`; accurate up to 1 / epsilon. Source: see ali/linalg/norm_estimate.py.

    Error: 3 times at most. Peak memory: 4.4 times arguments and results.
    """
    require_choice("condest", "ord", ord, ("1", "2"))
    if ord == "2":
        values = singular_values(ctx, "condest", A).astype(np.float64)
        return float(values[0] / values[-1]) if values[-1] > 0 else math.inf
    n = require_square("condest", A)
    require(n > 0, "ShapeError", "condest: A is 0 x 0; it must have rows")
    dtype = float_dtype(A.dtype)
    factors = eliminate(ctx, as_rows(ctx, A, dtype), None, keep_lower=True)
    if factors.failure > 0:
        return math.inf
    _refuse_singular("condest", factors)
    inverse = norm_estimate(
        ctx,
        n,
        dtype,
        lambda X: solved(ctx, factors, X),
        lambda X: solved_adjoint(ctx, factors, X),
    )
    return max(1.0, largest_sum(ctx, A, 0) * inverse)


def _cholesky(
    ctx: Context, name: str, A: DistMatrix, dtype: np.dtype[np.generic] | None = None
) -> DistMatrix:
    L = copy_to_rows(ctx, A, dtype or float_dtype(A.dtype))
    minor = cholesky_in_place(ctx, L)
    require(
        minor == 0,
        "LinAlgError",
        f"{name}: A is not positive definite: its leading minor of order {minor} is not "
        "positive, or contains NaN or infinity",
    )
    return L


def _inverse(ctx: Context, A: DistMatrix) -> tuple[DistMatrix, Elimination]:
    """The inverse; undefined if the elimination reports a failure."""
    n, dtype = A.shape[0], float_dtype(A.dtype)
    identity = ctx.zeros((n, n), dtype)
    block(identity)[range(len(identity.rows)), identity.rows] = 1
    elimination = eliminate(ctx, as_rows(ctx, A, dtype), identity, into=identity)
    X = elimination.Y
    assert X is not None
    if not elimination.failure:
        triangular_solve(ctx, elimination.U, X, lower=False)
    return X, elimination


def _pivots(ctx: Context, name: str, A: DistMatrix) -> tuple[complex, Array]:
    """The sign of the determinant, and the absolute values of its factors."""
    elimination = eliminate(ctx, as_rows(ctx, A, float_dtype(A.dtype)), None)
    if elimination.failure > 0:
        return 0j, np.zeros(1)
    _refuse_singular(name, elimination)
    pivots = diagonal_of(ctx, elimination.U).astype(np.complex128)
    sizes = np.abs(pivots)
    return complex(parity(elimination.order) * np.prod(pivots / sizes)), sizes


def _refuse_singular(name: str, elimination: Elimination) -> None:
    require(elimination.failure != NOT_FINITE, "LinAlgError", f"{name}: A contains NaN or infinity")
    require(
        elimination.failure == 0,
        "LinAlgError",
        f"{name}: A is singular: pivot {elimination.failure} of {elimination.U.shape[0]} is "
        "exactly zero (lstsq takes singular matrices)",
    )
