"""Elements that lie one after the other in a file, as in .npy and in contiguous HDF5 data sets."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ali.files.boxes import Box, Grain, Pick, gathered
from ali.files.formats import About
from ali.files.paths import Bytes, begin_flush
from mpi_workers.failures import Failure
from mpi_workers.layout import Shape

STRIP = 4 << 20  # 4 MiB: rows of which some columns are taken

Array = NDArray[Any]


class RawSource:
    """A C- or Fortran-ordered matrix from a byte of a file on.

    Whole rows (columns, in Fortran's order) are read, a stretch at a time, and the wanted
    elements taken.
    """

    def __init__(
        self, file: Bytes, offset: int, shape: Shape, dtype: np.dtype[Any], *, by_columns: bool
    ) -> None:
        nbytes = shape[0] * shape[1] * dtype.itemsize
        if file.size < offset + nbytes:
            raise Failure(
                "FileError",
                f"{file.path} is truncated: {shape[0]} x {shape[1]} elements of {dtype} from byte "
                f"{offset} on end at {offset + nbytes}, and the file at {file.size}",
            )
        self._file = file
        self._offset = offset
        self._shape = shape
        self._dtype = dtype
        self._by_columns = by_columns
        self._room = np.empty(0, np.uint8)

    def about(self, dtype: np.dtype[Any] | None, cols: Pick | None) -> About:
        return About(self._shape, self._dtype, Grain(by_columns=self._by_columns))

    def read(self, rows: Pick, cols: Pick) -> Array:
        if self._by_columns:
            return gathered(lambda r, c: self._lines(c, r, self._shape[0]).T, rows, cols)
        return gathered(lambda r, c: self._lines(r, c, self._shape[1]), rows, cols)

    def _lines(self, lines: range, part: range, length: int) -> Array:
        """A part of each of some consecutive lines of so many elements."""
        if len(part) == length:
            return self._whole(lines, length)
        out = np.empty((len(lines), len(part)), self._dtype)
        height = max(1, STRIP // (length * self._dtype.itemsize))
        for i in range(0, len(lines), height):
            strip = self._whole(lines[i : i + height], length)
            out[i : i + height] = strip[:, part.start : part.stop]
        return out

    def _whole(self, lines: range, length: int) -> Array:
        row_bytes = length * self._dtype.itemsize
        nbytes = len(lines) * row_bytes
        if self._room.nbytes < nbytes:
            self._room = np.empty(nbytes, np.uint8)
        room = self._room[:nbytes]
        start = self._offset + lines.start * row_bytes
        self._file.expect(start + nbytes, nbytes)  # sequential: most likely the next
        self._file.fill(room, start)
        return room.view(self._dtype).reshape(len(lines), length)

    def close(self) -> None:
        self._file.close()


class RawSink:
    """Boxes of whole rows, or parts of rows, of a C-ordered matrix from a byte of a file on."""

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
        first, view = offset, values.reshape(-1).view(np.uint8).data
        while view:
            put = os.pwrite(self._fd, view, offset)
            view = view[put:]
            offset += put
        begin_flush(self._fd, first, values.nbytes)

    def close(self) -> None:
        """Also waits until it is on the disk, so that a full one is noticed."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            try:
                os.fsync(fd)
            finally:
                os.close(fd)
