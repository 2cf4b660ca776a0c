"""Products of sparse matrices, with dense and with sparse ones."""

from __future__ import annotations

from typing import Any

import numpy as np
from scipy.sparse import csr_array, vstack

from ali.arrays.exchanges import IN_BLOCKS, gathered
from ali.blocks import Array, block, require, shape_text
from ali.interface import Context, routine
from ali.linalg.collectives import sum_over_ranks
from mpi_workers.matrix.dist_matrix import DistMatrix
from mpi_workers.matrix.sparse_matrix import SparseMatrix


@routine("C")
def matmul(ctx: Context, A: SparseMatrix, X: DistMatrix) -> DistMatrix:
    """C = A X for a sparse A.

    Parameters
    ----------
    A : sparse matrix, shape (m, n)
    X : matrix, shape (n, k) or (n,)
        Any layout; every rank receives all of it.

    Returns
    -------
    C : matrix, shape (m, k) or (m,), VC_STAR:BLOCK

    Raises
    ------
    ShapeError
        If X does not have n rows.

    Notes
    -----
    ``2 k nnz / ranks`` flops, ``n k`` words received and held by each rank.

    Error: 2 eps, relative to the largest element. Peak memory: 1.1 times arguments and results.
    """
    require_rows("A @ X", X, A.shape[1])
    whole = block(ctx.to_layout(X, "STAR_STAR"))
    return in_blocks(ctx, np.asarray(A.local @ whole), A.shape[0]).with_ndim(X.ndim)


@routine("C")
def transposed_matmul(ctx: Context, A: SparseMatrix, X: DistMatrix) -> DistMatrix:
    """C = A^T X for a sparse A.

    Parameters
    ----------
    A : sparse matrix, shape (m, n)
    X : matrix, shape (m, k) or (m,)
        Best in VC_STAR:BLOCK.

    Returns
    -------
    C : matrix, shape (n, k) or (n,), VC_STAR:BLOCK

    Raises
    ------
    ShapeError
        If X does not have m rows.

    Notes
    -----
    ``2 k nnz / ranks`` flops; ranks add ``n k`` words, which each of them holds.

    Error: 8 eps, relative to the largest element. Peak memory: 1.3 times arguments and results.
    """
    require_rows("A.T @ X", X, A.shape[0])
    mine = block(ctx.to_layout(X, IN_BLOCKS))
    total = sum_over_ranks(ctx.comm, np.asarray(A.local.T @ mine))
    return ctx.new_replicated(total, IN_BLOCKS).with_ndim(X.ndim)


@routine("C")
def multiply(ctx: Context, A: SparseMatrix, B: SparseMatrix) -> SparseMatrix:
    """C = A B, all sparse.

    Parameters
    ----------
    A : sparse matrix, shape (m, n)
    B : sparse matrix, shape (n, k)

    Returns
    -------
    C : sparse matrix, shape (m, k)

    Raises
    ------
    ShapeError
        If B does not have n rows.

    Notes
    -----
    Every rank receives those rows of B that its columns of A need: of all ranks, one after another.

    Error: 2 eps, relative to the largest element. Peak memory: 3.1 times arguments and results.
    """
    require(
        A.shape[1] == B.shape[0],
        "ShapeError",
        f"A @ B: A is {A.shape[0]} x {A.shape[1]}, and B {B.shape[0]} x {B.shape[1]}",
    )
    needed = np.unique(A.local.indices)
    rows = fetched_rows(ctx, B, needed)
    place = np.searchsorted(needed, A.local.indices)
    left = csr_array((A.local.data, place, A.local.indptr), shape=(len(A.rows), len(needed)))
    return ctx.new_sparse(left @ rows, A.shape[0])


def fetched_rows(ctx: Context, B: SparseMatrix, rows: Array) -> csr_array:
    """Some rows of a sparse matrix, which may be on any rank; in the order asked for. Collective.

    Notes
    -----
    Each rank sends the rows that others ask for, as triplets would be: 8 bytes for a column.
    """
    owner = rows // B.form.height
    order = np.argsort(owner, kind="stable")
    asked = [rows[order][owner[order] == rank] for rank in range(ctx.size)]
    wanted = ctx.comm.alltoall(asked)
    found = ctx.comm.alltoall([B.local[mine - B.rows.start] for mine in wanted])
    joined = vstack(found, format="csr")
    return joined[np.argsort(order, kind="stable")] if len(rows) else joined


def in_blocks(ctx: Context, local: Any, m: int) -> DistMatrix:
    """A matrix in VC_STAR:BLOCK of each rank's rows."""
    local = local[:, None] if local.ndim == 1 else local
    made = ctx.empty((m, local.shape[1]), local.dtype, IN_BLOCKS)
    block(made)[...] = local
    return made


def gather_blocks(ctx: Context, mine: Array) -> Array:
    """All rows of a matrix in VC_STAR:BLOCK, on every rank. Collective."""
    return mine if ctx.size == 1 else np.concatenate(gathered(ctx, mine))


def require_rows(name: str, X: DistMatrix, rows: int) -> None:
    require(
        X.shape[0] == rows and X.ndim > 0,
        "ShapeError",
        f"{name}: X is {shape_text(X)}; it must have {rows} rows",
    )
