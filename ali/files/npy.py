"""NumPy's .npy, and other files of contiguous elements: HDF5's data sets, Zarr's chunks.

A .npy is a header, then the elements (numpy.lib.format, versions 1.0 to 3.0).
"""

from __future__ import annotations

import io
import os
from typing import Any, NamedTuple

import numpy as np
from numpy.lib import format as npy_format
from numpy.typing import NDArray

from ali.files.exchange import gathered
from ali.files.formats import About, Box, Format, Grain, Options, Pick, Spec, checked
from ali.files.paths import Bytes, Place, begin_flush
from mpi_workers.failures import Failure
from mpi_workers.matrix import copy_kernels
from mpi_workers.matrix.layout import ArrayShape, Shape, as_slice, stored_shape

STRIP = 4 << 20  # 4 MiB: lines read at once to select from them; more would leave the cache
APART = 4 << 10  # 4 KiB: reading a shorter gap costs less than skipping it

Array = NDArray[Any]


class Lines(NamedTuple):
    """Lines of `length` elements, and the bytes read for a part of some of them."""

    length: int
    itemsize: int

    def stretch(self, part: range) -> range:
        """The range of a line that is read: the hull of the part, or all of it."""
        ends = range(part.start, part[-1] + 1)
        short = (self.length - len(ends)) * self.itemsize < APART
        return range(self.length) if short else ends

    def skips(self, lines: range, stretch: range) -> bool:
        """Whether lines are read one by one, without the gaps between them."""
        return (lines.step * self.length - len(stretch)) * self.itemsize >= APART

    def toll(self, lines: range, part: range) -> int:
        """The number of bytes that are read."""
        stretch = self.stretch(part)
        count = len(lines) if self.skips(lines, stretch) else lines[-1] + 1 - lines.start
        return count * len(stretch) * self.itemsize


class RawSource:
    """A C- or Fortran-ordered matrix at an offset of a file, which is closed with this object.

    Its lines are rows, or columns in Fortran's order. `read` reads whole lines and selects from
    them; `take` skips long gaps.
    """

    def __init__(
        self, file: Bytes, offset: int, shape: ArrayShape, dtype: np.dtype[Any], *, by_columns: bool
    ) -> None:
        self._array_shape, shape = shape, stored_shape(shape)
        nbytes = shape[0] * shape[1] * dtype.itemsize
        if file.size < offset + nbytes:
            file.close()
            raise Failure(
                "FileError",
                f"{file.path} is truncated: {shape[0]} x {shape[1]} elements of {dtype} from byte "
                f"{offset} on end at {offset + nbytes}, and the file at {file.size}",
            )
        self._file = file
        self._offset = offset
        self._dtype = dtype
        self._by_columns = by_columns
        self._all = Lines(shape[0 if by_columns else 1], dtype.itemsize)
        self._room = np.empty(0, np.uint8)

    def about(self, dtype: np.dtype[Any] | None, cols: Pick | None) -> About:
        return About(
            self._array_shape,
            self._dtype,
            Grain(by_columns=self._by_columns),
            order="F" if self._by_columns else "C",
        )

    def read(self, rows: Pick, cols: Pick) -> Array:
        if self._by_columns:
            return gathered(lambda r, c: self._lines(c, r).T, rows, cols)
        return gathered(self._lines, rows, cols)

    def take(self, rows: range, cols: range, target: Array) -> None:
        """See `exchange.Direct`."""
        lines, part, target = (cols, rows, target.T) if self._by_columns else (rows, cols, target)
        large = target.nbytes > copy_kernels.CACHED_BYTES
        if not self._take_mapped(lines, part, target, large):
            self._take_strips(lines, part, target, large)

    def _take_strips(self, lines: range, part: range, target: Array, large: bool) -> None:
        """Copy a part of some lines, through a buffer."""
        stretch = self._all.stretch(part)
        between = 1 if self._all.skips(lines, stretch) else lines.step
        height = max(1, STRIP // (between * len(stretch) * self._dtype.itemsize))
        inside = slice(part.start - stretch.start, part[-1] + 1 - stretch.start, part.step)
        for i in range(0, len(lines), height):
            strip = self._strip(lines[i : i + height], stretch)
            copy_kernels.copy(target[i : i + len(strip)], strip[:, inside], stream=large)

    def _take_mapped(self, lines: range, part: range, target: Array, large: bool) -> bool:
        """Copy a part of some lines from the page cache, if possible; returns whether it was.

        Reading them into a buffer first would take twice as long.
        """
        row_bytes = self._all.length * self._dtype.itemsize
        start, stop = lines.start * row_bytes, (lines[-1] + 1) * row_bytes
        mapped = self._file.mapped(self._offset + start, self._offset + stop)
        if mapped is None:
            return False
        source = mapped.view(self._dtype).reshape(-1, self._all.length)
        try:
            strided = source[:: lines.step, as_slice(part)]
            return copy_kernels.transposed(target, strided, stream=large, mapped=True)
        except OSError as error:
            raise Failure("FileError", f"{self._file.path} cannot be read: {error}") from None

    def toll(self, rows: range, cols: range) -> int:
        """See `exchange.Direct`."""
        return self._all.toll(*((cols, rows) if self._by_columns else (rows, cols)))

    def _strip(self, lines: range, stretch: range) -> Array:
        """A stretch of each of some lines; valid until the next call."""
        if not self._all.skips(lines, stretch):
            return self._whole(range(lines.start, lines[-1] + 1))[:: lines.step]
        row_bytes, first = (
            self._all.length * self._dtype.itemsize,
            stretch.start * self._dtype.itemsize,
        )
        strip = self._rows(len(lines), len(stretch))
        start = self._offset + lines.start * row_bytes + first
        self._file.fill_rows(strip, start, lines.step * row_bytes)
        return strip.view(self._dtype)

    def _lines(self, lines: range, part: range) -> Array:
        """A part of each of some consecutive lines."""
        if len(part) == self._all.length:
            return self._whole(lines)
        out = np.empty((len(lines), len(part)), self._dtype)
        self._take_strips(lines, part, out, large=False)
        return out

    def _whole(self, lines: range) -> Array:
        room = self._rows(len(lines), self._all.length)
        start = self._offset + lines.start * self._all.length * self._dtype.itemsize
        self._file.fill(room, start)
        return room.view(self._dtype)

    def _rows(self, count: int, length: int) -> NDArray[np.uint8]:
        """Memory for `count` lines of `length` elements, reused by the next call."""
        nbytes = count * length * self._dtype.itemsize
        if self._room.nbytes < nbytes:
            self._room = np.empty(nbytes, np.uint8)
        return self._room[:nbytes].reshape(count, -1)

    def close(self) -> None:
        self._file.close()


class RawSink:
    """Writes boxes of a C-ordered matrix at an offset of a file."""

    def __init__(self, path: str, offset: int, shape: Shape, dtype: np.dtype[Any]) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
        self._offset = offset
        self._cols = shape[1]
        self._itemsize = dtype.itemsize

    def write(self, box: Box, values: Array) -> None:
        row_bytes = self._cols * self._itemsize
        first = self._offset + box.rows.start * row_bytes + box.cols.start * self._itemsize
        if len(box.cols) == self._cols:
            self._put(values, first)
            return
        for i, row in enumerate(values):
            self._put(row, first + i * row_bytes)

    def _put(self, values: Array, offset: int) -> None:
        first = offset
        view = values.reshape(-1).view(np.uint8).data
        while view:
            put = os.pwrite(self._fd, view, offset)
            view = view[put:]
            offset += put
        begin_flush(self._fd, first, values.nbytes)

    def close(self) -> None:
        """Flush to the disk: a full disk is noticed here, and each rank flushes its own writes."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            try:
                os.fsync(fd)
            finally:
                os.close(fd)


class RawFormat(Format):
    """Common code to write formats that are one file with all elements contiguous.

    Their `create` returns the offset of the elements in the file.
    """

    any_axes = True

    def grain(self, spec: Spec) -> Grain:
        return Grain()

    def sink(self, path: str, spec: Spec, created: Any, rank: int) -> RawSink:
        return RawSink(path, created, spec.shape, spec.dtype)


NPY_HEADER_NBYTES = 64 << 10  # 64 KiB: none that NumPy writes of numbers is longer


class Npy(RawFormat):
    def look(self, place: Place, options: Options) -> RawSource:
        file = place.open()
        try:
            head = io.BytesIO(file.read(0, min(NPY_HEADER_NBYTES, file.size)))
            try:
                version = npy_format.read_magic(head)
                reader = (
                    npy_format.read_array_header_1_0
                    if version == (1, 0)
                    else npy_format.read_array_header_2_0
                )
                shape, by_columns, dtype = reader(head)
            except (ValueError, EOFError, SyntaxError) as error:
                raise Failure("FileError", f"{place.path} is not a .npy file: {error}") from None
            shape = checked(shape, dtype, place.path)
            if by_columns and len(shape) > 2:
                raise Failure(
                    "ShapeError",
                    f"{place.path}: an array of shape {shape} in Fortran's order: save it with "
                    "np.save(path, np.ascontiguousarray(x))",
                )
            return RawSource(file, head.tell(), shape, dtype, by_columns=by_columns)
        except BaseException:
            file.close()
            raise

    def create(self, path: str, spec: Spec, old: str) -> int:
        with open(path, "xb") as file:
            npy_format.write_array_header_1_0(
                file, {"descr": spec.dtype.str, "fortran_order": False, "shape": spec.array_shape}
            )
            offset = file.tell()
            file.truncate(offset + spec.shape[0] * spec.shape[1] * spec.dtype.itemsize)
        return offset


FORMAT = Npy()
