"""Products of sparse matrices, with dense and with sparse ones."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
from mpi4py import MPI
from scipy.sparse import csr_array, vstack
from scipy.sparse._sparsetools import csc_matvec, csr_matvec

from ali.arrays.exchanges import IN_BLOCKS, scratch
from ali.blocks import Array, block, require, shape_text
from ali.interface import Context, routine
from mpi_workers.matrix.dist_matrix import DistMatrix
from mpi_workers.matrix.sparse_matrix import SparseMatrix


@routine("C")
def matmul(ctx: Context, A: SparseMatrix, X: DistMatrix) -> DistMatrix:
    """C = A X for a sparse A.

    Parameters
    ----------
    A : sparse matrix, shape (m, n)
    X : matrix, shape (n, k) or (n,)
        Best in VC_STAR:BLOCK.

    Returns
    -------
    C : matrix, shape (m, k) or (m,), VC_STAR:BLOCK

    Raises
    ------
    ShapeError
        If X does not have n rows.

    Notes
    -----
    ``2 k nnz / ranks`` flops. Each rank receives the rows of X that its columns of A need, and
    holds n words. Which rows these are is found in the first product with A.

    Error: 2 eps, relative to the largest element. Peak memory: 1.1 times arguments and results.
    """
    require_rows("A @ X: X", X, A.shape[1])
    C = product_of(ctx, A.shape[0], A, X)
    mine = block(ctx.to_layout(X, IN_BLOCKS))
    needed_rows(ctx, A).add_product(ctx, A, mine, block(C))
    return C.with_ndim(X.ndim)


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
    ``2 k nnz / ranks`` flops. Each rank holds n words, and sends those of other ranks' rows that
    its columns of A contribute to.

    Error: 8 eps, relative to the largest element. Peak memory: 1.3 times arguments and results.
    """
    require_rows("A.T @ X: X", X, A.shape[0])
    C = product_of(ctx, A.shape[1], A, X)
    mine = block(ctx.to_layout(X, IN_BLOCKS))
    needed_rows(ctx, A).add_transposed(ctx, A, mine, block(C))
    return C.with_ndim(X.ndim)


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

    Products go column by column, as the columns are stored: SciPy's with several columns at once
    wants them in C order, and takes longer with the two copies. Its private functions write into
    the result; its operators would make another array, to be copied.
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

    def add_product(self, ctx: Context, A: SparseMatrix, mine: Array, into: Array) -> None:
        """``into += A X`` for this rank's rows of X and of the result. Collective."""
        found = self._exchanged(ctx, mine[self.sent], self.asked, self.counts)
        starts, columns, elements = A.arrays(ctx.rank)
        elements = elements.astype(into.dtype, copy=False)
        whole = scratch(ctx, self.length, into.dtype)
        for k in range(mine.shape[1]):
            whole[self.own] = mine[:, k]
            whole[self.received] = found[:, k]
            csr_matvec(
                len(A.rows), self.length, starts, columns, elements, whole, into[:, k]
            )  # fmt: skip

    def add_transposed(self, ctx: Context, A: SparseMatrix, mine: Array, into: Array) -> None:
        """``into += A^T X`` for this rank's rows of X and of the result. Collective."""
        starts, columns, elements = A.arrays(ctx.rank)
        elements = elements.astype(into.dtype, copy=False)
        whole = scratch(ctx, self.length, into.dtype)
        theirs = np.empty((len(self.received), mine.shape[1]), into.dtype)
        for k in range(mine.shape[1]):
            whole[self.own] = whole[self.received] = 0
            csc_matvec(
                self.length, len(A.rows), starts, columns, elements,
                mine[:, k].astype(into.dtype, copy=False), whole,
            )  # fmt: skip
            into[:, k] += whole[self.own]
            theirs[:, k] = whole[self.received]
        found = self._exchanged(ctx, theirs, self.counts, self.asked)
        ends = np.cumsum(self.asked)
        for start, end in zip(ends - self.asked, ends, strict=True):  # rows of one rank differ
            into[self.sent[start:end]] += found[start:end]

    @staticmethod
    def _exchanged(ctx: Context, rows: Array, sent: Array, received: Array) -> Array:
        """Rows from other ranks for rows of this one, both in order of the ranks."""
        found = np.empty((int(received.sum()), rows.shape[1]), rows.dtype)
        if ctx.size > 1 and rows.shape[1]:
            row = MPI.BYTE.Create_contiguous(rows.itemsize * rows.shape[1]).Commit()
            ctx.comm.Alltoallv([np.ascontiguousarray(rows), sent, row], [found, received, row])
            row.Free()
        return found


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


def product_of(ctx: Context, rows: int, A: SparseMatrix, X: DistMatrix) -> DistMatrix:
    """Zeros in VC_STAR:BLOCK, for the result of a product with these rows."""
    dtype = np.result_type(A.dtype, X.dtype)
    half = dtype == np.float16  # which SciPy's products do not have
    return ctx.zeros((rows, X.shape[1]), np.float32 if half else dtype, IN_BLOCKS)


def in_blocks(ctx: Context, local: Any, m: int) -> DistMatrix:
    """A matrix in VC_STAR:BLOCK of each rank's rows."""
    local = local[:, None] if local.ndim == 1 else local
    made = ctx.empty((m, local.shape[1]), local.dtype, IN_BLOCKS)
    block(made)[...] = local
    return made


def require_rows(what: str, X: DistMatrix, rows: int) -> None:
    """Refuse a dense matrix (`what`: of which operation, and its name) with other rows."""
    require(
        X.shape[0] == rows and X.ndim > 0,
        "ShapeError",
        f"{what} is {shape_text(X)}; it must have {rows} rows",
    )
