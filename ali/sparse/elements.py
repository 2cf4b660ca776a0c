"""Elements, rows and sums of sparse matrices."""

from __future__ import annotations

import operator
from typing import Any

import numpy as np

from ali.arrays.exchanges import IN_BLOCKS
from ali.blocks import CHUNK, panels, refuse_loss, require, require_choice
from ali.interface import Context, routine
from ali.linalg.collectives import sum_over_ranks, tree_reduce
from ali.sparse.products import fetched_rows, in_blocks
from mpi_workers.failures import Failure
from mpi_workers.matrix.dist_matrix import DistMatrix
from mpi_workers.matrix.dtypes import DTYPES, check_dtype
from mpi_workers.matrix.sparse_matrix import SparseMatrix

OPERATIONS = {"add": operator.add, "subtract": operator.sub, "multiply": operator.mul}


@routine("C")
def elementwise(ctx: Context, A: SparseMatrix, B: SparseMatrix, op: str) -> SparseMatrix:
    """C = A op B, element by element; places that are zero in both are not stored.

    Parameters
    ----------
    A, B : sparse matrix, shape (m, n)
    op : {"add", "subtract", "multiply"}

    Returns
    -------
    C : sparse matrix, shape (m, n)

    Raises
    ------
    ShapeError
        If A and B have different shapes.

    Notes
    -----
    No messages but the sizes of the parts.

    Error: 1 eps, relative to the largest element. Peak memory: 2.0 times arguments and results.
    """
    require_choice("elementwise", "op", op, OPERATIONS)
    require(
        A.shape == B.shape,
        "ShapeError",
        f"{op}: A is {A.shape[0]} x {A.shape[1]}, and B {B.shape[0]} x {B.shape[1]}",
    )
    return ctx.new_sparse(OPERATIONS[op](A.local, B.local), A.shape[0])


@routine("B")
def scale(
    ctx: Context, A: SparseMatrix, value: complex, kind: str = "complex", rest: int = 0
) -> SparseMatrix:
    """B = A * value.

    Parameters
    ----------
    A : sparse matrix, shape (m, n)
    value : complex
    kind : str
        Of the number: "int", "float", "complex" as Python's, or a dtype; that of B follows NumPy's
        rules for it.
    rest : int
        Added to an integer, which double precision has rounded.

    Returns
    -------
    B : sparse matrix, shape (m, n)

    Notes
    -----
    No messages but the sizes of the parts.

    Error: 1 eps, relative to the largest element. Peak memory: 1.6 times arguments and results.
    """
    require_choice("scale", "kind", kind, ("int", "float", "complex", *DTYPES))
    number: Any = value if kind.startswith("complex") else value.real
    if kind == "int" or (kind in DTYPES and np.dtype(kind).kind in "iu"):
        number = int(number) + rest
    if kind in DTYPES:
        number = np.dtype(kind).type(number)
    return ctx.new_sparse(A.local * number, A.shape[0])


@routine("B")
def astype(ctx: Context, A: SparseMatrix, dtype: str) -> SparseMatrix:
    """The matrix with elements of another dtype.

    Parameters
    ----------
    A : sparse matrix, shape (m, n)
    dtype : str

    Returns
    -------
    B : sparse matrix, shape (m, n)

    Raises
    ------
    DtypeError
        If the dtype cannot hold an element.

    Notes
    -----
    No messages but the sizes of the parts.

    Error: 1 eps, relative to the largest element. Peak memory: 1.6 times arguments and results.
    """
    try:
        wanted = check_dtype(dtype)
    except ValueError as error:
        raise Failure("DtypeError", str(error)) from None
    refuse_loss(ctx, A.local.data, wanted, "the sparse matrix")
    return ctx.new_sparse(A.local.astype(wanted), A.shape[0])


@routine("B")
def take_rows(ctx: Context, A: SparseMatrix, rows: DistMatrix) -> SparseMatrix:
    """Some rows, in any order, also several times.

    Parameters
    ----------
    A : sparse matrix, shape (m, n)
    rows : vector of int64, shape (k,)
        Numbers of rows; negative ones count from the end.

    Returns
    -------
    B : sparse matrix, shape (k, n)

    Raises
    ------
    BadIndexError
        If there is no such row.

    Notes
    -----
    Each row crosses the network at most once.

    Error: 0 eps. Peak memory: 3.4 times arguments and results.
    """
    m = A.shape[0]
    every = ctx.to_layout(rows, "STAR_STAR").local.reshape(-1)
    wrong = every[(every < -m) | (every >= m)]
    require(not len(wrong), "BadIndexError", f"row {wrong[:1]} is outside a matrix with {m} rows")
    mine = ctx.to_layout(rows, IN_BLOCKS).local.reshape(-1).astype(np.int64)
    return ctx.new_sparse(fetched_rows(ctx, A, np.where(mine < 0, mine + m, mine)), len(every))


@routine("B")
def transpose(ctx: Context, A: SparseMatrix) -> SparseMatrix:
    """B = A^T.

    Parameters
    ----------
    A : sparse matrix, shape (m, n)

    Returns
    -------
    B : sparse matrix, shape (n, m)

    Notes
    -----
    Each element crosses the network once, with its place; memory: see
    `Context.sparse_from_triplets`.

    Error: 0 eps. Peak memory: 5.0 times arguments and results.
    """
    own = A.local.tocoo()
    m, n = A.shape
    return ctx.sparse_from_triplets(own.col, own.row.astype(np.int64) + A.rows.start, own.data,
                                    (n, m))  # fmt: skip


@routine("d", vectors=("d",))
def diagonal(ctx: Context, A: SparseMatrix, k: int = 0) -> DistMatrix:
    """A diagonal.

    Parameters
    ----------
    A : sparse matrix, shape (m, n)
    k : int
        Above the main one; negative: below.

    Returns
    -------
    d : vector, VC_STAR
        Without elements, if there is no such diagonal.

    Notes
    -----
    Every rank holds all of it.

    Error: 0 eps. Peak memory: 1.1 times arguments and results.
    """
    m, n = A.shape
    length = max(0, min(m + min(k, 0), n - max(k, 0)))
    found = np.zeros(length, A.dtype)
    first = A.rows.start
    own = A.local.diagonal(k + first)
    start = max(0, first + min(k, 0))
    found[start : start + len(own)] = own[:length]
    return ctx.new_replicated(sum_over_ranks(ctx.comm, found)[:, None], "VC_STAR")


@routine("s", vectors=("s",))
def sum(ctx: Context, A: SparseMatrix, axis: int) -> DistMatrix:
    """Sums of columns (axis 0) or rows (axis 1).

    Parameters
    ----------
    A : sparse matrix, shape (m, n)
    axis : {0, 1}

    Returns
    -------
    s : vector, shape (n,) or (m,), VC_STAR:BLOCK

    Notes
    -----
    Of columns ranks add n words, which each of them holds; rows are added locally.

    Error: 8 eps, relative to the largest element. Peak memory: 1.1 times arguments and results.
    """
    require(axis in (0, 1), "BadArgumentError", f"sum: axis must be 0 or 1; got {axis}")
    own = np.asarray(A.local.sum(axis=axis)).reshape(-1, 1)
    if axis == 1:
        return in_blocks(ctx, own, A.shape[0])
    return ctx.new_replicated(sum_over_ranks(ctx.comm, own), IN_BLOCKS)


@routine("norm")
def norm(ctx: Context, A: SparseMatrix) -> float:
    """The Frobenius norm.

    Parameters
    ----------
    A : sparse matrix, shape (m, n)

    Notes
    -----
    In double precision.

    Error: 1 eps, relative. Peak memory: 1.2 times arguments and results.
    """
    return frobenius(ctx, without_duplicates(A))


def without_duplicates(A: SparseMatrix) -> Any:
    """This rank's rows, in each of which columns ascend; elements at one place are added."""
    local = A.local
    if not local.has_canonical_format:
        local = local.copy()
        local.sum_duplicates()
    return local


def frobenius(ctx: Context, local: Any) -> float:
    """The Frobenius norm of the rows that ranks have; the squares neither over- nor underflow."""
    data = local.data
    most = [float(np.abs(data[part]).max()) for part in panels(data.size, CHUNK // 16)]
    own = np.array([np.max(most, initial=0.0)])
    largest = float(tree_reduce(ctx.comm, range(ctx.size), own, np.maximum)[0])
    if not 0 < largest < np.inf:  # nan, too
        return largest
    unit = np.ldexp(1.0, np.frexp(largest)[1] - 1)  # a power of two: scaling is exact
    wide = (data[part].astype(complex) / unit for part in panels(data.size, CHUNK // 16))
    mine = np.array([np.add.reduce([float(np.vdot(x, x).real) for x in wide])])
    return float(np.sqrt(sum_over_ranks(ctx.comm, mine)[0]) * unit)
