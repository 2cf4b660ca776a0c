"""Systems, inverses, determinants and the exponential, by the factors of `triangular`."""

from __future__ import annotations

import math

import numpy as np

from ali.blocks import (
    Array,
    block,
    float_dtype,
    norm_estimate,
    require,
    require_choice,
    require_same_rows,
    require_square,
    set_diagonal,
)
from ali.interface import Context, routine
from ali.linalg.collectives import sum_over_ranks
from ali.linalg.indexing import diagonal_of
from ali.linalg.native_libraries import call
from ali.linalg.products import product
from ali.linalg.reductions import largest_sum
from ali.linalg.rows import as_rows, copy_to_rows
from ali.linalg.singular import singular_values
from ali.linalg.triangular import (
    NOT_FINITE,
    Elimination,
    cholesky_in_place,
    eliminate,
    parity,
    solved,
    solved_adjoint,
    triangular_solve,
)
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
    ali/linalg/systems.py.

    Error: 2 eps, |A X - B| / (|A| |X| + |B|). Peak memory: 4.2 times arguments and results.
    """
    require_square("solve", A)
    require_same_rows("solve", A, B)
    require_choice("solve", "assume", assume, ASSUMPTIONS)
    if method != "auto":
        return call(ctx, method, solve, A, B)
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
    n, dtype = require_square("inv", A), float_dtype(A.dtype)
    identity = set_diagonal(ctx.zeros((n, n), dtype), 1)
    elimination = eliminate(ctx, as_rows(ctx, A, dtype), identity, into=identity)
    _refuse_singular("inv", elimination)
    X = elimination.Y
    assert X is not None
    triangular_solve(ctx, elimination.U, X, lower=False)
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

    Error: 3 eps, relative, of a well-conditioned A. Peak memory: 4.2 times arguments and results.
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
    "2": as `svdvals`; accurate up to 1 / epsilon. Source: see ali/blocks.py.

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


# By bytes of a real number: the 1-norm up to which the Pade approximant is exact to rounding, and
# its coefficients, ascending (Higham 2005, table 2.3; order 7 and 13).
PADE: dict[int, tuple[float, tuple[float, ...]]] = {
    4: (3.925724783138660, (17297280, 8648640, 1995840, 277200, 25200, 1512, 56, 1)),
    8: (
        5.371920351148152,
        (
            64764752532480000, 32382376266240000, 7771770303897600, 1187353796428800,
            129060195264000, 10559470521600, 670442572800, 33522128640, 1323241920, 40840800,
            960960, 16380, 182, 1,
        ),
    ),
}  # fmt: skip


@routine("X")
def expm(ctx: Context, A: DistMatrix) -> DistMatrix:
    """Matrix exponential X = exp(A).

    Parameters
    ----------
    A : matrix, shape (n, n)
        Best in VC_STAR. Integers are promoted to float64.

    Returns
    -------
    X : matrix, shape (n, n), VC_STAR

    Raises
    ------
    ShapeError
        If A is not square.
    LinAlgError
        If A contains NaN or infinity, or X overflows.

    Notes
    -----
    Scaling, a Pade approximant, and squaring, with s = log2 of the 1-norm of A, or 0: ``(2 (6 + s)
    + 8/3) n^3 / ranks`` flops (float32: 4 + s), and ``(7 + s) n^2`` words received. Each rank holds
    its share of 11 matrices. Source: Higham, "The scaling and squaring method for the matrix
    exponential revisited", SIAM J. Matrix Anal. Appl. 26(4), 2005.

    Error: 40 eps, relative to |X|. Peak memory: 5.3 times arguments and results.
    """
    n = require_square("expm", A)
    X = copy_to_rows(ctx, A, float_dtype(A.dtype))
    x = block(X)
    kind = np.zeros(0, X.dtype).real.dtype
    with np.errstate(all="ignore"):
        sums = sum_over_ranks(ctx.comm, np.abs(x).sum(axis=0, dtype=np.float64))
    size = float(sums.max(initial=0))
    require(
        math.isfinite(size),
        "LinAlgError",
        f"expm: A contains NaN or infinity (its norm is {size})",
    )
    limit, coefficients = PADE[kind.itemsize]
    squarings = max(0, math.ceil(math.log2(size / limit))) if size > limit else 0
    x *= kind.type(2.0**-squarings)
    X = _pade(ctx, X, coefficients)
    for step in range(squarings):
        X = product(ctx, X, X, "rows")
        ctx.progress(0.5 + 0.5 * (step + 1) / squarings, f"squaring {step + 1} of {squarings}")
    largest = float(np.abs(block(X)).max(initial=0)) if n else 0.0
    require(
        all(map(math.isfinite, ctx.comm.allgather(largest))),
        "LinAlgError",
        f"expm: the exponential overflows {X.dtype}; the 1-norm of A is {size}",
    )
    return X


def _pade(ctx: Context, X: DistMatrix, b: tuple[float, ...]) -> DistMatrix:
    """``(V - U)^-1 (V + U)`` with the odd part U and the even part V of the polynomial b."""
    squares = product(ctx, X, X, "rows")
    powers = [squares]
    for _ in range(2):
        powers.append(product(ctx, powers[-1], squares, "rows"))
    low_odd, low_even = _sum(ctx, powers, b[1:8:2]), _sum(ctx, powers, b[0:8:2])
    if len(b) > 8:
        # Powers 8 to 13 of X: the sixth times a polynomial in the second.
        for low, high in ((low_odd, b[9::2]), (low_even, b[8::2])):
            extra = _sum(ctx, powers, (0, *high))
            block(low)[...] += block(product(ctx, powers[-1], extra, "rows"))
            del extra
    del powers, squares
    U = product(ctx, X, low_odd, "rows")
    u, v = block(U), block(low_even)
    right: Array = v + u
    v -= u
    block(U)[...] = right
    found = eliminate(ctx, low_even, U, into=U)
    assert found.Y is not None
    require(found.failure == 0, "LinAlgError", "expm: the denominator is singular")
    triangular_solve(ctx, found.U, found.Y, lower=False)
    return found.Y


def _sum(ctx: Context, powers: list[DistMatrix], b: tuple[float, ...]) -> DistMatrix:
    """``b_0 I + b_1 powers_0 + ...``, in a new matrix."""
    S = ctx.zeros(powers[0].shape, powers[0].dtype)
    s = block(S)
    for factor, power in zip(b[1:], powers, strict=False):
        s += s.dtype.type(factor) * block(power)
    s[range(len(S.rows)), S.rows] += s.dtype.type(b[0])
    return S
