"""Sparse matrices on ranks: the sources that `send_matrix` takes, and the result."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from alchemist_ray.arguments import checked_matrix_name
from alchemist_ray.arrays.handle import Handle
from alchemist_ray.arrays.rules import matrix_dtype, unsupported
from alchemist_ray.attached.connection import GangConnection
from alchemist_ray.attached.libraries import Library
from alchemist_ray.attached.registry import gang_of
from alchemist_ray.dtypes import check_range, check_unmasked, chosen_dtype
from alchemist_ray.errors import BadArgumentError, DtypeError, ShapeError
from alchemist_ray.object_refs import resolved
from alchemist_ray.transfer.sending import send
from mpi_workers.matrix.sizes import readable
from mpi_workers.wire.frames import Body

FORMS = (
    "(rows, columns, values) with arrays of one length, or (block, row0, col0) with a sparse block "
    "of SciPy or an ObjectRef of one"
)


def is_sparse(data: Any) -> bool:
    """Whether the data is a sparse matrix or array of SciPy, of any format."""
    packages = (kind.__module__.partition(".")[0] for kind in type(data).__mro__)
    return "scipy" in packages and hasattr(data, "tocsr")


def is_sparse_blocks(data: Any) -> bool:
    """Whether the data is a list of blocks of a sparse matrix, as far as can be seen locally."""
    if not isinstance(data, list) or not data:
        return False
    return all(
        isinstance(block, tuple) and len(block) == 3
        and (is_sparse(block[0]) or all(isinstance(x, np.ndarray) and x.ndim == 1 for x in block))
        for block in data
    )  # fmt: skip


def as_csr(data: Any, shape: Any = None, dtype: Any = None) -> Any:
    """A `scipy.sparse.csr_array` of a sparse matrix, or of a list of its blocks.

    Raises
    ------
    DtypeError
        If its elements are not numbers that a matrix, or the dtype that was chosen, can have.
    ShapeError
        If it does not have two dimensions, or an element is outside of the shape.
    BadArgumentError
        If a block has another form.
    """
    if not is_sparse(data):
        if not isinstance(data, list):
            raise BadArgumentError(
                f"shape= is for a sparse matrix in blocks, not for a {type(data).__name__}: a list "
                f"of {FORMS}"
            )
        data = _joined(data, shape)
    elif shape is not None and tuple(shape) != data.shape:
        raise ShapeError(f"shape={shape!r}, but the matrix has shape {data.shape}: leave it out")
    if len(data.shape) != 2:
        raise ShapeError(f"a sparse array of shape {data.shape}: it must have two dimensions")
    rows = data.tocsr()
    if rows.dtype.kind not in "biufc":
        raise DtypeError(f"elements of dtype {rows.dtype} are not numbers")
    if dtype is None:
        return rows.astype(matrix_dtype(rows.dtype), copy=False)
    kind = chosen_dtype(rows.dtype, dtype)
    check_range(rows.data, kind, "the sparse matrix")
    return rows.astype(kind, copy=False)


def _joined(blocks: Any, shape: Any) -> Any:
    """Blocks as one matrix; elements at the same place are added, as in SciPy."""
    from scipy.sparse import coo_array  # noqa: PLC0415  (optional package)

    down: list[Any] = []
    across: list[Any] = []
    values: list[Any] = []
    least = [0, 0]
    own: tuple[Any, ...]
    for block in blocks:
        if not isinstance(block, tuple) or len(block) != 3:
            raise BadArgumentError(f"a sparse matrix or a list of its blocks: {FORMS}")
        first = resolved(block[0])
        if is_sparse(first):
            part = first.tocoo()
            try:
                row0, col0 = map(operator.index, block[1:])
            except TypeError:
                raise BadArgumentError(f"a block of a sparse matrix: {FORMS}") from None
            own = (part.row.astype(np.int64) + row0, part.col.astype(np.int64) + col0, part.data)
            ends = [row0 + part.shape[0], col0 + part.shape[1]]
        else:
            given = [first, *map(resolved, block[1:])]
            check_unmasked(given, "a block of a sparse matrix")
            own = tuple(map(np.asarray, given))
            if any(x.ndim != 1 or len(x) != len(own[0]) for x in own):
                raise BadArgumentError(f"a block of a sparse matrix: {FORMS}")
            if any(x.dtype.kind not in "iu" and x.size for x in own[:2]):
                raise BadArgumentError("rows and columns of a sparse block must be integers")
            ends = [int(x.max()) + 1 if x.size else 0 for x in own[:2]]
        least = [max(pair) for pair in zip(least, ends, strict=True)]
        for found, mine in zip((down, across, values), own, strict=True):
            found.append(mine)
    shape = tuple(least) if shape is None else tuple(int(length) for length in shape)
    lowest = min((int(x.min()) for x in (*down, *across) if x.size), default=0)
    if len(shape) != 2 or lowest < 0 or any(n > has for n, has in zip(least, shape, strict=True)):
        raise ShapeError(
            f"blocks with elements up to row {least[0] - 1} and column {least[1] - 1} do not fit "
            f"into the shape {shape}"
        )
    places = np.concatenate(down), np.concatenate(across)
    return coo_array((np.concatenate(values), places), shape=shape)


LIBRARY = "sparse"
PARTS = (".indices", ".starts")  # names of a named matrix's other parts, after its own
FACTS = 3  # columns at the end of the starts: columns and elements of the matrix, rows of the rank
REFUSAL = (
    "a sparse matrix on ranks has no such operation: it has A @ X, A.T @ X, A.truncated_svd(rank), "
    "A.conjugate_gradient(b), A.norm() and A.fetch(), which gives SciPy's. A.fetch().toarray() is "
    "dense, {} of float64"
)


class _Refusing:
    """Operators and protocols of arrays that sparse matrices do not have: each says so."""

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise BadArgumentError(self._refusal())

    def _refusal(self: Any) -> str:
        m, n = self.shape
        return REFUSAL.format(readable(8 * m * n))

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = _refuse
    __rtruediv__ = __pow__ = __rmatmul__ = __getitem__ = __neg__ = __abs__ = __array__ = _refuse
    __array_ufunc__ = __array_function__ = __lt__ = __le__ = __gt__ = __ge__ = _refuse
    __setitem__ = __iter__ = __bool__ = __float__ = __len__ = __invert__ = __mod__ = _refuse
    __floordiv__ = __rfloordiv__ = __rpow__ = __and__ = __or__ = __xor__ = __contains__ = _refuse
    __eq__ = __ne__ = _refuse
    __hash__ = object.__hash__


@dataclass(frozen=True, eq=False, repr=False)
class SparseHandle(_Refusing):
    """A sparse matrix, whose rows are dealt out to the ranks in turn.

    It can be multiplied with dense matrices from the right, decomposed and solved with; everything
    else raises `BadArgumentError`. Freed like every matrix, when no handle refers to it.

    Attributes
    ----------
    shape : (int, int)
    dtype : numpy.dtype
        One of the seven of matrices.
    nnz : int
        Stored elements.
    nbytes : int
        On all ranks, with the padding of each rank's part to the longest.
    name : str
        `AlchemistSession.matrix` finds a matrix that was sent with a name.

    Notes
    -----
    It can be pickled, for tasks and actors of Ray: from then on it stays until `free`.
    """

    shape: tuple[int, int]
    nnz: int
    _data: Handle
    _indices: Handle
    _starts: Handle

    ndim = 2
    __array_priority__ = 1000  # NumPy and SciPy leave operators to this class

    @property
    def dtype(self) -> np.dtype[Any]:
        return self._data.dtype

    @property
    def name(self) -> str:
        return self._data.name

    @property
    def nbytes(self) -> int:
        return self._data.nbytes + self._indices.nbytes + self._starts.nbytes

    @property
    def T(self) -> Transposed:
        """The transpose, for ``A.T @ X``."""
        return Transposed(self)

    def _call(self, routine: str, *args: Any, **kwargs: Any) -> Any:
        connection = gang_of(self._data)
        library: Library = connection.part(_library)
        parts = self._data, self._indices, self._starts
        return library.routine(routine)(*parts, self.shape[1], *args, **kwargs)

    def __matmul__(self, other: Any) -> Any:
        """``A @ X`` for a dense X, shape (n, k) or (n,). Every rank receives all of X."""
        return self._call("matmul", self._operand(other))

    def _operand(self, other: Any) -> Handle:
        if isinstance(other, Handle):
            return other
        if is_sparse(other) or isinstance(other, SparseHandle | Transposed):
            raise unsupported("a product of two sparse matrices", "multiply with a dense one")
        check_unmasked(other, "the operand")
        dense: Handle = send(gang_of(self._data), np.asarray(other))
        return dense

    def norm(self) -> float:
        """The Frobenius norm."""
        return float(self._data.norm())

    def truncated_svd(self, rank: int, **options: Any) -> Any:
        """Leading singular values and vectors, ``S, U, V``: routine of the library ``sparse``."""
        return self._call("truncated_svd", rank, **options)

    def conjugate_gradient(self, b: Any, **options: Any) -> Any:
        """``X, iterations, residual`` of ``A X = b``: routine of the library ``sparse``."""
        return self._call("conjugate_gradient", self._operand(b), **options)

    def fetch(self) -> Any:
        """The matrix as a `scipy.sparse.csr_array`."""
        from scipy.sparse import csr_array  # noqa: PLC0415  (optional package)

        m, n = self.shape
        data, indices, starts = (x.fetch() for x in (self._data, self._indices, self._starts))
        size = len(data)
        counts = np.zeros(m, np.int64)
        for rank in range(size):
            rows = starts[rank, -1]
            counts[rank::size] = np.diff(starts[rank, : rows + 1])
        ends = np.concatenate([[0], np.cumsum(counts)])
        found = csr_array((np.empty(ends[-1], self.dtype), np.empty(ends[-1], np.int64), ends),
                          shape=(m, n))  # fmt: skip
        for rank in range(size):
            rows = starts[rank, -1]
            own = starts[rank, : rows + 1]
            places = np.repeat(ends[rank:-1:size] - own[:-1], np.diff(own)) + np.arange(own[-1])
            found.data[places] = data[rank, : own[-1]]
            found.indices[places] = indices[rank, : own[-1]]
        return found

    def keep(self) -> SparseHandle:
        """This handle; its matrix stays until `free` or the end of the gang."""
        for part in (self._data, self._indices, self._starts):
            part.keep()
        return self

    def free(self) -> None:
        """Free the matrix; its handles become invalid."""
        for part in (self._data, self._indices, self._starts):
            part.free()

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("_"):
            raise AttributeError(name)
        raise AttributeError(f"{name!r}: {self._refusal()}")

    def __repr__(self) -> str:
        m, n = self.shape
        return f"<SparseHandle {self._data.name}: {m} x {n} {self.dtype}, {self.nnz:,} elements>"


@dataclass(frozen=True, eq=False, repr=False)
class Transposed(_Refusing):
    """The transpose of a sparse matrix, for products."""

    T: SparseHandle

    __array_priority__ = 1000

    @property
    def shape(self) -> tuple[int, int]:
        return self.T.shape[::-1]

    def __matmul__(self, other: Any) -> Any:
        """``A.T @ X`` for a dense X, shape (m, k) or (m,). Ranks add ``n k`` words."""
        return self.T._call("transposed_matmul", self.T._operand(other))

    def __repr__(self) -> str:
        return f"<transpose of {self.T!r}>"


def _library(connection: GangConnection) -> Library:
    described = connection.request({"op": "load", "library": LIBRARY, "path": None})
    return Library(connection, described, read_only=True)


def send_sparse(
    connection: GangConnection,
    data: Any,
    dtype: Any = None,
    *,
    shape: tuple[int, int] | None = None,
    name: str | None = None,
    durable: bool = False,
) -> SparseHandle:
    """Send a sparse matrix, or blocks of one, row by row to the ranks in turn.

    Raises
    ------
    DtypeError, ShapeError, BadArgumentError
        As `sparse_sources.as_csr`.

    Notes
    -----
    Blocks are joined in this process. Cost: two copies of the matrix there; on the ranks one,
    padded to the rank with the most elements.
    """
    checked_matrix_name(name)
    rows = as_csr(data, shape, dtype)
    m, n = (int(length) for length in rows.shape)
    size = connection.address.size
    parts = [rows[rank::size] for rank in range(size)]
    longest, most = max(part.nnz for part in parts), -(-m // size)
    named = [None if name is None else name + end for end in ("", *PARTS)]

    def gathered(width: int, dtype: Any, values: list[NDArray[Any]], name: str | None) -> Handle:
        whole = np.zeros((size, max(1, width)), dtype)
        for row, own in zip(whole, values, strict=True):
            row[: len(own)] = own
        sent: Handle = send(connection, whole, name=name, durable=durable)
        return sent

    small = np.int32 if max(n, longest) < 1 << 31 else np.int64  # a quarter less to send and read
    starts = np.zeros((size, most + 1 + FACTS), np.int64)
    for row, part in zip(starts, parts, strict=True):
        row[: part.shape[0] + 1] = part.indptr
        row[-FACTS:] = n, rows.nnz, part.shape[0]
    return SparseHandle(
        (m, n),
        int(rows.nnz),
        gathered(longest, rows.dtype, [part.data for part in parts], named[0]),
        gathered(longest, small, [part.indices for part in parts], named[1]),
        send(connection, starts, name=named[2], durable=durable),
    )


def find_sparse(connection: GangConnection, records: list[Body], name: str) -> SparseHandle | None:
    """The sparse matrix of this name, which any process may have sent; None if it is not one."""
    found = [[r for r in records if r["name"] == name + end] for end in ("", *PARTS)]
    if any(len(one) != 1 for one in found):
        return None
    data, indices, starts = (connection.handle(one[0]) for one in found)
    width = starts.shape[1]
    facts = starts.fetch(cols=slice(width - FACTS, width))
    shape = int(facts[:, 2].sum()), int(facts[0, 0])
    return SparseHandle(shape, int(facts[0, 1]), data, indices, starts)
