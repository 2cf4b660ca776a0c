"""Singular values and vectors, pseudoinverse and rank.

By the Gram matrix, ARPACK or random vectors for the leading ones of tall matrices; by QR, the
polar factor (QDWH iterations) and eigenvectors for decompositions that no rank holds whole.

Squaring loses half the digits: singular values below the square root of the machine epsilon
(times the largest) are noise. For a small Gram matrix this is the fastest method.
Source: Golub, Van Loan, "Matrix Computations", 4th ed., section 8.6.

ARPACK works on the Gram matrix, which is never formed. Source: Lehoucq, Sorensen, Yang, "ARPACK
Users' Guide", SIAM, 1998.

The iterations are rational functions that bring all singular values to 1, at most six in float64.
Sources: Nakatsukasa, Bai, Gygi, "Optimizing Halley's iteration for computing the matrix polar
decomposition", SIAM J. Matrix Anal. Appl. 31(5), 2010; Nakatsukasa, Higham, "Stable and efficient
spectral divide and conquer algorithms for the symmetric eigenvalue decomposition and the SVD",
SIAM J. Sci. Comput. 35(3), 2013.

``A = Q H`` and ``H = V S V^H`` give ``A = (Q V) S V^H``. Source: Nakatsukasa, Higham, "Stable and
efficient spectral divide and conquer algorithms for the symmetric eigenvalue decomposition and the
SVD", SIAM J. Sci. Comput. 35(3), 2013.

Sources: Musco, Musco, "Randomized block Krylov methods for stronger and faster approximate singular
value decomposition", NIPS 2015 (algorithm 2); Halko, Martinsson, Tropp, "Finding structure with
randomness", SIAM Review 53(2), 2011.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import scipy.linalg
from scipy.sparse import issparse
from scipy.sparse.linalg import ArpackError, ArpackNoConvergence, LinearOperator, eigsh

from ali.blocks import (
    CHUNK,
    Array,
    block,
    finite_norm,
    float_dtype,
    floating,
    frobenius,
    panel_width,
    panels,
    phases,
    require_choice,
    require_range,
    shape_text,
)
from ali.interface import Context, routine
from ali.linalg import eigen, native_libraries, qr_factorization
from ali.linalg.collectives import sum_over_ranks
from ali.linalg.creation import normal_rows
from ali.linalg.products import inner, operand, product
from ali.linalg.triangular import (
    adjoint_in_rows,
    as_rows,
    cholesky_in_place,
    copy_to_rows,
    gather_rows,
    rows_before,
    triangular_solve,
)
from mpi_workers.failures import Failure
from mpi_workers.matrix.dist_matrix import DistMatrix


def leading_vectors(ctx: Context, local: Array, rank: int, scale: float) -> Array:
    """Orthonormal basis of the leading right singular vectors of X, on every rank. Collective.

    Parameters
    ----------
    local : ndarray, shape (local_m, n)
        This rank's rows of X; float or complex.
    rank : int
        Number of vectors, at most n.
    scale : float
        A norm of X. The Gram matrix is that of ``X / scale`` if squares could over- or underflow.

    Returns
    -------
    ndarray, shape (n, rank)

    Notes
    -----
    ``local_m n^2`` flops (twice that where complex), ``n^2`` words up a tree of ranks, then
    ``9 n^3`` flops at most on rank 0; memory ``3 n^2`` words and a
    panel of 32 MiB.
    """
    n, dtype = local.shape[1], local.dtype
    limits = np.finfo(dtype)
    safe = float(limits.tiny) ** 0.25 < scale < float(limits.max) ** 0.25
    whole = qr_factorization.gram_of_rows(ctx, local, 1.0 if safe else scale)
    ctx.progress(0.5, "Gram matrix")
    basis = np.empty((n, rank), dtype)
    if ctx.rank == 0:
        _, vectors = scipy.linalg.eigh(
            whole, subset_by_index=[n - rank, n - 1], check_finite=False, overwrite_a=True
        )
        basis[...] = vectors[:, ::-1]
    ctx.comm.Bcast(basis)
    return basis


PURPOSE = 2  # random streams different from those of `random_normal`; the next are used as well


def krylov_basis(
    ctx: Context, local: Array, size: int, scale: float, steps: int, seed: int
) -> tuple[Array, Array]:
    """Orthonormal basis K of the span of ``W, G W, ..., G^steps W``, and X K. Collective.

    G is ``X^H X`` and W is random, with `size` columns. The space contains that of subspace
    iteration, ``G^steps W``, for the same passes over X: measured on spectra from exponential decay
    to noise, the singular values are 3 to 1000 times as accurate after 7 passes, for 1.4 times the
    CPU time (6000 x 600, size 30).

    Parameters
    ----------
    local : ndarray, shape (local_m, n)
        This rank's rows of X; float or complex.
    size : int
        ``size (steps + 1)`` is at most n and the number of rows of X.
    scale : float
        A norm of X; products are divided by it.

    Returns
    -------
    products : ndarray, shape (local_m, size (steps + 1))
        This rank's rows of X K.
    basis : ndarray, shape (local_n, size (steps + 1))
        This rank's rows of K, in VC_STAR.

    Notes
    -----
    ``2 steps + 1`` passes over X. Each block is orthogonalized against the blocks before, twice
    (once suffices unless X has a low rank), and by TSQR.
    """
    n, dtype = local.shape[1], local.dtype
    width = size * (steps + 1)
    products = np.empty((len(local), width), dtype, order="F")
    basis = np.empty((len(range(ctx.rank, n, ctx.size)), width), dtype, order="F")
    new = _random(ctx, n, size, seed, dtype)
    for step in range(steps + 1):
        ctx.check()
        here = slice(step * size, (step + 1) * size)
        for _ in range(2 if step else 1):
            known = basis[:, : here.start]
            new = new - known @ sum_over_ranks(ctx.comm, known.conj().T @ new)
            new = _orthonormal(ctx, new)
        basis[:, here] = new
        products[:, here] = local @ gather_rows(ctx, new, 0, n)
        ctx.progress((step + 1) / (steps + 2), f"block {step + 1} of {steps + 1}")
        if step == steps:
            break
        ahead = products[:, here] / dtype.type(scale)
        ahead = sum_over_ranks(ctx.comm, (ahead.conj().T @ local) / dtype.type(scale))
        # Where X maps all blocks to zero, the rounding errors added here are as good as any vector.
        noise = _random(ctx, n, size, seed + step + 1, dtype) * dtype.type(np.finfo(dtype).eps)
        new = ahead.conj().T[ctx.rank :: ctx.size] + noise
    return products, basis


def _random(ctx: Context, n: int, size: int, seed: int, dtype: np.dtype[np.generic]) -> Array:
    """This rank's rows of random vectors of length 1 or so."""
    mine = range(ctx.rank, n, ctx.size)
    found = normal_rows(mine, size, seed, PURPOSE)
    if np.dtype(dtype).kind == "c":
        found = found + 1j * normal_rows(mine, size, seed, PURPOSE + 1)
    return np.asarray((found / n**0.5).astype(dtype))


def _orthonormal(ctx: Context, mine: Array) -> Array:
    factors = qr_factorization.TallQR(ctx.comm, mine)
    size = mine.shape[1]
    identity = np.eye(size, dtype=mine.dtype) if factors.r is not None else None
    return factors.times(identity, size, mine.dtype)


SEED = 2018
Rows: TypeAlias = Any  # ndarray or csr_array


def basis_size(rank: int, n: int) -> int:
    """The number of vectors that ARPACK keeps to find `rank` of `n`: its default."""
    return min(n, max(2 * rank + 1, 20))


def right_vectors(
    ctx: Context, local: Rows, rank: int, scale: float, tol: float, max_iterations: int
) -> Array:
    """Orthonormal basis of the leading right singular vectors of X, on every rank. Collective.

    ARPACK runs on rank 0, and the other ranks multiply: ranks whose processors round differently
    would otherwise take different decisions and deadlock.

    Parameters
    ----------
    local : ndarray or csr_array, shape (local_m, n)
        This rank's rows of X; float or complex.
    rank : int
        Number of vectors; ``basis_size(rank, n) < n``.
    scale : float
        A norm of X: the operator is ``X^H X / scale^2``, which neither over- nor underflows.
    tol, max_iterations
        ARPACK's; 0 means machine precision, and ``10 n`` restarts.

    Returns
    -------
    ndarray, shape (n, rank)

    Raises
    ------
    Failure
        LinAlgError on every rank, if ARPACK does not converge.

    Notes
    -----
    A product costs ``4 local_m n`` flops and two messages of ``n`` words. Memory:
    ``n basis_size`` on rank 0, ``n rank`` elsewhere.
    """
    n, dtype = local.shape[1], local.dtype
    message = np.empty(n + 1, dtype)  # a vector, and whether to continue
    found = np.empty((n, rank), dtype)
    failure = ""
    if ctx.rank == 0:
        try:
            found[...] = _arpack(ctx, local, message, rank, scale, tol, max_iterations)
        except ArpackNoConvergence as error:
            failure = (
                f"ARPACK found {len(error.eigenvalues)} of {rank} singular values before "
                "max_iterations: allow more, give a larger tol, or ask for fewer"
            )
        except ArpackError as error:
            failure = f"ARPACK failed: {error}"
        message[n] = 0
        ctx.comm.Bcast(message)
    else:
        while True:
            ctx.comm.Bcast(message)
            if message[n] == 0:
                break
            ctx.comm.Reduce(_gram_times(local, message[:n], scale), None)
    failure = ctx.comm.bcast(failure)
    if failure:
        raise Failure("LinAlgError", f"truncated_svd: {failure}")
    ctx.comm.Bcast(found)
    return found


def _arpack(
    ctx: Context,
    local: Rows,
    message: Array,
    rank: int,
    scale: float,
    tol: float,
    max_iterations: int,
) -> Array:
    n, dtype = local.shape[1], local.dtype
    kept = basis_size(rank, n)
    product = np.empty(n, dtype)
    count = 0

    def multiply(x: Array) -> Array:
        nonlocal count
        count += 1
        message[:n] = x.reshape(n)
        message[n] = 1
        ctx.comm.Bcast(message)
        ctx.comm.Reduce(_gram_times(local, message[:n], scale), product)
        # The number of products is not known beforehand: one basis counts as half of the work,
        # the next as half of the rest.
        ctx.progress(1 - 0.5 ** (count / kept), f"ARPACK: {count} products")
        return product.copy()

    random = np.random.default_rng(SEED)
    start = np.asarray(random.standard_normal(n), dtype=dtype)
    operator = LinearOperator((n, n), matvec=multiply, dtype=dtype)
    _, vectors = eigsh(
        operator,
        rank,
        which="LM",
        v0=start,
        ncv=kept,
        tol=tol,
        maxiter=max_iterations or None,
        rng=random,
    )
    # For complex matrices SciPy uses ARPACK's solver for general matrices, whose vectors of a
    # multiple value (zero, for a matrix of low rank) are not orthogonal.
    orthonormal, _ = scipy.linalg.qr(vectors, mode="economic", check_finite=False)
    return np.asarray(orthonormal)


def _gram_times(local: Rows, x: Array, scale: float) -> Array:
    """This rank's part of ``X^H X x / scale^2``, in one pass over its rows."""
    if issparse(local):
        return np.asarray((local.T @ ((local @ x) / scale).conj()).conj() / scale)
    result = np.zeros_like(x)
    rows = max(64, CHUNK // max(1, local.shape[1] * local.itemsize))
    for some in panels(local.shape[0], rows):
        part = local[some]
        y = (part @ x) / scale
        result += (y.conj() @ part).conj()  # not part.conj().T: that copies
    return result / scale


CHOLESKY_BELOW = 100.0  # weights c for which Cholesky is stable (Nakatsukasa, Higham 2013)


@routine("Q", "P")
def polar(ctx: Context, A: DistMatrix) -> tuple[DistMatrix, DistMatrix]:
    """Polar decomposition A = Q P.

    Parameters
    ----------
    A : matrix, shape (m, n)
        Best in VC_STAR. Integers are promoted to float64.

    Returns
    -------
    Q : matrix, shape (m, n), VC_STAR
        Orthonormal columns (rows if m < n): the nearest such matrix to A. If A does not have full
        rank, its columns are orthonormal only in the range of A.
    P : matrix, shape (n, n), VC_STAR
        Hermitian positive semidefinite.

    Raises
    ------
    LinAlgError
        If A contains NaN or infinity, or its norm is too large for its dtype.

    Notes
    -----
    QDWH, with s = min(m, n): QR, and if m and n differ the decomposition of its R; then up to three
    iterations of ``9 s^3 / ranks`` flops and as many of ``3 s^3 / ranks``; ``2 m n s / ranks`` for
    P. A rank receives some ``3 s^2`` words in an iteration, and holds its share of 5 matrices.
    Sources: see ali/linalg/singular.py.

    Error: 10 eps, |A - Q P| / |A| and |Q^H Q - I|. Peak memory: 2.0 times arguments and results.
    """
    dtype = float_dtype(A.dtype)
    wide = A.shape[0] < A.shape[1]
    A = copy_to_rows(ctx, A, dtype)
    Q = unitary_factor(ctx, "polar", adjoint_in_rows(ctx, A) if wide else A)
    if wide:
        Q = adjoint_in_rows(ctx, Q)
    return Q, hermitian_factor(ctx, Q, A)


def hermitian_factor(ctx: Context, Q: DistMatrix, A: DistMatrix) -> DistMatrix:
    """The Hermitian part of Q^H A, both in VC_STAR. Collective."""
    P = inner(ctx, block(Q).conj().T, block(A))
    mirror = adjoint_in_rows(ctx, P)
    local = block(P)
    local += block(mirror)
    local *= 0.5
    return P


def unitary_factor(ctx: Context, name: str, A: DistMatrix) -> DistMatrix:
    """The nearest matrix to A with orthonormal columns; m >= n, VC_STAR, floating. Collective."""
    scale = finite_norm(ctx, name, A)
    m, n = A.shape
    if scale == 0:
        return ctx.new_replicated(np.eye(m, n, dtype=A.dtype), "VC_STAR")
    if m > n:
        Q, R = qr_factorization.thin_qr(ctx, A)
        return product(ctx, Q, unitary_factor(ctx, name, R), "rows")
    X = ctx.empty_like(A)
    np.divide(block(A), A.dtype.type(scale), out=block(X))
    eps = float(np.finfo(A.dtype).eps)
    R = copy_to_rows(ctx, X, X.dtype)
    qr_factorization.factor(ctx, R)
    least = max(eps, qr_factorization.least_singular(ctx, R))
    del R
    step = 0
    while abs(1 - least) > 10 * eps:
        a, b, c = _weights(least)
        if c > CHOLESKY_BELOW:
            _by_qr(ctx, X, a, b, c)
        else:
            X = _by_cholesky(ctx, X, a, b, c)
        least = min(1.0, least * (a + b * least**2) / (1 + c * least**2))
        step += 1
        ctx.progress(1 - 0.6**step, f"{name}: QDWH iteration {step}")
    return X


def _weights(least: float) -> tuple[float, float, float]:
    """Of ``x (a + b x^2) / (1 + c x^2)``, which brings values in [least, 1] the closest to 1."""
    square = least * least
    d = (4 * (1 - square) / square**2) ** (1 / 3)
    root = math.sqrt(1 + d)
    a = root + 0.5 * math.sqrt(8 - 4 * d + 8 * (2 - square) / (square * root))
    b = (a - 1) ** 2 / 4
    return a, b, a + b - 1


def _by_qr(ctx: Context, X: DistMatrix, a: float, b: float, c: float) -> None:
    """``X = b/c X + (a - b/c)/sqrt(c) Q1 Q2^H`` with ``[sqrt(c) X; I] = [Q1; Q2] R``."""
    n, x = X.shape[0], block(X)
    count = len(x)
    stack = ctx.zeros((2 * n, n), X.dtype)
    s = block(stack)
    np.multiply(x, X.dtype.type(c**0.5), out=s[:count])
    below = np.asarray(stack.rows, np.int64)[count:] - n  # int64 also without rows
    s[range(count, len(s)), below] = 1
    qr_factorization.form_q(ctx, stack, qr_factorization.factor(ctx, stack, identity_from=n))
    x *= X.dtype.type(b / c)
    s[:count] *= X.dtype.type((a - b / c) / c**0.5)
    for some in panels(n, panel_width(n, X.dtype.itemsize)):
        mine = slice(*(rows_before(n + i, ctx.rank, ctx.size) for i in (some.start, some.stop)))
        right = gather_rows(ctx, s[mine], n + some.start, n + some.stop)
        x[:, some] += s[:count] @ right.conj().T


def _by_cholesky(ctx: Context, X: DistMatrix, a: float, b: float, c: float) -> DistMatrix:
    """``b/c X + (a - b/c) (I + c X X^H)^-1 X``, in a new matrix; X is overwritten."""
    n, x = X.shape[0], block(X)
    Z = ctx.empty_like(X)
    z = block(Z)
    for some in panels(n, min(1024, panel_width(n, X.dtype.itemsize))):
        ctx.check()
        at = rows_before(some.start, ctx.rank, ctx.size)  # the lower triangle suffices
        mine = slice(at, rows_before(some.stop, ctx.rank, ctx.size))
        right = gather_rows(ctx, x[mine], some.start, some.stop)
        z[at:, some] = X.dtype.type(c) * (x[at:] @ right.conj().T)
    z[range(len(X.rows)), X.rows] += 1
    cholesky_in_place(ctx, Z)
    Y = copy_to_rows(ctx, X, X.dtype)
    triangular_solve(ctx, Z, Y, lower=True)
    triangular_solve(ctx, Z, Y, lower=True, adjoint=True)
    block(Y)[...] *= X.dtype.type(a - b / c)
    x *= X.dtype.type(b / c)
    block(Y)[...] += x
    return Y


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
