"""Sparse matrices on ranks: the sources that `send_matrix` takes, and the result."""

from __future__ import annotations

import operator
import os
from typing import Any, NoReturn

import numpy as np

from alchemist_ray.arrays.rules import checked_dtype, matrix_dtype
from alchemist_ray.arrays.saving import as_path
from alchemist_ray.attached.connection import GangConnection
from alchemist_ray.attached.libraries import shipped
from alchemist_ray.attached.matrix_ref import MatrixRef
from alchemist_ray.attached.registry import gang_of
from alchemist_ray.dtypes import check_range, check_unmasked, chosen_dtype
from alchemist_ray.errors import (
    BadArgumentError,
    BadIndexError,
    DtypeError,
    ResourceError,
    ShapeError,
)
from alchemist_ray.object_refs import resolved
from alchemist_ray.transfer.fetching import fetch_sparse
from alchemist_ray.transfer.sending import send
from alchemist_ray.transfer.sources import MatrixSource, NumPySource, SparseSource
from mpi_workers.columns.missing import Missing
from mpi_workers.matrix.sizes import readable
from mpi_workers.matrix.sparse_rows import ROWS, of_layout

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


def inspect(data: Any, dtype: Any, missing: Missing, connection: GangConnection) -> MatrixSource:
    """The source for an object of `scipy.sparse`; see `transfer.sources`."""
    if is_sparse(data):
        return SparseSource(as_csr(data, None, dtype), connection.address.size)
    return NumPySource.inspect(data, dtype, missing=missing)  # a LinearOperator: an error


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
    shape = None if shape is None else _checked_shape(shape)
    if not is_sparse(data):
        data = _of_dask(data) if hasattr(data, "__dask_graph__") else data
        if not isinstance(data, list):
            raise BadArgumentError(
                f"shape= is for a sparse matrix in blocks, not for a {type(data).__name__}: a list "
                f"of {FORMS}"
            )
        data = _joined(data, shape)
    elif shape is not None and shape != data.shape:
        raise ShapeError(f"shape={shape}, but the matrix has shape {data.shape}: leave it out")
    if len(data.shape) != 2:
        raise ShapeError(f"a sparse array of shape {data.shape}: it must have two dimensions")
    try:
        rows = data.tocsr()
    except MemoryError as error:
        words = f"a sparse matrix of shape {data.shape} needs {readable(8 * (data.shape[0] + 1))}"
        raise ResourceError(
            f"{words} for the starts of its rows in this process: {error}"
        ) from None
    if rows.dtype.kind not in "biufc":
        raise DtypeError(f"elements of dtype {rows.dtype} are not numbers")
    if dtype is None:
        return rows.astype(matrix_dtype(rows.dtype), copy=False)
    kind = chosen_dtype(rows.dtype, dtype)
    check_range(rows.data, kind, "the sparse matrix")
    return rows.astype(kind, copy=False)


def _checked_shape(shape: Any) -> tuple[int, int]:
    try:
        m, n = map(operator.index, shape)
        if min(m, n) >= 0:
            return m, n
    except (TypeError, ValueError):
        pass
    raise ShapeError(f"shape={shape!r}: it must be (rows, columns) of the sparse matrix")


def _of_dask(data: Any) -> list[Any]:
    """Blocks of a Dask array or DataFrame, whose three columns are rows, columns and values."""
    from dask.base import compute  # noqa: PLC0415  (its data comes from it)

    found = []
    for part in compute(*np.ravel(data.to_delayed())):
        table = np.asarray(part)
        if table.ndim != 2 or table.shape[1] != 3:
            raise ShapeError(
                f"shape= and Dask's data: three columns (rows, columns, values), not {table.shape}"
            )
        rows, columns = (_integers(x) for x in table[:, :2].T)
        found.append((rows, columns, part.iloc[:, 2].to_numpy() if hasattr(part, "iloc")
                      else table[:, 2]))  # fmt: skip
    return found


def _integers(places: Any) -> Any:
    """Those of a table that has one dtype, if nothing is lost."""
    found = places.astype(np.int64)
    return found if (found == places).all() else places


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
            if own[2].dtype.kind not in "biufc":
                raise DtypeError(f"values of a sparse block of dtype {own[2].dtype} are no numbers")
            ends = [int(x.max()) + 1 if x.size else 0 for x in own[:2]]
        least = [max(pair) for pair in zip(least, ends, strict=True)]
        for found, mine in zip((down, across, values), own, strict=True):
            found.append(mine)
    shape = tuple(least) if shape is None else shape
    lowest = min((int(x.min()) for x in (*down, *across) if x.size), default=0)
    if lowest < 0 or any(n > has for n, has in zip(least, shape, strict=True)):
        raise ShapeError(
            f"blocks with elements up to row {least[0] - 1} and column {least[1] - 1} do not fit "
            f"into the shape {shape}"
        )
    places = np.concatenate(down), np.concatenate(across)
    return coo_array((np.concatenate(values), places), shape=shape)


def _numbers_of(key: Any, m: int) -> Any:
    """The numbers of the rows that a key selects of `m`. Raises `BadIndexError`."""
    if key is Ellipsis:
        key = slice(None)
    if isinstance(key, slice):
        return np.arange(*key.indices(m))
    rows = np.atleast_1d(np.asarray(key))
    if rows.ndim != 1:
        raise BadIndexError(f"A[rows] of a sparse matrix: rows has {rows.ndim} dimensions")
    if rows.dtype == bool:
        if len(rows) != m or not np.ndim(key):
            raise BadIndexError(f"a mask of {rows.size} elements for a matrix with {m} rows")
        return np.flatnonzero(rows)
    if rows.dtype.kind not in "iu" and rows.size:
        raise BadIndexError(f"A[rows] of a sparse matrix: rows are integers, not {rows.dtype}")
    if len(wrong := rows[(rows < -m) | (rows >= m)]):
        raise BadIndexError(f"row {wrong[0]} is outside a matrix with {m} rows")
    return rows.astype(np.int64)


LIBRARY = "sparse"
REFUSAL = (
    "a sparse matrix on ranks has no such operation: it has A @ X, A.T @ X, A @ B, A + B, A - B, "
    "A * B, A * 2, A[rows], diagonal, sum, norm, astype, save, truncated_svd, conjugate_gradient, "
    "routines of libraries (load_library('petsc')), and A.fetch(), which gives SciPy's. "
    "A.fetch().toarray() is dense, {} of float64"
)


class _Refusing:
    """Operators and protocols of arrays that sparse matrices do not have: each says so."""

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise BadArgumentError(self._refusal())

    def _refusal(self: Any) -> str:
        m, n = self.shape
        return REFUSAL.format(readable(8 * m * n))

    __rtruediv__ = __pow__ = __abs__ = __array__ = _refuse
    __lt__ = __le__ = __gt__ = __ge__ = _refuse
    __setitem__ = __iter__ = __bool__ = __float__ = __len__ = __invert__ = __mod__ = _refuse
    __floordiv__ = __rfloordiv__ = __rpow__ = __and__ = __or__ = __xor__ = __contains__ = _refuse
    __eq__ = __ne__ = _refuse
    __hash__ = object.__hash__


class SparseHandle(_Refusing):
    """Names a sparse matrix on a gang, whose rows are in contiguous blocks over the ranks.

    Routines of libraries take it where they declare an `ali.SparseMatrix`, functions of `als.run`
    get that. Leases, names, recovery, resizing and checkpoints are those of every matrix.
    Operators give handles of new matrices; what it does not have raises `BadArgumentError`.

    Attributes
    ----------
    shape : (int, int)
    dtype : numpy.dtype
    nnz : int
        Stored elements.
    layout : str
        ``"ROWS"``.
    nbytes : int
        On all ranks.
    matrix_ref : MatrixRef
        The bytes on the gang; `id`, `name`, `session`, `gang`, `epoch` are its.

    Notes
    -----
    It can be pickled, for tasks and actors of Ray: from then on it stays until `free`.
    """

    ndim = 2
    layout = ROWS
    shape: tuple[int, int]
    dtype: np.dtype[Any]
    nnz: int
    __array_priority__ = 1000  # NumPy and SciPy leave operators to this class

    def __init__(self, ref: MatrixRef | None, transposed: SparseHandle | None = None) -> None:
        self._ref, self._transposed = ref, transposed
        if transposed is not None:
            self.shape, self.dtype, self.nnz = (
                transposed.shape[::-1], transposed.dtype, transposed.nnz
            )  # fmt: skip
        elif ref is not None and (form := of_layout(ref.layout)) is not None:
            self.shape, self.dtype, self.nnz = form.shape, form.dtype, form.nnz

    @property
    def matrix_ref(self) -> MatrixRef:
        """The matrix; a transpose is made at the first use but ``A.T @ X``."""
        if self._ref is None:
            assert self._transposed is not None
            self._ref = self._transposed._call("transpose").matrix_ref
        return self._ref

    @property
    def id(self) -> int:
        return self.matrix_ref.id

    @property
    def name(self) -> str:
        return self.matrix_ref.name

    @property
    def nbytes(self) -> int:
        return self.matrix_ref.nbytes

    @property
    def T(self) -> SparseHandle:
        """The transpose. ``A.T @ X`` of a dense X does not make it; everything else does, once."""
        return SparseHandle(None, self) if self._transposed is None else self._transposed

    @property
    def _gang(self) -> GangConnection:
        return gang_of(self.matrix_ref)

    def _call(self, routine: str, *args: Any, **kwargs: Any) -> Any:
        return shipped(self._gang, LIBRARY).routine(routine)(self, *args, **kwargs)

    # --- products ---

    def __matmul__(self, other: Any) -> Any:
        """``A @ X``: of a dense X, shape (n, k) or (n,), or of a sparse one."""
        if isinstance(other, SparseHandle) or is_sparse(other):
            return self._call("multiply", self._sparse(other))
        if self._ref is None and self._transposed is not None:
            return self._transposed._call("transposed_matmul", self._dense(other))
        return self._call("matmul", self._dense(other))

    def __rmatmul__(self, other: Any) -> Any:
        """``X @ A``: the transpose of ``A.T @ X.T``."""
        if is_sparse(other):
            return self._sparse(other) @ self
        dense = self._dense(other)
        found = self.T @ dense.T
        return found if dense.ndim == 1 else found.T

    def matvec(self, x: Any) -> Any:
        """``A @ x`` as a NumPy array: `scipy.sparse.linalg.aslinearoperator` takes the handle."""
        return (self @ x).fetch()

    def rmatvec(self, x: Any) -> Any:
        """``A.T.conj() @ x`` as a NumPy array."""
        return (self.T @ np.conj(x)).fetch().conj()

    def _dense(self, other: Any) -> Any:
        """A handle of a dense operand."""
        if isinstance(other, MatrixRef):
            return other
        if isinstance(other, SparseHandle) or is_sparse(other):
            raise BadArgumentError(
                "the right-hand side is a sparse matrix, and solvers on ranks take dense ones: "
                "b.toarray() of SciPy's, b.fetch().toarray() of a handle"
            )
        check_unmasked(other, "the operand")
        return send(self._gang, np.asarray(other), layout="VC_STAR:BLOCK")

    def _sparse(self, other: Any) -> SparseHandle:
        if isinstance(other, SparseHandle):
            return other
        sent: SparseHandle = send(self._gang, other)
        return sent

    # --- elements ---

    def _elementwise(self, op: str, other: Any) -> Any:
        if isinstance(other, SparseHandle) or is_sparse(other):
            return self._call("elementwise", self._sparse(other), op)
        return self._refuse() if np.ndim(other) or other != 0 else self

    def __add__(self, other: Any) -> Any:
        return self._elementwise("add", other)

    __radd__ = __add__

    def __sub__(self, other: Any) -> Any:
        return self._elementwise("subtract", other)

    def __rsub__(self, other: Any) -> Any:
        return -self + other

    def __mul__(self, other: Any) -> Any:
        """Element by element with a sparse matrix, or with a number."""
        if isinstance(other, SparseHandle) or is_sparse(other):
            return self._elementwise("multiply", other)
        kind = getattr(np.asarray(other).dtype, "kind", "O")
        if isinstance(other, MatrixRef) or np.ndim(other) or kind not in "biufc":
            self._refuse()
        typed = isinstance(other, np.generic | np.ndarray)
        name = matrix_dtype(other.dtype).name if typed else KINDS[kind]
        rest = int(other) - int(float(other)) if kind in "iu" else 0
        return self._call("scale", complex(other), name, rest)

    __rmul__ = __mul__

    def __truediv__(self, other: Any) -> Any:
        if isinstance(other, MatrixRef | SparseHandle) or np.ndim(other):
            self._refuse()
        wide = self if self.dtype.kind == "c" or self.dtype == float else self.astype(float)
        return wide * (1.0 / other)  # as SciPy's

    def __neg__(self) -> Any:
        if self.dtype == bool:
            raise DtypeError("the negative of a sparse matrix of bools: astype('int8') has one")
        return self * np.array(-1).astype(self.dtype)[()]  # unsigned integers wrap around

    def __getitem__(self, key: Any) -> Any:
        """Rows: a slice, integers in any order, booleans; one integer gives a matrix of one row."""
        if isinstance(key, tuple):
            if len(key) != 2 or not isinstance(key[1], slice) or key[1] != slice(None):
                raise BadArgumentError(
                    f"A[{key!r}] of a sparse matrix on ranks: rows only; A[rows].T[columns].T "
                    "selects columns"
                )
            key = key[0]
        return self._call("take_rows", send(self._gang, _numbers_of(key, self.shape[0])))

    def diagonal(self, k: int = 0) -> Any:
        """A diagonal, as a dense vector."""
        return self._call("diagonal", k)

    def sum(self, axis: int | None = None) -> Any:
        """Sums of columns (axis 0) or rows (axis 1), a vector; or of all elements, a number."""
        if axis is None:
            return self._call("sum", 0).sum()
        return self._call("sum", axis % 2 if axis in (-1, -2) else axis)

    def norm(self) -> float:
        """The Frobenius norm."""
        return float(self._call("norm"))

    def astype(self, dtype: Any) -> SparseHandle:
        """A matrix with elements of another dtype. Raises `DtypeError` if they do not fit."""
        made: SparseHandle = self._call("astype", checked_dtype(dtype).name)
        return made

    def __deepcopy__(self, _: Any) -> SparseHandle:
        return self.astype(self.dtype)

    def __array_ufunc__(self, ufunc: Any, method: str, *given: Any, **options: Any) -> Any:
        """Of NumPy's arrays and numbers on the left: ``x @ A``, ``np.float64(2) * A``."""
        name = REFLECTED.get(ufunc)
        if name is None or method != "__call__" or given[1] is not self or options:
            return self._refuse()
        return getattr(self, name)(given[0])

    def __array_function__(self, function: Any, _: Any, args: Any, kwargs: Any) -> Any:
        if function is np.linalg.norm and (*args[1:], *kwargs.values()) in ((), ("fro",), (None,)):
            return self.norm()
        return self._refuse()

    # --- solvers ---

    def truncated_svd(self, rank: int, **options: Any) -> Any:
        """Leading singular values and vectors, ``S, U, V``: routine of the library ``sparse``."""
        return self._call("truncated_svd", rank, **options)

    def conjugate_gradient(self, b: Any, **options: Any) -> Any:
        """``X, iterations, residual`` of ``A X = b``: routine of the library ``sparse``."""
        return self._call("conjugate_gradient", self._dense(b), **options)

    # --- from and to this process, and files ---

    def fetch(self, rows: slice | int | None = None) -> Any:
        """The matrix, or some of its rows, as a `scipy.sparse.csr_array`."""
        from scipy.sparse import csr_array  # noqa: PLC0415  (optional package)

        arrays = fetch_sparse(self._gang, self.matrix_ref, rows)
        found = csr_array(arrays, shape=(len(arrays[2]) - 1, self.shape[1]))
        step = rows.indices(self.shape[0])[2] if isinstance(rows, slice) else 1
        return found if step == 1 else found[::step]

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write it to a file of SciPy (``.npz``), Matrix Market (``.mtx``, ``.mtx.gz``) or PETSc.

        Rank 0 writes it, and holds all of it meanwhile. An existing file is replaced in one step.
        """
        shipped(self._gang, "files").routine("save_sparse")(self, as_path(path))

    def keep(self) -> SparseHandle:
        """This handle; its matrix stays until `free` or the end of the gang."""
        self.matrix_ref.keep()
        return self

    def free(self) -> None:
        """Free the matrix; its handles become invalid."""
        self._gang.free(self.matrix_ref)

    def described(self) -> str:
        """Name, shape, dtype, elements and memory: a line."""
        m, n = self.shape
        ref = self.matrix_ref
        return (
            f"<SparseHandle {ref.name}: {m} x {n} {self.dtype}, {self.nnz:,} elements, "
            f"{readable(ref.nbytes)}, in gang {ref.gang} (epoch {ref.epoch})>"
        )

    def __getattr__(self, name: str) -> Any:
        if name in ("session", "gang", "epoch"):
            return getattr(self.matrix_ref, name)
        if name.startswith("_") or name == "shape":
            raise AttributeError(name)
        raise AttributeError(f"{name!r}: {self._refusal()}")

    def __reduce__(self) -> tuple[Any, ...]:
        return SparseHandle, (self.matrix_ref,)

    def __repr__(self) -> str:
        if self._ref is None:
            return f"<transpose of {self._transposed!r}>"
        return self.described()


REFLECTED = {
    np.matmul: "__rmatmul__", np.add: "__radd__", np.subtract: "__rsub__",
    np.multiply: "__rmul__",
}  # fmt: skip
KINDS = {"b": "bool", "i": "int", "u": "int", "f": "float", "c": "complex"}  # for `scale`
