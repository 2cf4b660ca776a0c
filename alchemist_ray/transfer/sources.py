"""The sources of `send_matrix`: the protocol, the kinds of data, and those of this process.

A source is checked before the gang is asked for memory. Iterators of row blocks and arrays on disk
are never whole in this process: one block is here at a time, cut by layout and sent before the next
is asked for; the object store has no part in it.
"""

from __future__ import annotations

import importlib
import operator
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from alchemist_ray.attached.connection import GangConnection
from alchemist_ray.attached.matrix_ref import ref_of
from alchemist_ray.attached.progress import say
from alchemist_ray.dtypes import as_array, as_numbers, check_range, checked_missing, chosen_dtype
from alchemist_ray.errors import (
    AlchemistError,
    DtypeError,
    FileError,
    IncompleteMatrixError,
    LibraryLoadError,
    MatrixError,
    ShapeError,
    TransferError,
)
from alchemist_ray.object_refs import ObjectRef
from alchemist_ray.transfer.tables import TableSource
from mpi_workers.columns.arrow_columns import is_arrow
from mpi_workers.columns.missing import ERROR, Missing
from mpi_workers.data.description import NodeTimes, TransferTarget, add_times
from mpi_workers.data.transfers import MatrixWriter, Progress
from mpi_workers.matrix.copy_kernels import ArrayBlock
from mpi_workers.matrix.layout import MAX_AXES, ArrayShape, Shape, stored_shape
from mpi_workers.matrix.node_shares import Region
from mpi_workers.matrix.sparse_rows import divided


class MatrixSource(Protocol):
    """Data that was looked at and is ready to be sent.

    Attributes
    ----------
    shape : (int, int)
        Rows and columns, see `stored_shape`.
    array_shape : tuple of int, optional
        Of the array, if it is no matrix.
    dtype : numpy.dtype
        Of the matrix.
    columns : sequence of str
        Names of the columns, if they have names.
    """

    shape: Shape
    dtype: np.dtype[Any]
    columns: Sequence[str]

    def provenance(self) -> dict[str, Any]:
        """Where the matrix comes from, for the gang's record."""

    def send(
        self, connection: GangConnection, target: TransferTarget, progress: Progress | None
    ) -> dict[int, NodeTimes]:
        """Move every element; the times by node."""


@runtime_checkable
class KeptSource(Protocol):
    """A source whose data can be sent again, by another process."""

    def kept(self) -> Any:
        """Data of which `source_for` makes this matrix again."""


class SendAgainError(TransferError):
    """This attempt to send is void, but the same data can be sent again, to another matrix."""


# Data that no protocol describes, most of it in other processes: by the package that a type comes
# from, the module whose `inspect(data, dtype, missing, connection)` makes a source of it. It
# is imported when such data is met. The longest name that fits counts.
OBJECT_STORE = "alchemist_ray.transfer.object_store"
GANGS = "alchemist_ray.transfer.gangs"
CLIENTS: dict[str, str] = {
    GANGS: GANGS,
    "dask": "alchemist_ray.clients.dask.chunks",
    "dask_expr": "alchemist_ray.clients.dask.chunks",
    "ray.data": "alchemist_ray.clients.ray_data",
    "scipy.sparse": "alchemist_ray.arrays.sparse",
    "pyspark": "alchemist_ray.clients.spark.sources",
    "pyspark.sql.connect": "alchemist_ray.clients.spark_connect",
}
PANDAS = "alchemist_ray.clients.pandas"


def source_for(data: Any, dtype: Any, missing: Missing, connection: GangConnection) -> MatrixSource:
    """The source for some data: by its protocol; of blocks, files and `CLIENTS` by its type.

    Raises
    ------
    DtypeError, ShapeError, IncompleteMatrixError, MatrixError
        If no matrix can be made of it.
    """
    if ref_of(data) is not None:
        return _inspect(GANGS, data, dtype, missing, connection)
    if isinstance(data, IteratorSource):
        return data
    if on_disk(data):
        return disk_source(data, dtype)
    if isinstance(data, ObjectRef):
        raise ShapeError(
            "an ObjectRef alone has no place in a matrix: send [(ref, 0, 0)], a list of "
            "(ObjectRef, first row, first column)"
        )
    if isinstance(data, list) and data and _is_block(data[0]):
        return _inspect(OBJECT_STORE, data, dtype, missing, connection)
    client = _client_of(data)
    own = hasattr(data, "iloc") or (hasattr(data, "isna") and hasattr(data, "dtype"))
    if client is None and own:  # pandas' frames, indexes and arrays, and those that are like them
        client = PANDAS
    if client is not None:
        return _inspect(client, data, dtype, missing, connection)
    if is_arrow(data):
        return TableSource(data, dtype, missing)
    if hasattr(data, "__dataframe__"):
        return TableSource(_interchanged(data), dtype, missing)
    return NumPySource.inspect(data, dtype, missing=missing)


def _is_block(item: Any) -> bool:
    """Whether an item is a block, or is meant as one. Raises `ShapeError` for an array in one."""
    first = item[0] if isinstance(item, tuple) and item else item
    if first is not item and getattr(first, "ndim", 0) >= 2:
        raise ShapeError(
            f"a block is (ObjectRef, first row, first column), and the first one has a "
            f"{type(first).__name__}: ray.put(array) makes an ObjectRef of an array"
        )
    return isinstance(first, ObjectRef)


def _client_of(data: Any) -> str | None:
    """The module of the client for this data; None if it is of no other system."""
    for kind in type(data).__mro__:
        package = kind.__module__
        while package:
            if package in CLIENTS:
                return CLIENTS[package]
            package = package.rpartition(".")[0]
    return None


def _inspect(
    module: str, data: Any, dtype: Any, missing: Missing, connection: GangConnection
) -> MatrixSource:
    inspect = importlib.import_module(module).inspect
    source: MatrixSource = inspect(data, dtype, missing, connection)
    return source


def _interchanged(data: Any) -> Any:
    """A frame of the interchange protocol as a table of pyarrow. Raises `LibraryLoadError`."""
    try:
        from pyarrow.interchange import from_dataframe  # noqa: PLC0415 - optional
    except ImportError as error:
        words = f"a {type(data).__name__} is sent by __dataframe__: pip install pyarrow ({error})"
        raise LibraryLoadError(words) from error
    return from_dataframe(data)


# --- arrays of this process ---

WIDENED = ("bfloat16", "torch.bfloat16")  # no dtypes of NumPy: of ml_dtypes and torch


class NumPySource:
    """An array in this process: cut by layout and sent from where it lies."""

    def __init__(
        self, array: NDArray[Any], dtype: np.dtype[Any], columns: Sequence[str] = ()
    ) -> None:
        self.dtype = dtype
        self.columns = columns
        self.array_shape = array.shape
        self.shape: Shape = stored_shape(array.shape)
        self.array = array if array.ndim == 2 else array.reshape(self.shape)

    @classmethod
    def inspect(
        cls, data: Any, wanted: Any, columns: Sequence[str] = (), missing: Missing = ERROR
    ) -> NumPySource:
        """A source for an array or what NumPy makes one of. Raises `DtypeError`, `ShapeError`."""
        wide = _wide(data)
        if wide is not None and wanted is None:
            raise DtypeError(
                f"a matrix cannot have dtype {data.dtype}: choose one to convert to, e.g. "
                "dtype='float32'"
            )
        array = as_numbers(_as_array(_on_host(data if wide is None else wide), missing))
        if array.ndim > MAX_AXES:
            raise ShapeError(
                f"an array of shape {array.shape} cannot be sent: it has more than {MAX_AXES} axes"
            )
        dtype = chosen_dtype(array.dtype, wanted)
        check_range(array, dtype, "the array")
        return cls(array, dtype, columns)

    def provenance(self) -> dict[str, Any]:
        """Where the matrix comes from, for the gang's record."""
        shape = list(self.array_shape)
        return {"from": "array", "dtype": str(self.array.dtype), "shape": shape}

    def kept(self) -> Any:
        """The elements: data that can be sent again, if they are kept."""
        return self.array.reshape(self.array_shape)

    def send(
        self, connection: GangConnection, target: TransferTarget, progress: Progress | None
    ) -> dict[int, NodeTimes]:
        """Write the whole array into the ranks' memory."""
        with MatrixWriter(
            connection.nodes, target, progress, connection.options.buffer_bytes
        ) as writer:
            if self.array.size:
                writer.write_block(self.array, (0, 0))
        return writer.times


def _wide(data: Any) -> Any:
    """Numbers of a dtype that NumPy does not have, as float32; None for others."""
    if str(getattr(data, "dtype", None)) not in WIDENED:
        return None
    return data.astype(np.float32) if hasattr(data, "astype") else data.float()


HOST = (1, 3, 11, 13)  # DLPack's numbers of memory that NumPy reads: CPU, pinned, managed


def _on_host(data: Any) -> Any:
    """Data of DLPack in memory that NumPy reads; other data as they are. Raises `DtypeError`."""
    if isinstance(data, np.ndarray | np.generic) or not hasattr(data, "__dlpack_device__"):
        return data
    try:
        device, number = data.__dlpack_device__()
        here = device in HOST
        if here and hasattr(data, "__array__"):
            return data
        if not here:
            kind = type(data).__name__
            say(f"A {kind} is copied from its device ({device}, {number}) to be sent.")
        return np.from_dlpack(data, device="cpu") if not here else np.from_dlpack(data)
    except (BufferError, RuntimeError, TypeError, ValueError) as error:
        words = f"a {type(data).__name__} cannot be read by DLPack ({error})"
        raise DtypeError(f"{words}: copy it to an array of NumPy first") from None


def _as_array(data: Any, missing: Missing) -> NDArray[Any]:
    """The array. Raises `DtypeError`, `ShapeError`."""
    if hasattr(data, "tocsr"):
        raise DtypeError("a sparse matrix cannot be one of several blocks: send it alone")
    if isinstance(data, str):
        raise DtypeError("a str is not a matrix: a file is loaded with load_matrix(path)")
    if isinstance(data, bytes | dict | set) or data is None:
        raise DtypeError(f"a {type(data).__name__} is not a matrix")
    arrays = ("__array__", "__array_interface__", "to_numpy")  # the last of a `pyarrow.Tensor`
    if isinstance(data, Sequence) or any(hasattr(data, a) for a in arrays):
        return as_array(data, "the array", missing)[0]
    raise DtypeError(
        f"a {type(data).__name__} cannot be sent: give an array or a frame (of a package with "
        "__arrow_c_stream__, __dlpack__, __array__ or __dataframe__), or a list of (ObjectRef, "
        "first row, first column); send_blocks takes an iterator of row blocks"
    )


# --- sparse matrices ---


class SparseSource:
    """A `scipy.sparse.csr_array`, sent from its three arrays (`matrix.sparse_rows`)."""

    columns: Sequence[str] = ()
    dtype = np.dtype(np.uint8)  # as the gang keeps it

    def __init__(self, rows: Any, ranks: int) -> None:
        self._rows = rows
        self.form = divided(rows.indptr, rows.shape, rows.dtype, ranks)
        self.array_shape = (self.form.nbytes,)
        self.shape: Shape = (self.form.nbytes, 1)

    def provenance(self) -> dict[str, Any]:
        """Where the matrix comes from, for the gang's record."""
        about = self.form
        return {"from": "scipy.sparse", "dtype": about.dtype.name, "shape": list(about.shape)}

    def kept(self) -> Any:
        """The bytes: data that can be sent again, if they are kept."""
        return np.concatenate([array[:, 0] for array, _ in self._sections()])

    def send(
        self, connection: GangConnection, target: TransferTarget, progress: Progress | None
    ) -> dict[int, NodeTimes]:
        """Write every part into the memory of its rank."""
        steps = connection.options.buffer_bytes
        with MatrixWriter(connection.nodes, target, progress, steps) as writer:
            writer.write_blocks(self._sections())
        return writer.times

    def _sections(self) -> Iterator[ArrayBlock]:
        """The sections of all parts as bytes, with their padding, and where they belong."""
        form, rows = self.form, self._rows
        for part in range(len(form.counts)):
            at = form.rows(part)
            starts = rows.indptr[at.start : at.stop + 1]
            used = slice(starts[0], starts[-1])
            sections = (starts - starts[0]).astype(form.index), rows.indices[used], rows.data[used]
            for k, section in enumerate(sections):
                kind = rows.dtype if k == 2 else form.index
                raw = np.ascontiguousarray(section, kind).view(np.uint8)
                first, end = form.ends[3 * part + k : 3 * part + k + 2].tolist()
                for piece in (raw, np.zeros(end - first - len(raw), np.uint8)):
                    if len(piece):
                        yield ArrayBlock(piece[:, np.newaxis], (first, 0))
                    first += len(piece)


# --- matrices that are never whole in this process ---

READ_NBYTES = 16 << 20  # 16 MiB: read at once; smaller blocks are collected up to it
BAND = 8  # times READ_NBYTES: a row of chunks that is larger is read in several pieces
ON_DISK = ("h5py", "zarr")  # modules whose arrays are read in pieces

Array = NDArray[Any]


class SourceError(Exception):
    """An error of the user's own iterator, on its way through a transfer."""

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


@dataclass(eq=False)
class IteratorSource:
    """An array that an iterator yields in blocks of whole rows, from the first row on.

    Attributes
    ----------
    blocks : iterable of array_like, shapes (k, n) or (n,), of more axes (k, ...) or (...)
        Read once, from the front.
    array_shape : tuple of int
        Of the whole.
    dtype : numpy.dtype
        Of the matrix. Blocks are converted to it.
    origin : dict
        Where it comes from, for the gang's record.
    missing : "error", "nan" or a number
    """

    blocks: Iterable[Any]
    array_shape: ArrayShape
    dtype: np.dtype[Any]
    origin: dict[str, Any]
    columns: Sequence[str] = ()
    missing: Missing = ERROR

    def __post_init__(self) -> None:
        self.shape: Shape = stored_shape(self.array_shape)

    @classmethod
    def inspect(cls, blocks: Any, shape: Any, wanted: Any, missing: Any = ERROR) -> IteratorSource:
        """A plan for what a user gave. Raises `ShapeError`, `DtypeError`."""
        try:
            lengths = tuple(map(operator.index, shape))
        except TypeError:
            lengths = ()
        if not 1 <= len(lengths) <= MAX_AXES:
            raise ShapeError(
                f"shape={shape!r}: it must be (rows, columns), (elements,), or the lengths of up "
                f"to {MAX_AXES} axes"
            )
        if min(lengths) < 0:
            raise ShapeError(f"shape={shape!r}: a length is negative")
        try:
            given = np.dtype(wanted)
        except TypeError:
            raise DtypeError(f"{wanted!r} is not a dtype") from None
        if ref_of(blocks) is not None:
            raise MatrixError(
                f"send_blocks takes an iterable of arrays, and {blocks.name} is a matrix on ranks: "
                "send_matrix copies that of another gang"
            )
        if isinstance(blocks, np.ndarray | str | bytes | dict) or not isinstance(blocks, Iterable):
            raise ShapeError(
                f"send_blocks takes an iterable of arrays, not a {type(blocks).__name__}: send an "
                "array with send_matrix"
            )
        dtype = chosen_dtype(given, given)
        fill = checked_missing(missing)
        return cls(blocks, lengths, dtype, {"from": "blocks"}, missing=fill)

    def provenance(self) -> dict[str, Any]:
        return {**self.origin, "dtype": self.dtype.name, "shape": list(self.array_shape)}

    def send(
        self, connection: GangConnection, target: TransferTarget, progress: Progress | None
    ) -> dict[int, NodeTimes]:
        """Every block, one after the other.

        Nothing of the gang is held while the next is made: it may be made from matrices there.
        """
        times: dict[int, NodeTimes] = {}
        for block, (row, col) in self._placed():
            m, n = block.shape
            steps = connection.options.buffer_bytes
            region = Region(row, row + m, col, col + n)
            with MatrixWriter(connection.nodes, target, progress, steps, region) as writer:
                writer.write_block(block, (row, col))
            add_times(times, writer.times)
        return times

    def _placed(self) -> Iterator[tuple[Array, Shape]]:
        """Blocks as they are sent, with row and column of the first element."""
        row = 0
        for rows in self._gathered():
            yield rows, (row, 0)
            row += len(rows)
        if row < self.shape[0] and self.shape[1]:
            raise IncompleteMatrixError(
                f"the blocks have {row} rows in total; shape= has {self.shape[0]}"
            )

    def _gathered(self) -> Iterator[Array]:
        """Blocks as they are sent: large ones as they come, small ones several at once."""
        held = 0
        most = max(1, READ_NBYTES // max(1, self.shape[1] * self.dtype.itemsize))
        room = np.empty((0, 0))
        for block in self._checked():
            if held + len(block) > most:
                if held:
                    yield room[:held]
                held = 0
            if 2 * len(block) > most:
                yield block
                continue
            if not room.size:
                room = np.empty((most, self.shape[1]), self.dtype)
            room[held : held + len(block)] = block
            held += len(block)
        if held:
            yield room[:held]

    def _checked(self) -> Iterator[Array]:
        m, n = self.shape
        row = 0
        for number, block in enumerate(_theirs(self.blocks)):
            name = f"block {number} (row {row})"
            try:
                array, _ = as_array(block, "it", self.missing)
            except (DtypeError, ShapeError) as error:
                raise type(error)(f"{name}: {error}") from None
            rows = self._in_rows(array)
            if rows is None:
                inner = self.array_shape[1:]
                told = f"{n} elements" if len(inner) < 2 else f"shape {inner}"
                raise ShapeError(f"{name} has shape {array.shape}: its rows must have {told}")
            if row + len(rows) > m:
                raise ShapeError(
                    f"block {number} ends at row {row + len(rows)}; shape= has {m} rows"
                )
            try:
                chosen_dtype(rows.dtype, self.dtype)
            except DtypeError as error:
                raise DtypeError(f"{name}: {error}") from None
            check_range(rows, self.dtype, name)
            if rows.size:
                yield rows
            row += len(rows)

    def _in_rows(self, block: Array) -> Array | None:
        """A block as rows of the stored matrix; None if it does not fit."""
        n, inner = self.shape[1], self.array_shape[1:]
        if len(inner) > 1:
            block = block[np.newaxis] if block.shape == inner else block
            return block.reshape(len(block), n) if block.shape[1:] == inner else None
        if block.ndim == 1:
            block = block[:, np.newaxis] if n == 1 else block[np.newaxis, :]
        return block if block.ndim == 2 and block.shape[1] == n else None


def _theirs(blocks: Iterable[Any]) -> Iterator[Any]:
    """The blocks; an OSError of their maker is not taken for one of the transfer."""
    try:
        yield from blocks
    except OSError as error:
        raise SourceError(error) from error


def on_disk(source: Any) -> bool:
    """Whether it is an array of h5py or zarr, which would be read whole by `numpy.asarray`."""
    return type(source).__module__.partition(".")[0] in ON_DISK and hasattr(source, "__getitem__")


class DiskSource(IteratorSource):
    """An `h5py.Dataset` or a `zarr.Array`, read in pieces of whole chunks (`disk_source`)."""

    def _placed(self) -> Iterator[tuple[Array, Shape]]:
        source: Any = self.blocks
        for rows, cols in pieces(source, self.shape, READ_NBYTES):
            name = f"rows {rows.start} to {rows.stop} of {source!r}"
            try:
                key = (rows, cols) if len(self.array_shape) == 2 else rows  # else whole rows
                piece = np.asarray(source[key])
            except AlchemistError:
                raise
            except Exception as error:  # of the file library
                raise FileError(f"{name} cannot be read: {error}") from error
            check_range(piece, self.dtype, name)
            yield piece.reshape(rows.stop - rows.start, -1), (rows.start, cols.start)


def pieces(source: Any, shape: Shape, block: int) -> Iterator[tuple[slice, slice]]:
    """Rows and columns of pieces: whole chunks, of about `block` bytes if chunks are smaller."""
    chunks: Sequence[int] = getattr(source, "shards", None) or source.chunks or (1,)
    height, width = (*chunks, 1)[:2]
    m, n = shape
    tall = len(chunks) < 3  # of three axes and more, whole rows are read
    nbytes = source.dtype.itemsize
    rows = max(1, block // max(1, n * nbytes) // height) * height
    cols = n
    if tall and height * n * nbytes > BAND * block:  # tall chunks, for example of one column each
        cols = max(1, block // (height * nbytes) // width) * width
    for row in range(0, m, rows):
        for col in range(0, n, max(1, cols)):
            yield slice(row, min(row + rows, m)), slice(col, min(col + cols, n))


def disk_source(source: Any, wanted: Any) -> DiskSource:
    """How to send an `h5py.Dataset` or a `zarr.Array`. Raises `ShapeError`, `DtypeError`."""
    shape, dtype = getattr(source, "shape", None), getattr(source, "dtype", None)
    name = f"{source!r}"
    if shape is None or dtype is None:
        raise DtypeError(f"{name} is a group, not an array: choose an array inside it")
    if not 1 <= len(shape) <= MAX_AXES:
        raise ShapeError(f"{name} must have 1 to {MAX_AXES} axes, not {len(shape)}")
    chosen = chosen_dtype(np.dtype(dtype), wanted)
    origin = {"from": type(source).__module__.partition(".")[0], "array": name}
    return DiskSource(source, tuple(map(int, shape)), chosen, origin)
