"""Makes sparse matrices on the ranks, and gives routines those that they take."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import coo_array, csr_array

from mpi_workers.failures import Failure
from mpi_workers.matrix.dist_matrix import DistMatrix
from mpi_workers.matrix.dtypes import check_dtype
from mpi_workers.matrix.sparse_matrix import SparseMatrix
from mpi_workers.matrix.sparse_rows import SparseRows, divided, of_layout
from mpi_workers.protocol.signature import MATRIX, SPARSE, Signature

if TYPE_CHECKING:
    from mpi_workers.rank.gang_view import GangView

Array = NDArray[Any]


def empty(gang: GangView, shape: tuple[int, int], dtype: Any, count: int) -> SparseMatrix:
    """A sparse matrix with uninitialised arrays, for `count` elements of this rank. Collective."""
    kind = check_dtype(dtype)
    parts = gang.comm.allgather((count, shape, kind.name))
    _require_alike([part[1:] for part in parts])
    return _of_form(gang, SparseRows(shape, kind, tuple(count for count, *_ in parts)))


def _require_alike(parts: list[tuple[tuple[int, int], str]]) -> None:
    """Refuse shapes and dtypes that ranks pass for one matrix, if they differ. On all ranks."""
    shapes, dtypes = (sorted(set(each)) for each in zip(*parts, strict=True))
    if len(shapes) > 1:
        raise Failure("ShapeError", f"ranks pass parts of matrices of the shapes {shapes}")
    if len(dtypes) > 1:
        raise Failure(
            "DtypeError",
            f"ranks pass elements of the dtypes {', '.join(dtypes)}: convert them to one, also "
            "those of ranks without elements",
        )


def _of_form(gang: GangView, form: SparseRows) -> SparseMatrix:
    return SparseMatrix(gang.new((form.nbytes,), np.uint8, form.layout, zero=False))


def _filled(matrix: SparseMatrix, local: Any) -> SparseMatrix:
    """The matrix, with this rank's rows."""
    count = int(local.indptr[-1])
    given = local.indptr, local.indices[:count], local.data[:count]
    for to, frm in zip(matrix.arrays(matrix.packed.rank), given, strict=True):
        to[...] = frm
    return matrix


def from_rows(gang: GangView, local: Any, m: int) -> SparseMatrix:
    """See `Context.new_sparse`."""
    local = csr_array(local)
    own = SparseRows((m, 0), local.dtype, (0,) * gang.size).rows(gang.rank)
    if local.shape[0] != len(own):
        raise ValueError(
            f"rank {gang.rank} must pass {len(own)} of the {m} rows; its local matrix has shape "
            f"{local.shape}"
        )
    return _filled(empty(gang, (m, local.shape[1]), local.dtype, int(local.indptr[-1])), local)


def from_whole(gang: GangView, whole: Any) -> SparseMatrix:
    """A sparse matrix that every rank has. Without messages."""
    whole = csr_array(whole)
    form = divided(whole.indptr, whole.shape, check_dtype(whole.dtype), gang.size)
    own = form.rows(gang.rank)
    return _filled(_of_form(gang, form), whole[own.start : own.stop])


def from_triplets(
    gang: GangView, rows: Array, columns: Array, elements: Array, shape: tuple[int, int]
) -> SparseMatrix:
    """See `Context.sparse_from_triplets`."""
    rows, columns, elements = map(np.asarray, (rows, columns, elements))
    shape = int(shape[0]), int(shape[1])
    parts = gang.comm.allgather(
        (_fault(rows, columns, elements, shape), shape, elements.dtype.name)
    )
    if wrong := next((fault for fault, *_ in parts if fault), ""):
        raise Failure("ShapeError", wrong)
    _require_alike([part[1:] for part in parts])
    rows, columns = rows.astype(np.int64, copy=False), columns.astype(np.int64, copy=False)
    own = SparseRows(shape, elements.dtype, (0,) * gang.size)
    owner = rows // own.height
    order = np.argsort(owner, kind="stable")
    counts = np.bincount(owner, minlength=gang.size)
    theirs = np.empty_like(counts)
    gang.comm.Alltoall(counts, theirs)

    def exchanged(values: Array) -> Array:
        received = np.empty(int(theirs.sum()), values.dtype)
        to, frm = ((each, np.cumsum(each) - each) for each in (counts, theirs))
        gang.comm.Alltoallv([values[order], to], [received, frm])
        return received

    mine = own.rows(gang.rank)
    at = exchanged(rows) - mine.start, exchanged(columns)
    values = exchanged(elements)
    return from_rows(gang, coo_array((values, at), shape=(len(mine), shape[1])).tocsr(), shape[0])


def _fault(rows: Array, columns: Array, elements: Array, shape: tuple[int, int]) -> str:
    """The fault in a rank's triplets; empty if they are right."""
    if not rows.shape == columns.shape == elements.shape == (rows.size,):
        return (
            f"rows, columns and elements have the shapes {rows.shape}, {columns.shape} and "
            f"{elements.shape}: they must be vectors of one length"
        )
    for what, at, length in (("row", rows, shape[0]), ("column", columns, shape[1])):
        if at.dtype.kind not in "iu" and at.size:
            return f"{what}s are of dtype {at.dtype}: they must be integers"
        for k in np.flatnonzero((at < 0) | (at >= length))[:1]:
            return f"{what} {int(at[k])} is outside of the shape {shape}"
    return ""


# Matrices of a gang that had another size, and the same on the ranks that there are now.
_divided: WeakKeyDictionary[object, SparseMatrix] = WeakKeyDictionary()


def on_ranks(gang: GangView, packed: DistMatrix) -> SparseMatrix:
    """A sparse matrix with one part for each rank that there is now. Collective.

    After a resize the rows are divided once, at the first use; the result is kept until the matrix
    is freed. Memory: the matrix once more, and three copies of it meanwhile.
    """
    matrix = SparseMatrix(packed)
    if len(matrix.form.counts) == gang.size:
        return matrix
    found = _divided.get(packed.block)
    # Not by one rank alone: a call that failed may have ended on some ranks only.
    if not all(gang.comm.allgather(found is not None and found.packed.grid == gang.grid)):
        rows, columns, elements = _triplets(matrix)
        found = _divided[packed.block] = from_triplets(gang, rows, columns, elements, matrix.shape)
    assert found is not None
    return found


def _triplets(matrix: SparseMatrix) -> list[Array]:
    """Rows, columns and elements of the parts that this rank holds."""
    form, packed = matrix.form, matrix.packed
    found: list[list[Array]] = [[np.empty(0, np.int64)] * 2 + [np.empty(0, form.dtype)]]
    for part in form.parts(packed.rank, packed.distribution.size):
        starts, columns, elements = matrix.arrays(part)
        rows = np.repeat(np.asarray(form.rows(part), np.int64), np.diff(starts))
        found.append([rows, columns, elements])
    return [np.concatenate(each) for each in zip(*found, strict=True)]


def arguments_of(gang: GangView, signature: Signature, given: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a routine, sparse matrices as such. Collective.

    Raises
    ------
    Failure
        BadArgumentError for a dense matrix in place of a sparse one, and the reverse. Routines for
        arrays of any axes, such as those that save them, get the bytes of a sparse matrix.
    """
    found = dict(given)
    for parameter in signature.parameters:
        value = given.get(parameter.name)
        if not isinstance(value, DistMatrix):
            continue
        sparse = of_layout(value.layout) is not None
        if sparse != (parameter.type == SPARSE) and not (sparse and signature.any_axes):
            wanted = "dense" if parameter.type == MATRIX else "sparse"
            raise Failure(
                "BadArgumentError", f"{signature.name}: {parameter.name} must be a {wanted} matrix"
            )
        if parameter.type == SPARSE:
            found[parameter.name] = on_ranks(gang, value)
    return found
