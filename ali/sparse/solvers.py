"""Singular values of sparse matrices, and solvers: conjugate gradients, and one by factors.

Sources: ali/linalg/leading.py, ali/linalg/iterative.py; Saad, "Iterative Methods for Sparse Linear
Systems", 2nd ed., 12.2 (block Jacobi); Li, "An overview of SuperLU", ACM TOMS 31(3), 2005.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from scipy.sparse import csr_array, vstack
from scipy.sparse.linalg import splu

from ali.arrays.exchanges import IN_BLOCKS
from ali.blocks import Array, block, float_dtype, require, require_choice
from ali.interface import Context, routine
from ali.linalg.collectives import sum_over_ranks
from ali.linalg.iterative import checked_tol, search
from ali.linalg.leading import basis_size, right_vectors
from ali.linalg.singular import svd
from ali.sparse.elements import frobenius
from ali.sparse.products import in_blocks, needed_rows, require_rows
from mpi_workers.failures import Failure
from mpi_workers.matrix.dist_matrix import DistMatrix
from mpi_workers.matrix.sparse_matrix import SparseMatrix

BLOCK_ROWS = 4096  # of a block that is factored: more fills in, fewer need more iterations


@routine("S", "U", "V", vectors=("S",))
def truncated_svd(
    ctx: Context, A: SparseMatrix, rank: int, tol: float = 0.0, max_iterations: int = 0
) -> tuple[DistMatrix, DistMatrix, DistMatrix]:
    """Leading singular values and vectors of a sparse A: A is approximately U diag(S) V^H.

    Parameters
    ----------
    A : sparse matrix, shape (m, n)
    rank : int
        From 1 on; ARPACK's basis of ``max(2 rank + 1, 20)`` vectors must be shorter than n.
    tol, max_iterations
        As in linalg's `truncated_svd`.

    Returns
    -------
    S : vector, shape (rank,), real, STAR_STAR
    U : matrix, shape (m, rank), VC_STAR
    V : matrix, shape (n, rank), VC_STAR

    Raises
    ------
    BadArgumentError
        If the rank is out of range.
    LinAlgError
        If A contains NaN or infinity, its norm overflows, or ARPACK does not converge.

    Notes
    -----
    ARPACK on the Gram matrix, which is never formed: ``4 nnz / ranks`` flops and two messages of n
    words for each product. Singular values below the square root of the machine epsilon times the
    largest are noise. Source: see ali/linalg/leading.py.

    Error: 2 eps, of S, relative to the largest singular value. Peak memory: 1.4 times arguments and
    results.
    """
    m, n = A.shape
    require(
        1 <= rank <= min(m, n) and basis_size(rank, n) < n,
        "BadArgumentError",
        f"truncated_svd: rank={rank} of a sparse {m} x {n} matrix: ARPACK's basis needs "
        f"{max(2 * rank + 1, 20)} vectors, fewer than the columns; send the matrix as a dense one",
    )
    local = A.local if A.dtype.kind in "fc" else A.local.astype(np.float64)
    scale = frobenius(ctx, local)
    _require_finite(ctx, "truncated_svd: A contains", local.data)
    require(np.isfinite(scale), "LinAlgError", "truncated_svd: the norm of A overflows: scale it")
    if scale == 0:  # any orthonormal vectors
        V = np.eye(n, rank, dtype=local.dtype)
    else:
        V = right_vectors(ctx, local, rank, scale, tol, max_iterations)
    product = in_blocks(ctx, np.asarray(local @ V), m)
    S, U, W = svd(ctx, ctx.to_layout(product, "VC_STAR"))
    turned = V @ ctx.to_layout(W, "STAR_STAR").local
    return S, U, ctx.new_replicated(np.ascontiguousarray(turned), "VC_STAR")


@routine("X", "iterations", "residual", like={"X": "B"})
def conjugate_gradient(
    ctx: Context,
    A: SparseMatrix,
    B: DistMatrix,
    tol: float = -1.0,
    max_iterations: int = 0,
    preconditioner: str = "block_jacobi",
) -> tuple[DistMatrix, int, float]:
    """Solve A X = B for a Hermitian positive definite sparse A.

    Parameters
    ----------
    A : sparse matrix, shape (n, n)
    B : matrix, shape (n, r) or (n,)
    tol : float
        Largest relative residual of a column, computed from X. Negative: 1e-8, or 1e-5 in single
        precision.
    max_iterations : int
        0 is 10 n.
    preconditioner : {"block_jacobi", "none"}
        Factors of diagonal blocks of up to 4096 rows of each rank. For large systems the library
        `petsc` has better ones.

    Returns
    -------
    X : matrix, shape (n, r) or (n,), VC_STAR:BLOCK
    iterations : int
    residual : float

    Raises
    ------
    ShapeError
        If A is not square, or B does not have n rows.
    LinAlgError
        If A or B contains NaN or infinity, A is not positive definite, or the iteration does not
        converge.

    Notes
    -----
    An iteration costs ``2 r nnz / ranks`` flops and up to ``n r`` words, as `matmul`. Source:
    see ali/linalg/iterative.py.

    Error: 1 tol, the largest |A X - B| / |B| of a column. Peak memory: 4.8 times arguments and
    results, for three elements in a row and three columns in B.
    """
    m, n = A.shape
    require(m == n, "ShapeError", f"conjugate_gradient: A is {m} x {n}; it must be square")
    require_rows("conjugate_gradient: B", B, n)
    require_choice("conjugate_gradient", "preconditioner", preconditioner, ("block_jacobi", "none"))
    dtype = np.result_type(A.dtype, B.dtype, np.float32)
    tol = checked_tol("conjugate_gradient", tol, dtype, max_iterations)
    right = block(ctx.to_layout(B, IN_BLOCKS)).astype(dtype)

    _require_finite(ctx, "conjugate_gradient: A or B contains", A.local.data, right)
    needed = needed_rows(ctx, A)

    def times(mine: Array) -> Array:
        product = np.zeros((len(A.rows), mine.shape[1]), dtype, order="F")
        needed.add_product(ctx, A, mine, product)
        return product

    X, count, residual = search(
        ctx, "conjugate_gradient", times, right, tol, max_iterations or 10 * n,
        precondition=block_jacobi(A, dtype) if preconditioner == "block_jacobi" else None,
    )  # fmt: skip
    return in_blocks(ctx, X, n), count, residual


@routine("X", like={"X": "B"})
def solve(ctx: Context, A: SparseMatrix, B: DistMatrix) -> DistMatrix:
    """Solve A X = B by SuperLU, with pivoting, on rank 0.

    Parameters
    ----------
    A : sparse matrix, shape (n, n)
    B : matrix, shape (n, r) or (n,)

    Returns
    -------
    X : matrix, shape (n, r) or (n,), VC_STAR:BLOCK
        In the common floating dtype of A and B (float64 for integers).

    Raises
    ------
    ShapeError
        If A is not square, or B does not have n rows.
    LinAlgError
        If A is singular, or A or B contains NaN or infinity.

    Notes
    -----
    Rank 0 holds A, its factors, B and X, and the other ranks wait: for large systems
    `conjugate_gradient`, or the library `petsc`.

    Error: 1 eps, the largest |A X - B| / |B| of a column. Peak memory: 14.2 times arguments and
    results, for three elements in a row and three columns in B; factors of others fill in.
    """
    m, n = A.shape
    require(m == n, "ShapeError", f"solve: A is {m} x {n}; it must be square")
    require_rows("solve: B", B, n)
    dtype = float_dtype(A.dtype, B.dtype)
    parts = ctx.comm.gather(A.local.astype(dtype))
    right = ctx.to_layout(B, "CIRC_CIRC")
    X = ctx.zeros((n, B.shape[1]), dtype, "CIRC_CIRC")
    told = "" if parts is None else _solve_whole(parts, block(right).astype(dtype), block(X))
    told = ctx.comm.bcast(told)
    require(not told, "LinAlgError", f"solve: {told}")
    return ctx.to_layout(X, IN_BLOCKS)


def _solve_whole(parts: list[csr_array], right: Array, into: Array) -> str:
    """Solve with all rows of a matrix; returns why that cannot be, or nothing."""
    whole = vstack(parts, format="csc")
    if not (np.isfinite(whole.data).all() and np.isfinite(right).all()):
        return "the matrices contain NaN or infinity"
    if not right.size:
        return ""
    try:
        into[...] = splu(whole).solve(np.ascontiguousarray(right))
    except RuntimeError as error:
        return f"A is singular ({error})"
    return ""


def _require_finite(ctx: Context, words: str, *own: Array) -> None:
    """Raise a LinAlgError on every rank, if a part has NaN or infinity. Collective."""
    wrong = np.array([float(not all(np.isfinite(one).all() for one in own))])
    require(not sum_over_ranks(ctx.comm, wrong)[0], "LinAlgError", f"{words} NaN or infinity")


def block_jacobi(A: SparseMatrix, dtype: np.dtype[np.generic]) -> Callable[[Array], Array]:
    """Solves with diagonal blocks of this rank's rows."""
    double = np.result_type(dtype, np.float64)  # SuperLU's single precision gains nothing
    solvers = []
    for start in range(0, len(A.rows), BLOCK_ROWS):
        part = slice(start, min(start + BLOCK_ROWS, len(A.rows)))
        columns = slice(A.rows.start + part.start, A.rows.start + part.stop)
        try:
            solvers.append((part, splu(A.local[part, columns].astype(double).tocsc())))
        except RuntimeError as error:
            raise Failure(
                "LinAlgError",
                f"conjugate_gradient: A is not positive definite: its rows {columns.start} to "
                f"{columns.stop} and their columns are singular ({error})",
            ) from None

    def solve(R: Array) -> Array:
        Z = np.empty_like(R)
        for part, solver in solvers:
            Z[part] = solver.solve(np.ascontiguousarray(R[part], double))
        return Z

    return solve
