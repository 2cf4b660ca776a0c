"""Sparse matrices on ranks: the result of `send_matrix` of a SciPy sparse matrix."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from alchemist_ray.arguments import checked_matrix_name
from alchemist_ray.arrays.handle import Handle
from alchemist_ray.arrays.rules import unsupported
from alchemist_ray.arrays.sparse_sources import as_csr, is_sparse
from alchemist_ray.errors import BadArgumentError
from alchemist_ray.gang.connection import GangConnection
from alchemist_ray.gang.libraries import Library
from alchemist_ray.gang.registry import gang_of
from alchemist_ray.transfer.sending import send
from mpi_workers.wire.frames import Body

LIBRARY = "sparse"
PARTS = (".indices", ".starts")  # names of a named matrix's other parts, after its own
FACTS = 3  # columns at the end of the starts: columns and elements of the matrix, rows of the rank
REFUSAL = (
    "a sparse matrix on ranks has no such operation: it has A @ X, A.T @ X, A.truncated_svd(rank), "
    "A.conjugate_gradient(b), A.norm() and A.fetch(). For the rest send A.fetch().toarray() as a "
    "dense matrix"
)


class _Refusing:
    """Operators and protocols of arrays that sparse matrices do not have: each says so."""

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise BadArgumentError(REFUSAL)

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
        raise AttributeError(f"{name!r}: {REFUSAL}")

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
