"""Reading ranges of bytes of files and of objects behind URLs."""

from __future__ import annotations

import mmap
import os
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpi_workers.failures import Failure


class Bytes:
    """A file, or an object behind a URL, open for reading at any offset.

    Parameters
    ----------
    path : str
    remote : (fsspec file system, str), optional
        The file system of a URL, and the path in it.
    """

    def __init__(self, path: str, remote: tuple[Any, str] | None) -> None:
        self.path = path
        self._fd = -1
        self._file: Any = None
        if remote is not None:
            fs, inside = remote
            self._file = fs.open(inside, "rb")
            self.size = int(fs.size(inside))
        else:
            self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            self.size = os.fstat(self._fd).st_size

    def fill(self, room: NDArray[Any], offset: int) -> None:
        """Fill a contiguous array with the bytes from `offset` on.

        Raises
        ------
        Failure
            FileError if the file ends before.
        """
        self._fill(room.reshape(-1).view(np.uint8).data, offset)

    def mapped(self, start: int, stop: int) -> NDArray[np.uint8] | None:
        """The bytes of a half-open range as they are in the page cache; None for a URL.

        Reading them raises SIGBUS if the file is truncated or its disk fails: read them by
        `copy_kernels.copy_mapped`.
        """
        if self._fd < 0:
            return None
        before = start % mmap.ALLOCATIONGRANULARITY
        try:
            pages = mmap.mmap(
                self._fd, stop - start + before, prot=mmap.PROT_READ, offset=start - before
            )
        except (ValueError, OSError):  # shorter than before, or not on a file system that maps
            return None
        return np.frombuffer(pages, np.uint8)[before:]

    def fill_rows(self, rooms: NDArray[np.uint8], offset: int, apart: int) -> None:
        """Fill each row of a contiguous array: the first from `offset` on, others `apart` bytes on.

        Raises `Failure` as `fill` does.
        """
        count, nbytes = rooms.shape
        flat = rooms.reshape(-1).data
        for start in range(0, count * nbytes, nbytes):
            room = flat[start : start + nbytes]
            # Reading a row may take a microsecond: keep the overhead small.
            if self._fd < 0 or os.preadv(self._fd, [room], offset) < nbytes:
                self._fill(room, offset)
            offset += apart

    def _fill(self, view: memoryview, offset: int) -> None:
        while view:
            if self._file is not None:
                self._file.seek(offset)
                got = self._file.readinto(view)
            else:
                got = os.preadv(self._fd, [view], offset)
            if not got:
                raise Failure(
                    "FileError",
                    f"{self.path} is truncated: it ends at byte {offset}, but {len(view)} more "
                    "bytes are needed",
                )
            view = view[got:]
            offset += got

    def read(self, start: int, stop: int) -> bytes:
        """The bytes of a half-open range."""
        room = np.empty(stop - start, np.uint8)
        self.fill(room, start)
        return room.tobytes()

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        if self._file is not None:
            self._file.close()

    def __enter__(self) -> Bytes:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
