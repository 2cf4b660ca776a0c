"""Products of sparse matrices, with dense and with sparse ones."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
from mpi4py import MPI
from scipy.sparse import csr_array, vstack

from ali.arrays.exchanges import IN_BLOCKS, scratch
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
        In VC_STAR:BLOCK ranks receive the rows that their columns of A need; of another layout
        every rank receives all of it.

    Returns
    -------
    C : matrix, shape (m, k) or (m,), VC_STAR:BLOCK

    Raises
    ------
    ShapeError
        If X does not have n rows.

    Notes
    -----
    ``2 k nnz / ranks`` flops, up to ``n k`` words received and held by each rank. Which rows are
    needed is found in the first product with A.

    Error: 2 eps, relative to the largest element. Peak memory: 1.1 times arguments and results.
    """
    require_rows("A @ X", X, A.shape[1])
    if X.layout == IN_BLOCKS:
        whole = needed_rows(ctx, A)(ctx, block(X))
    else:
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


class NeededRows:
    """Which rows of a matrix in VC_STAR:BLOCK ranks exchange, so that each can multiply by A.

    Called with this rank's rows, it gives an array of all rows, of which only those are set that
    the columns of this rank's part of A need. Collective.
    """

    def __init__(self, ctx: Context, A: SparseMatrix) -> None:
        self.length = A.shape[1]
        height = max(1, -(-self.length // ctx.size))
        edges = np.minimum(self.length, height * np.arange(ctx.size + 1))
        self.own = slice(*edges[ctx.rank : ctx.rank + 2].tolist())
        needed = np.zeros(self.length, np.bool_)
        needed[A.local.indices] = True
        needed[self.own] = False
        self.received = np.flatnonzero(needed)
        self.counts = np.diff(np.searchsorted(self.received, edges))
        self.asked = np.empty_like(self.counts)
        ctx.comm.Alltoall(self.counts, self.asked)
        self.sent = np.empty(int(self.asked.sum()), np.int64)
        ctx.comm.Alltoallv([self.received, self.counts], [self.sent, self.asked])
        self.sent -= self.own.start

    def __call__(self, ctx: Context, mine: Array) -> Array:
        shape = self.length, mine.shape[1]
        whole = scratch(ctx, self.length * mine.shape[1], mine.dtype).reshape(shape)
        whole[self.own] = mine
        if ctx.size > 1 and mine.shape[1]:
            row = MPI.BYTE.Create_contiguous(mine.itemsize * mine.shape[1]).Commit()
            found = np.empty((len(self.received), mine.shape[1]), mine.dtype)
            asked = np.ascontiguousarray(mine[self.sent])
            ctx.comm.Alltoallv([asked, self.asked, row], [found, self.counts, row])
            row.Free()
            whole[self.received] = found
        return whole


_needed: WeakKeyDictionary[object, NeededRows] = WeakKeyDictionary()  # by the memory of A


def needed_rows(ctx: Context, A: SparseMatrix) -> NeededRows:
    """Those of A; made once. Collective."""
    found = _needed.get(A.packed.block)
    # Not by one rank alone: a call that failed may have ended on some ranks only.
    if found is None or ctx.size > 1:
        there = np.array([found is not None], np.int8)
        ctx.comm.Allreduce(MPI.IN_PLACE, there, MPI.MIN)
        if not there[0]:
            found = _needed[A.packed.block] = NeededRows(ctx, A)
    assert found is not None
    return found


def in_blocks(ctx: Context, local: Any, m: int) -> DistMatrix:
    """A matrix in VC_STAR:BLOCK of each rank's rows."""
    local = local[:, None] if local.ndim == 1 else local
    made = ctx.empty((m, local.shape[1]), local.dtype, IN_BLOCKS)
    block(made)[...] = local
    return made


def require_rows(name: str, X: DistMatrix, rows: int) -> None:
    require(
        X.shape[0] == rows and X.ndim > 0,
        "ShapeError",
        f"{name}: X is {shape_text(X)}; it must have {rows} rows",
    )
