"""Singular value decompositions, pseudoinverse and rank.

By leading vectors (`leading_vectors`); by TSQR and LAPACK on rank 0; or, where no rank holds the
factors whole, by the polar factor and eigenvectors: ``A = Q H`` and ``H = V S V^H`` give
``A = (Q V) S V^H``. Source: Nakatsukasa, Higham, "Stable and efficient spectral divide and conquer
algorithms for the symmetric eigenvalue decomposition and the SVD", SIAM J. Sci. Comput. 35(3),
2013.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import scipy.linalg

from ali.blocks import (
    Array,
    block,
    finite_norm,
    float_dtype,
    floating,
    frobenius,
    phases,
    require_choice,
    require_range,
    shape_text,
)
from ali.interface import Context, routine
from ali.linalg import eigen, native_libraries, qr_factorization
from ali.linalg.leading import basis_size, krylov_basis, leading_vectors, right_vectors
from ali.linalg.polar_factor import hermitian_factor, unitary_factor
from ali.linalg.products import operand, product
from ali.linalg.rows import adjoint_in_rows, as_rows, gather_rows
from mpi_workers.matrix.dist_matrix import DistMatrix

NOISE = 100.0  # roundings of the largest value, below which vectors of U are not orthogonal yet


def svd_in_rows(ctx: Context, name: str, A: DistMatrix) -> tuple[Array, DistMatrix, DistMatrix]:
    """S on every rank, U and V in VC_STAR, of a floating A in VC_STAR with m >= n. Collective.

    Notes
    -----
    QR of A, unless it is square; then some ``40 n^3 / ranks`` flops, nearly all in products. Memory
    per rank: its share of 6 matrices of order n.
    """
    if A.shape[0] > A.shape[1]:
        Q, R = qr_factorization.thin_qr(ctx, A)
        S, left, V = svd_in_rows(ctx, name, R)
        return S, product(ctx, Q, left, "rows"), V
    n = A.shape[1]
    unitary = unitary_factor(ctx, name, A)
    H = hermitian_factor(ctx, unitary, A)
    # Minus H, so that its eigenvalues ascend as the singular values descend.
    block(H)[...] *= -1
    values, V = eigen.eigenpairs(ctx, H, frobenius(ctx, H))
    del H
    S = np.abs(values)
    U = product(ctx, unitary, V, "rows")
    del unitary
    if n and S.min() <= NOISE * n * float(np.finfo(A.dtype).eps) * S.max():
        # QDWH does not bring the directions of singular values at the level of noise to length 1.
        found = qr_factorization.factor(ctx, U)
        mine = block(U)[range(len(U.rows)), U.rows]
        turn, _ = phases(gather_rows(ctx, mine[:, None], 0, n)[:, 0])
        U = qr_factorization.form_q(ctx, U, found)
        block(U)[...] *= turn
    return _descending(S, U, V)


def _descending(S: Array, U: DistMatrix, V: DistMatrix) -> tuple[Array, DistMatrix, DistMatrix]:
    """Sorted: eigenvalues that are zero but for rounding may have the other sign."""
    order = np.argsort(-S, kind="stable")
    moved = np.flatnonzero(order != np.arange(len(S)))
    for matrix in (U, V):
        local = block(matrix)
        local[:, moved] = local[:, order[moved]]
    return S[order], U, V


def singular_values_in_rows(ctx: Context, name: str, A: DistMatrix) -> Array:
    """S alone, on every rank; see `svd_in_rows`. Collective."""
    if A.shape[0] > A.shape[1]:
        A = qr_factorization.thin_qr(ctx, A)[1]
    H = hermitian_factor(ctx, unitary_factor(ctx, name, A), A)
    kind = np.zeros(0, A.dtype).real.dtype
    scale = frobenius(ctx, H)
    if scale:
        block(H)[...] /= kind.type(scale)
    diagonal, beside, _ = eigen.reduce(ctx, H)
    S = np.empty(len(diagonal))
    if ctx.rank == 0:
        found = scipy.linalg.eigvalsh_tridiagonal(
            diagonal.astype(np.float64), beside.astype(np.float64)
        )
        S[...] = np.sort(np.abs(found))[::-1] * scale
    ctx.comm.Bcast(S)
    return S.astype(kind)


# From this rank's rows of X, and X's norm, to this rank's rows of X K and of an orthonormal K in
# VC_STAR; None: K is the identity.
Projection = Callable[[Array, float], tuple[Array, Array] | None]
METHODS = ("arpack", "randomized", "gram")


@routine("S", "U", "V", vectors=("S",))
def svd(
    ctx: Context, A: DistMatrix, method: str = "auto"
) -> tuple[DistMatrix, DistMatrix, DistMatrix]:
    """Thin singular value decomposition A = U diag(S) V^H.

    Parameters
    ----------
    A : matrix, shape (m, n)
        Best in VC_STAR if tall, in STAR_VC if wide. Integers are promoted to float64.
    method : str
        "auto": the algorithm below. "scalapack", "elemental": that library's routine.

    Returns
    -------
    S : vector, shape (k,), real, STAR_STAR, with k = min(m, n)
        Descending.
    U : matrix, shape (m, k), VC_STAR
    V : matrix, shape (n, k), VC_STAR
        Orthonormal columns, for A of any rank.

    Raises
    ------
    LinAlgError
        If A contains NaN or infinity, or its norm is too large for its dtype.

    Notes
    -----
    With l = max(m, n): QR of A (or A^T), ``6 l k^2 / ranks`` flops; then, of the k x k triangle,
    the polar factor by QDWH and eigenvectors, some ``40 k^3 / ranks`` flops and the share of 6
    k x k matrices on each rank. For k up to 512, or on one rank: LAPACK on rank 0, ``20 k^3``.
    Sources: Nakatsukasa, Higham 2013; Demmel et al. 2012 (TSQR); LAPACK's gesdd.

    Error: 40 eps, |A - U S V^H| / |A|, |U^H U - I| and |V^H V - I|. Peak memory: 2.1 times
    arguments and results.
    """
    if method != "auto":
        return native_libraries.call(ctx, method, svd, A)
    return _decomposed(ctx, "svd", A, min(A.shape), lambda tall, scale: None)


@routine("S", "U", "V", vectors=("S",))
def truncated_svd(
    ctx: Context,
    A: DistMatrix,
    rank: int,
    tol: float = 0.0,
    max_iterations: int = 0,
    method: str = "arpack",
    oversampling: int = 10,
    power_iterations: int = 2,
    seed: int = 0,
) -> tuple[DistMatrix, DistMatrix, DistMatrix]:
    """Leading singular values and vectors: A is approximately U diag(S) V^H.

    Parameters
    ----------
    A : matrix, shape (m, n)
        Best in VC_STAR if tall, in STAR_VC if wide: then A is not copied.
        Integers are promoted to float64.
    rank : int
        Number of singular values, 1 to min(m, n).
    tol : float
        "arpack": relative accuracy of the eigenvalues of the Gram matrix; 0 is machine precision.
    max_iterations : int
        "arpack": maximum number of restarts; 0 is ten times min(m, n).
    method : str
        "arpack": accurate to rounding. "randomized": a fixed number of passes over A; the
        error depends on how fast its singular values decay. "gram": the fastest while
        min(m, n) is at most some thousands; singular values below the square root of the machine
        epsilon (1e-8 for float64) times the largest, and their vectors, are noise.
    oversampling : int
        "randomized": number of random vectors in addition to `rank`, 0 or more.
    power_iterations : int
        "randomized": 0 or 1 for fast decay; 2 for most matrices, more for noise. If
        ``(rank + oversampling) (power_iterations + 2) >= min(m, n)`` the SVD is dense.
    seed : int
        "randomized": seed of the random vectors, which do not depend on the number of ranks.

    Returns
    -------
    S : vector, shape (rank,), real, STAR_STAR
        Descending.
    U : matrix, shape (m, rank), VC_STAR
    V : matrix, shape (n, rank), VC_STAR
        Orthonormal columns, also if A has a smaller rank.

    Raises
    ------
    BadArgumentError
        If rank, tol, max_iterations, method, oversampling or power_iterations is out of range.
    LinAlgError
        If A contains NaN or infinity, or ARPACK does not converge.

    Notes
    -----
    ARPACK on the Gram matrix of the smaller side, which is not formed; then a thin QR and
    a small SVD of the product of A with the vectors found, so that U is orthonormal and
    the values are accurate to rounding times the largest. If ARPACK would keep all vectors
    (``max(2 rank + 1, 20) >= min(m, n)``) the SVD is dense, through TSQR.

    With s = min(m, n), l = max(m, n): ``4 m n / ranks`` flops and two messages of s words a
    product, some 2 to 10 products per value; then ``6 l rank^2 / ranks`` flops. Memory per
    rank: ``s rank`` (``s max(2 rank, 20)`` on rank 0) and two times ``l rank / ranks``.
    Dense: ``6 l s^2 / ranks + 20 s^3`` flops, ``l s / ranks + s^2`` memory.

    Randomized (block Krylov), with k = rank + oversampling, q = power_iterations + 1 and
    b = (q + 1) k: ``4 m n k q / ranks`` flops in products of matrices and ``6 (l + s) b^2 / ranks``
    for orthogonality, ``2 s k`` words a step; memory ``3 s k`` on each rank and
    ``2 (l + s) b / ranks``.

    Gram: ``m n s / ranks`` flops in products of matrices, one pass over A, ``s^2`` words up a tree
    of ranks, ``9 s^3`` flops at most on rank 0; memory ``3 s^2 + 2 l rank / ranks`` on each rank.
    For s above 512 and above l / ranks it would exceed a rank's share: then "arpack" is used.

    Sources: Lehoucq, Sorensen, Yang 1998 (ARPACK); Demmel et al. 2012 (TSQR); Musco, Musco, NIPS
    2015 (randomized).

    Error: 8 eps, of S, relative to the largest singular value. Peak memory: 1.3 times arguments and
    results.
    """
    smaller = min(A.shape)
    matrix = f" for a {shape_text(A)} matrix"
    require_range("truncated_svd", "rank", rank, 1, smaller, note=matrix)
    require_range("truncated_svd", "tol", tol, 0)
    require_range("truncated_svd", "max_iterations", max_iterations, 0)
    require_range("truncated_svd", "oversampling", oversampling, 0)
    require_range("truncated_svd", "power_iterations", power_iterations, 0)
    require_choice("truncated_svd", "method", method, METHODS)

    steps, block_size = power_iterations + 1, rank + oversampling
    if method == "gram" and qr_factorization.exceeds_share(ctx, max(A.shape), smaller):
        method = "arpack"

    def project(tall: Array, scale: float) -> tuple[Array, Array] | None:
        if method == "randomized" and block_size * (steps + 1) < smaller:
            return krylov_basis(ctx, tall, block_size, scale, steps, seed)
        if method == "arpack" and basis_size(rank, smaller) < smaller:
            basis = right_vectors(ctx, tall, rank, scale, tol, max_iterations)
        elif method == "gram" and rank < smaller:
            basis = leading_vectors(ctx, tall, rank, scale)
        else:
            return None
        return tall @ basis, basis[ctx.rank :: ctx.size]

    return _decomposed(ctx, "truncated_svd", A, rank, project)


@routine("S", vectors=("S",))
def svdvals(ctx: Context, A: DistMatrix) -> DistMatrix:
    """All singular values of A.

    Parameters
    ----------
    A : matrix, shape (m, n)

    Returns
    -------
    S : vector, shape (min(m, n),), real, STAR_STAR
        Descending.

    Raises
    ------
    LinAlgError
        If A contains NaN or infinity, or its norm is too large for its dtype.

    Notes
    -----
    As `svd` without vectors, and Q is not formed: with s = min(m, n), l = max(m, n),
    ``2 l s^2 / ranks`` flops, ``3 s^3`` on rank 0, and a copy of A.

    Error: 4 eps, relative to the largest singular value. Peak memory: 2.1 times arguments and
    results.
    """
    return ctx.new_replicated(singular_values(ctx, "svdvals", A))


@routine("X")
def pinv(ctx: Context, A: DistMatrix, rcond: float = -1.0) -> DistMatrix:
    """Moore-Penrose inverse X of A.

    Parameters
    ----------
    A : matrix, shape (m, n)
    rcond : float
        Singular values up to ``rcond`` times the largest count as zero; negative (the
        default): max(m, n) times the machine epsilon.

    Returns
    -------
    X : matrix, shape (n, m)
        In STAR_VC if A is tall, else in VC_STAR.

    Raises
    ------
    LinAlgError
        If A contains NaN or infinity.

    Notes
    -----
    `svd`, then ``2 m n min(m, n) / ranks`` flops for the product of the factors; memory: that of
    `svd`, X, and the smaller factor on every rank.

    Error: 10 eps, of an X of a well-conditioned A, relative to |X|. Peak memory: 2.6 times
    arguments and results.
    """
    (m, n), k = A.shape, min(A.shape)
    S, U, V = _decomposed(ctx, "pinv", A, k, lambda tall, scale: None)
    values = S.local.reshape(-1)
    inverse = np.zeros_like(values)
    count = _rank(values, A.shape, rcond)
    inverse[:count] = 1 / values[:count]
    block(V)[...] *= inverse
    if m < n:
        return product(ctx, V, adjoint_in_rows(ctx, U), "rows")
    return product(ctx, V, operand(U, "C"), "cols")


@routine("rank")
def matrix_rank(ctx: Context, A: DistMatrix, rcond: float = -1.0) -> int:
    """Numerical rank: how many singular values of A exceed a tolerance.

    Parameters
    ----------
    A : matrix, shape (m, n)
    rcond : float
        Singular values up to ``rcond`` times the largest count as zero; negative (the
        default): max(m, n) times the machine epsilon, as in NumPy.

    Returns
    -------
    rank : int

    Raises
    ------
    LinAlgError
        If A contains NaN or infinity.

    Notes
    -----
    As `svdvals`.

    Error: 0 eps. Peak memory: 2.1 times arguments and results.
    """
    return _rank(singular_values(ctx, "matrix_rank", A), A.shape, rcond)


def singular_values(ctx: Context, name: str, A: DistMatrix) -> Array:
    """All singular values, descending, on every rank. Collective."""
    tall, _ = _tall(ctx, name, A)
    if qr_factorization.stays_spread(ctx, min(A.shape)):
        return singular_values_in_rows(ctx, name, _as_tall(ctx, A, tall.dtype))
    factors = qr_factorization.TallQR(ctx.comm, tall, vectors=False, triangle=False)
    S = np.empty(min(A.shape), np.zeros(0, tall.dtype).real.dtype)
    if factors.r is not None:
        S[...] = scipy.linalg.svd(factors.r, compute_uv=False, overwrite_a=True, check_finite=False)
    ctx.comm.Bcast(S)
    return S


def _rank(values: Array, shape: tuple[int, int], rcond: float) -> int:
    limit = rcond if rcond >= 0 else max(shape) * float(np.finfo(values.dtype).eps)
    return int((values > limit * values[:1].max(initial=0)).sum())


def _tall(ctx: Context, name: str, A: DistMatrix) -> tuple[Array, float]:
    """This rank's rows of X = A, or of X = A^T if A is wide, and A's norm."""
    wide = A.shape[0] < A.shape[1]
    A = ctx.to_layout(A, "STAR_VC" if wide else "VC_STAR")
    tall = floating(block(A).T if wide else block(A))
    return tall, finite_norm(ctx, name, A)


def _decomposed(
    ctx: Context, name: str, A: DistMatrix, rank: int, project: Projection
) -> tuple[DistMatrix, DistMatrix, DistMatrix]:
    m, n = A.shape
    tall, scale = _tall(ctx, name, A)
    found: tuple[Array, Array] | None = None
    if scale > 0:
        found = project(tall, scale)
    elif rank < min(m, n):  # any orthonormal vectors
        basis = np.eye(min(m, n), rank, dtype=tall.dtype)
        found = tall @ basis, basis[ctx.rank :: ctx.size]
    if found is None and qr_factorization.stays_spread(ctx, min(m, n)):
        del tall
        return _spread(ctx, name, A, rank)
    S, left, right = _restricted(ctx, tall, found, rank)
    if m < n:  # A^T = X = left S right^H, so A = conj(right) S conj(left)^H
        left, right = right.conj(), left.conj()
    U, V = ctx.new_from_rows(left, m), ctx.new_from_rows(right, n)
    ctx.progress(1.0, "done")
    return ctx.new_replicated(S), U, V


def _as_tall(ctx: Context, A: DistMatrix, dtype: np.dtype[np.generic]) -> DistMatrix:
    """A, or A^T if A is wide, in VC_STAR; read-only."""
    return as_rows(ctx, operand(A, "T") if A.shape[0] < A.shape[1] else A, dtype)


def _spread(
    ctx: Context, name: str, A: DistMatrix, rank: int
) -> tuple[DistMatrix, DistMatrix, DistMatrix]:
    """The leading part of the whole SVD, which no rank holds."""
    tall = _as_tall(ctx, A, float_dtype(A.dtype))
    S, U, V = svd_in_rows(ctx, name, tall)
    if A.shape[0] < A.shape[1]:  # see _decomposed
        U, V = V, U
        for matrix in (U, V):
            np.conjugate(matrix.local, out=matrix.local)
    if rank < len(S):
        U, V = (ctx.new_from_rows(block(one)[:, :rank], one.shape[0]) for one in (U, V))
    return ctx.new_replicated(S[:rank]), U, V


def _restricted(
    ctx: Context, tall: Array, found: tuple[Array, Array] | None, rank: int
) -> tuple[Array, Array, Array]:
    """SVD of X restricted to a basis (None: all of it): S, and this rank's rows of U and of V."""
    product = tall if found is None else found[0]
    columns = product.shape[1]
    factors = qr_factorization.TallQR(
        ctx.comm, product, overwrite=found is not None, triangle=False
    )
    left: Array | None = None
    S = np.empty(rank, np.zeros(0, tall.dtype).real.dtype)
    right_h = np.empty((rank, columns), tall.dtype)
    if factors.r is not None:
        u, s, vh = scipy.linalg.svd(
            factors.r, full_matrices=False, overwrite_a=True, check_finite=False
        )
        left, S[...], right_h[...] = u[:, :rank], s[:rank], vh[:rank]
    ctx.comm.Bcast(S)
    ctx.comm.Bcast(right_h)
    U = factors.times(left, rank, tall.dtype)
    right = right_h.conj().T
    return S, U, right[ctx.rank :: ctx.size] if found is None else found[1] @ right
