"""Systems and factorizations: LU, Cholesky, QR, least squares, condition; products and norms.

Not with ``p?gecon``: for real random matrices the reference ScaLAPACK's (2.2) is up to fifty
times too small, on one rank as well. `norm_estimate` needs ``p?getrs`` only.
"""

from __future__ import annotations

import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

from ali.blocks import (
    Array,
    keep_triangle,
    norm_estimate,
    phases,
    product_sizes,
    require,
    require_choice,
    require_same_rows,
    require_square,
    set_diagonal,
    shape_text,
)
from ali.interface import Context, routine
from ali.scalapack.cyclic import Call, Cyclic, diagonal, indices
from ali.scalapack.native import scalar
from mpi_workers.matrix.dist_matrix import DistMatrix
from mpi_workers.matrix.layout import as_array


@routine("X", like={"X": "B"})
def solve(ctx: Context, A: DistMatrix, B: DistMatrix) -> DistMatrix:
    """Solution X of A X = B, by Gaussian elimination with partial pivoting.

    Parameters
    ----------
    A : matrix, shape (n, n)
    B : matrix, shape (n, k)
        Any layouts (best MC_MR) and dtypes. Integers are promoted to float64.

    Returns
    -------
    X : matrix, shape (n, k), MC_MR

    Raises
    ------
    ShapeError
        If A is not square, or B has another number of rows.
    LinAlgError
        If A is singular (a pivot is exactly zero), or a matrix contains NaN or infinity. An A that
        is singular but for rounding passes: see `condest`.

    Notes
    -----
    ``(2/3 n^3 + 2 n^2 k) / ranks`` flops; about ``(n^2 + n k) log(ranks) / sqrt(ranks)`` words
    and ``n log(ranks)`` messages per rank; memory for copies of A and B, twice where they
    are in blocks (docs/scalapack.md). Cannot be interrupted while it computes. Source: ScaLAPACK
    Users' Guide, ``p?gesv``.

    Error: 2 eps, |A X - B| / (|A| |X| + |B|). Peak memory: 5.0 times arguments and results.
    """
    n = require_square("solve", A)
    require_same_rows("solve", A, B)
    call = Call(ctx, "solve", "getrf", A, B)
    a, b = call.copy(A), call.copy(B)
    info = call.run("p?gesv", n, B.shape[1], *a.submatrix, a.pivots(), *b.submatrix)
    require(info == 0, "LinAlgError", f"solve: A is singular: pivot {info} of {n} is zero")
    return call.result(b)


@routine("L")
def cholesky(ctx: Context, A: DistMatrix) -> DistMatrix:
    """Cholesky factor L of a Hermitian positive definite A = L L^H.

    Parameters
    ----------
    A : matrix, shape (n, n)
        Only its lower triangle is read; symmetry is not checked.
        Best in MC_MR. Integers are promoted to float64.

    Returns
    -------
    L : matrix, shape (n, n), MC_MR
        Lower triangular with a positive diagonal; zeros above it.

    Raises
    ------
    ShapeError
        If A is not square.
    LinAlgError
        If A is not positive definite, or contains NaN or infinity.

    Notes
    -----
    ``n^3 / (3 ranks)`` flops, about ``n^2 log(ranks) / (2 sqrt(ranks))`` words per rank, memory
    for a copy of A, two where it is in blocks (docs/scalapack.md). Cannot be interrupted while it
    computes. Source: ScaLAPACK Users' Guide, ``p?potrf``.

    Error: 1 eps, |A - L L^H| / |A|. Peak memory: 2.6 times arguments and results.
    """
    n = require_square("cholesky", A)
    call = Call(ctx, "cholesky", "potrf", A)
    a = call.copy(A)
    info = call.run("p?potrf", "L", n, *a.submatrix)
    require(
        info == 0,
        "LinAlgError",
        f"cholesky: A is not positive definite: its leading {info} x {info} part is not",
    )
    L = call.result(a)
    keep_triangle(L, lower=True)
    if L.dtype.kind == "c":  # rounding's imaginary parts
        set_diagonal(L, diagonal(ctx, a).real)
    return L


@routine("L", "U", "P", vectors=("P",))
def lu(ctx: Context, A: DistMatrix) -> tuple[DistMatrix, DistMatrix, DistMatrix]:
    """LU factorization with partial pivoting: the rows P of A are L U.

    Parameters
    ----------
    A : matrix, shape (m, n)
        Best in MC_MR. Integers are promoted to float64.

    Returns
    -------
    L : matrix, shape (m, min(m, n)), MC_MR
        Lower triangular with ones on its diagonal, and nothing above 1 in modulus (up to
        sqrt(2) if complex).
    U : matrix, shape (min(m, n), n), MC_MR
        Upper triangular. A zero on its diagonal means that A is singular, which is not an error.
    P : vector, shape (m,), int64, STAR_STAR
        Permutation as row numbers: in NumPy ``A[P] == L @ U``.

    Raises
    ------
    LinAlgError
        If A contains NaN or infinity.

    Notes
    -----
    ``(m n s - (m + n) s^2 / 2 + s^3 / 3) 2 / ranks`` flops with s = min(m, n), some
    ``m n log(ranks) / sqrt(ranks)`` words per rank; memory for a copy of A and the results, and a
    further copy where it is in blocks (docs/scalapack.md); m words for P. Cannot be interrupted
    while it computes. Source: ScaLAPACK Users' Guide, ``p?getrf``.

    Error: 10 eps, |P A - L U| / |A|. Peak memory: 2.2 times arguments and results.
    """
    (m, n), k = A.shape, min(A.shape)
    call = Call(ctx, "lu", "getrf", A)
    a = call.copy(A)
    pivots = a.pivots()
    call.run("p?getrf", m, n, *a.submatrix, pivots)
    P = ctx.new_replicated(_permutation(ctx, call, a, pivots), "STAR_STAR")
    if m >= n:
        U, L = call.leading(a, k, n), call.result(a)
    else:
        L, U = call.leading(a, m, k), call.result(a)
    keep_triangle(L, lower=True)
    keep_triangle(U, lower=False)
    return set_diagonal(L, 1), U, P


def _permutation(
    ctx: Context, call: Call, a: Cyclic, pivots: NDArray[np.int32]
) -> NDArray[np.int64]:
    """The order of rows that ScaLAPACK's interchanges (row i with row pivots[i]) amount to."""
    k = min(a.m, a.n)
    mine, every = np.zeros(k, np.int64), np.zeros(k, np.int64)
    if call.grid.col == 0:  # each column of the grid holds them all
        rows = indices(a.m, a.block, call.grid.row, call.grid.height)
        rows = rows[rows < k]
        mine[rows] = pivots[: len(rows)] - 1
    ctx.comm.Allreduce(mine, every, MPI.SUM)
    order = list(range(a.m))
    for i, other in enumerate(every.tolist()):
        order[i], order[other] = order[other], order[i]
    return np.array(order, np.int64)


@routine("condition")
def condest(ctx: Context, A: DistMatrix, ord: str = "1") -> float:
    """Estimate of the condition number ``norm(A) norm(A^-1)``.

    Parameters
    ----------
    A : matrix, shape (n, n)
        Best in MC_MR. Integers are promoted to float64.
    ord : str
        "1" or "inf": in which norm.

    Returns
    -------
    condition : float
        Never above the true one but for rounding, and seldom below a third of it; inf if A is
        singular (a pivot is exactly zero).

    Raises
    ------
    ShapeError, BadArgumentError
        If A is not square; for any other ord.
    LinAlgError
        If A contains NaN or infinity.

    Notes
    -----
    An LU factorization (see `lu`), then at most 10 solves with 4 right-hand sides, which every rank
    receives. Cannot be interrupted while it computes. Sources: ScaLAPACK Users' Guide,
    ``p?lange``, ``p?getrf``, ``p?getrs``; Higham, Tisseur 2000 (see ali/blocks.py).

    Error: 3 times at most. Peak memory: 4.9 times arguments and results.
    """
    n = require_square("condest", A)
    require_choice("condest", "ord", ord, ("1", "inf"))
    call = Call(ctx, "condest", "getrf", A)
    a = call.copy(A)
    size = call.norm("1" if ord == "1" else "I", a)
    pivots = a.pivots()
    if size == 0.0 or call.run("p?getrf", n, n, *a.submatrix, pivots):
        return float("inf")

    def solved(B: Array, turned: str) -> Array:
        b = call.copy(ctx.new_replicated(B, call.layout))
        call.run("p?getrs", turned, n, B.shape[1], *a.submatrix, pivots, *b.submatrix)
        return ctx.to_layout(call.result(b), "STAR_STAR").local

    # The infinity norm of a matrix is the 1-norm of its adjoint.
    plain, adjoint = ("N", "C") if ord == "1" else ("C", "N")
    inverse = norm_estimate(
        ctx, n, call.dtype, lambda B: solved(B, plain), lambda B: solved(B, adjoint)
    )
    return size * inverse


NORMS = {"fro": "F", "1": "1", "inf": "I", "max": "M"}


@routine("C")
def matmul(
    ctx: Context, A: DistMatrix, B: DistMatrix, transpose_a: str = "N", transpose_b: str = "N"
) -> DistMatrix:
    """Matrix product C = op(A) op(B).

    Parameters
    ----------
    A, B : matrix
        Any layouts (best MC_MR: others are copied) and dtypes; op(A) is (m, k), op(B) is
        (k, n). Integers are promoted to float64.
    transpose_a, transpose_b : str
        op: "N" as it is, "T" transposed, "C" conjugated and transposed.

    Returns
    -------
    C : matrix, shape (m, n), MC_MR

    Raises
    ------
    ShapeError
        If op(A)'s columns and op(B)'s rows differ in number.
    BadArgumentError
        For any other transpose.

    Notes
    -----
    ``2 m n k / ranks`` flops; ``m k / height + k n / width`` words received per rank on a
    height x width grid; memory for C, and one copy of A and of B where they are not in
    MC_MR, are of another dtype, or all dimensions are at least the threshold (docs/scalapack.md).
    Cannot be interrupted while it computes. Source: ScaLAPACK Users' Guide, PBLAS ``p?gemm``.

    Error: 5 eps, relative to |C|. Peak memory: 2.3 times arguments and results.
    """
    m, k, n = product_sizes(A, B, transpose_a, transpose_b)
    call = Call(ctx, "matmul", "gemm", A, B, finite=False)
    a = call.operand(A)
    b = a if B is A else call.operand(B)
    c = call.new(m, n)
    call.run(
        "p?gemm", transpose_a, transpose_b, m, n, k, scalar(1, call.dtype), *a.submatrix,
        *b.submatrix, scalar(0, call.dtype), *c.submatrix, info=False,
    )  # fmt: skip
    return call.result(c)


@routine("norm")
def norm(ctx: Context, A: DistMatrix, ord: str = "fro") -> float:
    """Norm of a matrix.

    Parameters
    ----------
    A : matrix, shape (m, n)
        Best in MC_MR. Integers are promoted to float64.
    ord : str
        "fro" (Frobenius), "1" (largest sum of a column's absolute values), "inf" (of a
        row's) or "max" (largest absolute value, which is no matrix norm).

    Returns
    -------
    norm : float
        nan if A contains NaN. Computed in A's precision.

    Raises
    ------
    BadArgumentError
        For any other ord.

    Notes
    -----
    Two passes over A; ``n / width`` ("1") or ``m / height`` ("inf") words, else one, from
    each rank; a copy of A if it is not in MC_MR. Source: ScaLAPACK Users' Guide, ``p?lange``.

    Error: 2 eps, relative to the norm. Peak memory: 3.2 times arguments and results.
    """
    require_choice("norm", "ord", ord, tuple(NORMS))
    call = Call(ctx, "norm", "lange", A, finite=False)
    a = call.operand(A)
    mine = np.array([a.rows > 0 and a.cols > 0 and bool(np.isnan(a.data).any())], np.int32)
    nans = np.zeros(1, np.int32)
    ctx.comm.Allreduce(mine, nans, MPI.MAX)
    if nans[0]:
        return float("nan")
    return call.norm(NORMS[ord], a)


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
    turn, length = phases(diagonal(ctx, a))
    R = call.leading(a, k, n)
    call.run_with_work("p?orgqr", m, k, k, *a.submatrix, tau)
    Q = call.result(a) if n == k else call.leading(a, m, k)
    keep_triangle(R, lower=False)
    R.local[...] *= turn.conj()[as_array(R.rows), None]
    set_diagonal(R, length)
    Q.local[...] *= turn[as_array(Q.cols)]
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
    turn, length = phases(diagonal(ctx, a))
    L = call.leading(a, m, k)
    call.run_with_work("p?orglq", k, n, k, *a.submatrix, tau)
    Q = call.result(a) if m == k else call.leading(a, k, n)
    keep_triangle(L, lower=True)
    L.local[...] *= turn.conj()[as_array(L.cols)]
    set_diagonal(L, length)
    Q.local[...] *= turn[as_array(Q.rows), None]
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
