"""Linear algebra on a gang, in NumPy, SciPy and MPI alone.

Every routine takes matrices in any layout and says in which layout its results
come. Factors with many rows come in VC_STAR, whole rows dealt to the ranks.
"""

from __future__ import annotations

import math

import numpy as np

from ali import gemm
from ali.blocks import CHUNK, Array, block, floating, frobenius, panels, require
from ali.interface import Context, routine
from ali.krylov import basis_size, right_vectors
from ali.tsqr import TallQR
from mpi_workers import tiles
from mpi_workers.matrix import DistMatrix


@routine("C")
def matmul(ctx: Context, A: DistMatrix, B: DistMatrix) -> DistMatrix:
    """Matrix product C = A B.

    Parameters
    ----------
    A : matrix, shape (m, k)
    B : matrix, shape (k, n)
        Any dtypes; C has the dtype that NumPy would give it (integers stay
        integers and wrap around).

    Returns
    -------
    C : matrix, shape (m, n)
        In VC_STAR, STAR_VC or MC_MR: where the fewest words had to move. From A and B in
        VC_STAR it is VC_STAR for a tall A and a small B, and for square ones on up to 5 ranks.

    Raises
    ------
    ShapeError
        If A's columns and B's rows differ in number.

    Notes
    -----
    ``2 m n k / ranks`` flops. A rank receives the least of ``k n``, ``m k``, ``m n``
    (one operand, or partial results, between all ranks) and ``m k / height + k n / width``
    (SUMMA on the grid) words. Memory beyond the matrices: three panels of 32 MiB, and a
    copy of an operand whose layout does not fit. Sources: see ali/gemm.py.
    """
    require(
        A.shape[1] == B.shape[0],
        "ShapeError",
        f"matmul: A is {_size(A)} and B is {_size(B)}; A must have as many columns as B has rows",
    )
    return gemm.product(ctx, A, B)


@routine("G")
def gram(ctx: Context, A: DistMatrix) -> DistMatrix:
    """Gram matrix G = A^H A.

    Parameters
    ----------
    A : matrix, shape (m, n)
        Best with whole rows on a rank (VC_STAR, VR_STAR).

    Returns
    -------
    G : matrix, shape (n, n), dtype of A, VC_STAR
        Hermitian.

    Notes
    -----
    ``2 m n^2 / ranks`` flops (half of it for a real A with n up to 2048), ``n^2`` words received,
    and two panels of 32 MiB of memory; for a complex A its conjugate as well.
    """
    if A.layout != "VR_STAR":  # rows dealt in another order: the sum is the same
        A = ctx.to_layout(A, "VC_STAR")
    local = block(A)
    return gemm.inner(ctx, local.conj().T if local.dtype.kind == "c" else local.T, local)


@routine("S", "U", "V")
def truncated_svd(
    ctx: Context, A: DistMatrix, rank: int, tol: float = 0.0, max_iterations: int = 0
) -> tuple[DistMatrix, DistMatrix, DistMatrix]:
    """Leading singular values and vectors: A is nearly U diag(S) V^H.

    Parameters
    ----------
    A : matrix, shape (m, n)
        Best in VC_STAR where tall, in STAR_VC where wide: no copy is made then.
        Integers are promoted to float64.
    rank : int
        How many, 1 to min(m, n).
    tol : float
        Relative accuracy that ARPACK asks of the eigenvalues of the Gram matrix; 0 is
        machine precision.
    max_iterations : int
        Restarts of ARPACK at most; 0 is ten times min(m, n).

    Returns
    -------
    S : matrix, shape (rank, 1), real, STAR_STAR
        Descending.
    U : matrix, shape (m, rank), VC_STAR
    V : matrix, shape (n, rank), VC_STAR
        Orthonormal columns, also where A has a smaller rank than asked for.

    Raises
    ------
    BadArgumentError
        If rank, tol or max_iterations is out of range.
    RoutineError
        If A holds NaN or inf, or ARPACK does not converge.

    Notes
    -----
    ARPACK on the Gram matrix of the smaller side, which is not formed; then a thin QR and
    a small SVD of the product of A with the vectors found, so that U is orthonormal and
    the values are accurate to rounding times the largest. Where ARPACK would keep as many vectors
    as there are (``max(2 rank + 1, 20) >= min(m, n)``) the SVD is dense, through TSQR.

    With s = min(m, n), l = max(m, n): ``4 m n / ranks`` flops and two messages of s words a
    product, some 2 to 10 products per value; then ``6 l rank^2 / ranks`` flops. Memory per
    rank: ``s rank`` (``s max(2 rank, 20)`` on rank 0) and two times ``l rank / ranks``.
    Dense: ``6 l s^2 / ranks + 20 s^3`` flops, ``l s / ranks + s^2`` memory.

    Sources: Gittens et al. 2018 (Alchemist); Lehoucq, Sorensen, Yang 1998 (ARPACK);
    Demmel et al. 2012 (TSQR).
    """
    (m, n), smaller = A.shape, min(A.shape)
    require(
        1 <= rank <= smaller,
        "BadArgumentError",
        f"truncated_svd: rank={rank}, and a {_size(A)} matrix has 1 to {smaller} singular values",
    )
    require(tol >= 0, "BadArgumentError", f"truncated_svd: tol={tol} is not >= 0")
    require(
        max_iterations >= 0,
        "BadArgumentError",
        f"truncated_svd: max_iterations={max_iterations} is negative",
    )
    wide = m < n
    A = ctx.to_layout(A, "STAR_VC" if wide else "VC_STAR")
    tall = floating(block(A).T if wide else block(A))  # rows of X = A, or of X = A^T
    scale = frobenius(ctx, A)
    require(
        math.isfinite(scale) and scale <= float(np.finfo(tall.dtype).max),
        "RoutineError",
        f"truncated_svd: A holds NaN or inf, or is too large (its norm is {scale})",
    )
    basis: Array | None = None
    if scale == 0.0:
        basis = np.eye(smaller, rank, dtype=tall.dtype)  # any vectors are as good
    elif basis_size(rank, smaller) < smaller:
        basis = right_vectors(ctx, tall, rank, scale, tol, max_iterations)
    S, left, right = _project(ctx, tall, basis, rank)
    if wide:  # A^T = X = left S right^H, so A = conj(right) S conj(left)^H
        left, right = right.conj(), left.conj()
    U, V = ctx.new_from_rows(left, m), ctx.new_from_rows(right, n)
    ctx.progress(1.0, "done")
    return ctx.new_replicated(S), U, V


def _project(
    ctx: Context, tall: Array, basis: Array | None, rank: int
) -> tuple[Array, Array, Array]:
    """SVD of X restricted to a basis (None: all of it): S, and this rank's rows of U and of V."""
    factors = TallQR(ctx.comm, tall if basis is None else tall @ basis)
    columns = tall.shape[1] if basis is None else basis.shape[1]
    left: Array | None = None
    S = np.empty(rank, np.zeros(0, tall.dtype).real.dtype)
    right_h = np.empty((rank, columns), tall.dtype)
    if factors.r is not None:
        u, s, vh = np.linalg.svd(factors.r)
        left, S[...], right_h[...] = u[:, :rank], s[:rank], vh[:rank]
    ctx.comm.Bcast(S)
    ctx.comm.Bcast(right_h)
    U = factors.times(left, rank, tall.dtype)
    mine = slice(ctx.rank, None, ctx.size)
    V = right_h.conj().T[mine] if basis is None else basis[mine] @ right_h.conj().T
    return S, U, V


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
        rest = gemm.inner(ctx, own.conj().T, local[:, k:])
        R, left = ctx.empty((k, n), local.dtype), R
        block(R)[:, :k] = block(left)
        block(R)[:, k:] = block(rest)
    return Q, R


@routine("norm")
def norm(ctx: Context, A: DistMatrix) -> float:
    """Frobenius norm, without overflow or underflow on the way.

    Parameters
    ----------
    A : matrix, shape (m, n)
        Any dtype and layout. NaN gives nan, else inf gives inf.

    Notes
    -----
    One pass over A in pieces of 1 MiB, in float64; two words from each rank. Source: LAPACK's
    lassq.
    """
    return frobenius(ctx, A)


@routine("B")
def transpose(ctx: Context, A: DistMatrix) -> DistMatrix:
    """Transpose B = A^T (not conjugated).

    Parameters
    ----------
    A : matrix, shape (m, n)

    Returns
    -------
    B : matrix, shape (n, m), dtype of A
        In the mirrored layout (VC_STAR gives STAR_VC, MC_MR gives MR_MC): every
        rank transposes what it holds, and nothing is communicated.
    """
    rows, cols = A.layout.split("_")
    B = ctx.empty((A.shape[1], A.shape[0]), A.dtype, f"{cols}_{rows}")
    if A.local.size:
        tiles.copy(B.local, A.local.T)
    return B


@routine("A")
def random_normal(ctx: Context, m: int, n: int, seed: int) -> DistMatrix:
    """Matrix of independent standard normal numbers.

    Parameters
    ----------
    m, n : int
        Its shape.
    seed : int
        The same seed and n give the same rows, whatever m and the number of ranks.

    Returns
    -------
    A : matrix, shape (m, n), float64, VC_STAR

    Raises
    ------
    ShapeError
        If m or n is below 1.

    Notes
    -----
    A Philox stream for each row, keyed by the seed and counted from the row's index; no
    communication. About 4 microseconds a row and 20 nanoseconds an element. Source: Salmon et al.,
    "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
    """
    require(m >= 1 and n >= 1, "ShapeError", f"random_normal: {m} x {n} is not a shape")
    A = ctx.empty((m, n), np.float64)
    bits = np.random.Philox(key=seed % (1 << 64))
    generator, state = np.random.Generator(bits), bits.state
    some = np.empty((max(1, CHUNK // (8 * n)), n))
    for part in panels(len(A.rows), some.shape[0]):
        rows = A.rows[part]
        for row, values in zip(rows, some, strict=False):
            state["state"]["counter"][2] = row
            bits.state = state
            generator.standard_normal(out=values)
        tiles.copy(A.local[part], some[: len(rows)])
    return A


def _size(matrix: DistMatrix) -> str:
    return f"{matrix.shape[0]} x {matrix.shape[1]}"
