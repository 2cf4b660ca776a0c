"""Matrices that are never whole in this process: iterators of row blocks, arrays on disk.

One block is here at a time. It is cut by layout and sent before the next is asked for; the
object store has no part in it.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from alchemist_ray.dtypes import check_range, check_unmasked, chosen_dtype
from alchemist_ray.errors import (
    AlchemistError,
    DtypeError,
    FileError,
    IncompleteMatrixError,
    ShapeError,
)
from alchemist_ray.gang.connection import GangConnection
from mpi_workers.data.description import NodeTimes, TransferTarget, add_times
from mpi_workers.data.transfers import MatrixWriter, Progress
from mpi_workers.matrix.layout import MAX_AXES, ArrayShape, Shape, stored_shape

BLOCK = 16 << 20  # 16 MiB: read at once; smaller blocks are collected up to it
BAND = 8  # times BLOCK: a row of chunks that is larger is read in several pieces
ON_DISK = ("h5py", "zarr")  # modules whose arrays are read in pieces

Array = NDArray[Any]


class SourceError(Exception):
    """An error of the user's own iterator, on its way through a transfer."""

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


class IteratorSource:
    """A matrix that an iterator yields in blocks of whole rows, from the first row on.

    Parameters
    ----------
    blocks : iterable of array_like, shapes (k, n) or (n,)
        Read once, from the front.
    shape : (int, int)
        Of the whole.
    dtype : numpy.dtype
        Of the matrix. Blocks are converted to it.
    origin : dict
        Where it comes from, for the gang's record.
    array_shape : tuple of int
    """

    columns: Sequence[str] = ()

    def __init__(
        self,
        blocks: Iterable[Any],
        array_shape: ArrayShape,
        dtype: np.dtype[Any],
        origin: dict[str, Any],
    ) -> None:
        self._blocks = blocks
        self._origin = origin
        self.array_shape = array_shape
        self.shape: Shape = stored_shape(array_shape)
        self.dtype = dtype

    @classmethod
    def inspect(cls, blocks: Any, shape: Any, wanted: Any) -> IteratorSource:
        """A plan for what a user gave. Raises `ShapeError`, `DtypeError`."""
        try:
            lengths = tuple(map(operator.index, shape))
        except TypeError:
            lengths = ()
        if len(lengths) not in (1, 2):
            raise ShapeError(f"shape={shape!r}: it must be (rows, columns) or (elements,)")
        if min(lengths) < 0:
            raise ShapeError(f"shape={shape!r}: a length is negative")
        try:
            given = np.dtype(wanted)
        except TypeError:
            raise DtypeError(f"{wanted!r} is not a dtype") from None
        if isinstance(blocks, np.ndarray | str | bytes | dict) or not isinstance(blocks, Iterable):
            raise ShapeError(
                f"send_blocks takes an iterable of arrays, not a {type(blocks).__name__}: send an "
                "array with send_matrix"
            )
        dtype = chosen_dtype(given, given)
        return cls(blocks, lengths, dtype, {"from": "blocks"})

    def provenance(self) -> dict[str, Any]:
        return {
            **self._origin, "dtype": self.dtype.name, "shape": list(self.array_shape)
        }  # fmt: skip

    def send(
        self, connection: GangConnection, target: TransferTarget, progress: Progress | None
    ) -> dict[int, NodeTimes]:
        """Every block, one after the other.

        Nothing of the gang is held while the next is made: it may be made from matrices there.
        """
        times: dict[int, NodeTimes] = {}
        for block, place in self._placed():
            with MatrixWriter(
                connection.nodes, target, progress, connection.options.buffer_bytes
            ) as writer:
                writer.write_block(block, place)
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
        most = max(1, BLOCK // max(1, self.shape[1] * self.dtype.itemsize))
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
        (m, n), row = self.shape, 0
        for number, block in enumerate(_theirs(self._blocks)):
            check_unmasked(block, f"block {number} (row {row})")
            try:
                array = np.asarray(block)
            except (ValueError, TypeError) as error:
                raise ShapeError(f"block {number} is not an array: {error}") from None
            if array.ndim == 1:
                array = array[:, np.newaxis] if n == 1 else array[np.newaxis, :]
            if array.ndim != 2 or array.shape[1] != n:
                raise ShapeError(
                    f"block {number} (row {row}) has shape {np.shape(block)}: its rows must have "
                    f"{n} elements"
                )
            if row + len(array) > m:
                raise ShapeError(
                    f"block {number} ends at row {row + len(array)}; shape= has {m} rows"
                )
            try:
                chosen_dtype(array.dtype, self.dtype)
            except DtypeError as error:
                raise DtypeError(f"block {number} (row {row}): {error}") from None
            check_range(array, self.dtype, f"block {number} (row {row})")
            if array.size:
                yield array
            row += len(array)


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
        source: Any = self._blocks
        for rows, cols in pieces(source, self.shape, BLOCK):
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
