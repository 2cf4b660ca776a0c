"""Sparse matrices by rows: products with dense matrices, truncated SVD, conjugate gradients.

A sparse matrix is three ordinary matrices in VC_STAR with one row for each rank: the elements,
their columns, and the starts of the rows, as in SciPy's CSR format, padded to the longest; the last
three columns of the starts have the number of columns and elements of the sparse matrix, and the
rank's number of rows. Rank r of p has the rows r, r + p, r + 2 p, ... of the sparse matrix, as in
VC_STAR. On a gang that was resized since it was sent, p is the number of ranks at that time
(`ali.sparse`).

"Error" and "Peak memory" of docstrings are those of `ali.linalg`, measured for 2000 x 60 (errors)
and 100000 x 120 elements (memory), a fifth of which are not zero.
"""

from __future__ import annotations

from weakref import WeakKeyDictionary

import numpy as np
from scipy.sparse import csr_array

from ali.arrays.exchanges import exchange_pieces
from ali.blocks import CHUNK, Array, block, panels, require, shape_text
from ali.interface import Context, routine
from ali.linalg.collectives import sum_over_ranks
from ali.linalg.iterative import checked_tol, search
from ali.linalg.singular import basis_size, right_vectors, svd
from ali.linalg.triangular import gather_rows
from mpi_workers.matrix.dist_matrix import DistMatrix

PURE = True  # no routine has other effects than its results; rows that are kept only save time
FACTS = 3  # columns at the end of the starts

Parts = tuple[DistMatrix, DistMatrix, DistMatrix]


def dealt_out(ctx: Context, data: DistMatrix, indices: DistMatrix, starts: DistMatrix) -> Parts:
    """A sparse matrix with one row of its three matrices for each rank there is now. Collective.

    After a resize the rows are dealt out once, in the first call; the result is kept until the
    matrix is freed.

    Notes
    -----
    Each element crosses the network at most once, with its row and column. Memory: the matrix once
    more, and three copies of it meanwhile.
    """
    if data.shape[0] == ctx.size:
        return data, indices, starts
    kept: WeakKeyDictionary[object, Parts] = ctx.state.setdefault("dealt", WeakKeyDictionary())
    # Not by one rank alone: a call that failed may have ended on some ranks only.
    if not all(ctx.comm.allgather(data.block in kept)):
        kept[data.block] = _dealt_out(ctx, data, indices, starts)
    return kept[data.block]


def _dealt_out(ctx: Context, data: DistMatrix, indices: DistMatrix, starts: DistMatrix) -> Parts:
    before = data.shape[0]
    rows, used = [np.empty(0, np.int64)], []
    for part, ends in enumerate(starts.local):
        own = ends[: ends[-1] + 1]
        used.append(int(own[-1]))
        old_rank = data.rows[part]
        rows.append(np.repeat(old_rank + before * np.arange(len(own) - 1), np.diff(own)))
    row = np.concatenate(rows)
    order = np.argsort(row % ctx.size, kind="stable")
    counts = np.bincount(row % ctx.size, minlength=ctx.size)

    def exchanged(whole: Array) -> Array:
        return exchange_pieces(ctx, whole[order], counts)[0]

    def used_of(matrix: DistMatrix) -> Array:
        own = [line[:count] for line, count in zip(matrix.local, used, strict=True)]
        return np.concatenate(own) if own else np.empty(0, matrix.dtype)

    row = exchanged(row) // ctx.size
    elements, columns = exchanged(used_of(data)), exchanged(used_of(indices))
    order = np.argsort(row, kind="stable")
    m = int(ctx.comm.allreduce(sum(int(ends[-1]) for ends in starts.local)))
    mine, most = len(range(ctx.rank, m, ctx.size)), -(-m // ctx.size)
    longest = max(1, *ctx.comm.allgather(len(row)))
    made = [ctx.zeros((ctx.size, longest), matrix.dtype) for matrix in (data, indices)]
    ends = ctx.zeros((ctx.size, most + 1 + FACTS), starts.dtype)
    for matrix, values in zip(made, (elements, columns), strict=True):
        matrix.local[0, : len(row)] = values[order]
    ends.local[0, 1 : mine + 1] = np.cumsum(np.bincount(row, minlength=mine)[:mine])
    ends.local[0, -1] = mine
    return made[0], made[1], ends


__all__ = ["conjugate_gradient", "matmul", "transposed_matmul", "truncated_svd"]


@routine("C")
def matmul(
    ctx: Context, data: DistMatrix, indices: DistMatrix, starts: DistMatrix, n: int, X: DistMatrix
) -> DistMatrix:
    """C = A X for a sparse A.

    Parameters
    ----------
    data, indices, starts : matrices
        A, shape (m, n), as the module describes; indices are int32 or int64.
    n : int
        Columns of A.
    X : matrix, shape (n, k) or (n,)
        Any layout; every rank receives all of it.

    Returns
    -------
    C : matrix, shape (m, k) or (m,), VC_STAR

    Raises
    ------
    ShapeError
        If X does not have n rows.

    Notes
    -----
    ``2 k nnz / ranks`` flops, ``n k`` words received and held by each rank.

    Error: 2 eps, relative to the largest element. Peak memory: 1.1 times arguments and results.
    """
    A, m = _rows(ctx, data, indices, starts, n)
    _require_rows("A @ X", X, n)
    whole = ctx.to_layout(X, "STAR_STAR")
    return ctx.new_from_rows(np.asarray(A @ whole.local), m).with_ndim(X.ndim)


@routine("C")
def transposed_matmul(
    ctx: Context, data: DistMatrix, indices: DistMatrix, starts: DistMatrix, n: int, X: DistMatrix
) -> DistMatrix:
    """C = A^T X for a sparse A.

    Parameters
    ----------
    data, indices, starts, n
        A, as in `matmul`.
    X : matrix, shape (m, k) or (m,)
        Best in VC_STAR.

    Returns
    -------
    C : matrix, shape (n, k) or (n,), VC_STAR

    Raises
    ------
    ShapeError
        If X does not have m rows.

    Notes
    -----
    ``2 k nnz / ranks`` flops; ranks add ``n k`` words, which each of them holds.

    Error: 8 eps, relative to the largest element. Peak memory: 1.1 times arguments and results.
    """
    A, m = _rows(ctx, data, indices, starts, n)
    _require_rows("A.T @ X", X, m)
    mine = block(ctx.to_layout(X, "VC_STAR"))
    total = sum_over_ranks(ctx.comm, np.asarray(A.T @ mine))
    return ctx.new_replicated(total, "VC_STAR").with_ndim(X.ndim)


@routine("S", "U", "V", vectors=("S",))
def truncated_svd(
    ctx: Context,
    data: DistMatrix,
    indices: DistMatrix,
    starts: DistMatrix,
    n: int,
    rank: int,
    tol: float = 0.0,
    max_iterations: int = 0,
) -> tuple[DistMatrix, DistMatrix, DistMatrix]:
    """Leading singular values and vectors of a sparse A: A is approximately U diag(S) V^H.

    Parameters
    ----------
    data, indices, starts, n
        A, shape (m, n), as in `matmul`.
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
        If A contains NaN or infinity, or ARPACK does not converge.

    Notes
    -----
    ARPACK on the Gram matrix, which is never formed: ``4 nnz / ranks`` flops and two messages of n
    words for each product. Singular values below the square root of the machine epsilon times the
    largest are noise. Source: see ali/linalg/singular.py.

    Error: 2 eps, of S, relative to the largest singular value. Peak memory: 1.4 times arguments and
    results.
    """
    A, m = _rows(ctx, data, indices, starts, n)
    require(
        1 <= rank <= min(m, n) and basis_size(rank, n) < n,
        "BadArgumentError",
        f"truncated_svd: rank={rank} of a sparse {m} x {n} matrix: ARPACK's basis needs "
        f"{max(2 * rank + 1, 20)} vectors, fewer than the columns; send the matrix as a dense one",
    )
    wide = (A.data[part].astype(complex) for part in panels(A.data.size, CHUNK // 16))
    squares = np.array([sum(float(np.vdot(x, x).real) for x in wide)])
    scale = float(np.sqrt(sum_over_ranks(ctx.comm, squares)[0]))
    require(np.isfinite(scale), "LinAlgError", "truncated_svd: A contains NaN or infinity")
    V = right_vectors(ctx, A, rank, scale or 1.0, tol, max_iterations)
    S, U, W = svd(ctx, ctx.new_from_rows(np.asarray(A @ V), m))
    turned = V @ ctx.to_layout(W, "STAR_STAR").local
    return S, U, ctx.new_replicated(np.ascontiguousarray(turned), "VC_STAR")


@routine("X", "iterations", "residual", like={"X": "B"})
def conjugate_gradient(
    ctx: Context,
    data: DistMatrix,
    indices: DistMatrix,
    starts: DistMatrix,
    n: int,
    B: DistMatrix,
    tol: float = -1.0,
    max_iterations: int = 0,
) -> tuple[DistMatrix, int, float]:
    """Solve A X = B for a Hermitian positive definite sparse A.

    Parameters
    ----------
    data, indices, starts, n
        A, shape (n, n), as in `matmul`.
    B : matrix, shape (n, r) or (n,)
    tol : float
        Largest relative residual of a column, computed from X. Negative: 1e-8, or 1e-5 in single
        precision.
    max_iterations : int
        0 is 10 n.

    Returns
    -------
    X : matrix, shape (n, r) or (n,), VC_STAR
    iterations : int
    residual : float

    Raises
    ------
    ShapeError
        If A is not square, or B does not have n rows.
    LinAlgError
        If A is not positive definite, or the iteration does not converge.

    Notes
    -----
    An iteration costs ``2 r nnz / ranks`` flops and ``n r`` words, which each rank holds. Source:
    see ali/linalg/iterative.py.

    Error: 1 tol, the largest |A X - B| / |B| of a column. Peak memory: 5.2 times arguments and
    results, for three elements in a row and three columns in B.
    """
    A, m = _rows(ctx, data, indices, starts, n)
    require(m == n, "ShapeError", f"conjugate_gradient: A is {m} x {n}; it must be square")
    _require_rows("conjugate_gradient", B, n)
    dtype = np.result_type(A.dtype, B.dtype, np.float32)
    tol = checked_tol("conjugate_gradient", tol, dtype, max_iterations)
    right = block(ctx.to_layout(B, "VC_STAR")).astype(dtype)

    def times(mine: Array) -> Array:
        return np.asarray(A @ gather_rows(ctx, mine, 0, n)).astype(dtype, copy=False)

    X, count, residual = search(
        ctx, "conjugate_gradient", times, right, tol, max_iterations or 10 * n
    )
    return ctx.new_from_rows(X, n), count, residual


def _rows(
    ctx: Context, data: DistMatrix, indices: DistMatrix, starts: DistMatrix, n: int
) -> tuple[csr_array, int]:
    """This rank's rows of A, without a copy, and the number of all rows."""
    data, indices, starts = dealt_out(ctx, data, indices, starts)
    ends = starts.local[0]
    mine = int(ends[-1])
    used = int(ends[mine])
    # SciPy would convert both to the wider one of two integer types.
    starts_here = ends[: mine + 1].astype(indices.dtype, copy=False)
    parts = (_alone(data.local[0, :used]), _alone(indices.local[0, :used]), starts_here)
    local = csr_array(parts, shape=(mine, n))
    m = int(ctx.comm.allreduce(mine))
    return local, m


def _alone(part: Array) -> Array:
    """A view whose base is no larger than itself; SciPy copies views of much larger arrays."""
    return np.frombuffer(part.data, part.dtype)[:] if part.size else part


def _require_rows(name: str, X: DistMatrix, rows: int) -> None:
    require(
        X.shape[0] == rows and X.ndim > 0,
        "ShapeError",
        f"{name}: X is {shape_text(X)}; it must have {rows} rows",
    )
