"""Paths of files: the same file on all ranks, replaced in one step or not at all.

A matrix is saved under a hidden name in the same folder, flushed to the disk, and renamed when
every rank is done. Readers of the old file are not disturbed.
"""

from __future__ import annotations

import contextlib
import ctypes
import glob
import importlib
import mmap
import os
import re
import shutil
import stat
import traceback
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from ali.interface import Context
from mpi_workers.failures import Failure, Interrupted


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
        `copy_kernels.transposed`.
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


T = TypeVar("T")
_libc = ctypes.CDLL(None, use_errno=True)

AT_FDCWD = -100
RENAME_EXCHANGE = 2  # linux/fs.h: swap two names in one step
SYNC_FILE_RANGE_WRITE = 2
EXTRA = "pip install 'alchemist-on-ray[files]'"


def together(ctx: Context, path: str, work: Callable[[], T]) -> T:
    """Run `work` on every rank; if it fails on one, fail on all with the same error. Collective.

    `work` must not communicate. The error is that of the lowest rank, and names it. A file that
    `work` has opened on another rank is closed then.

    Raises
    ------
    Failure
        As `work` raised it; ResourceError for lack of memory; FileError for any other exception.
    """
    values: list[T] = []
    failure: Failure | None = None
    try:
        values.append(work())
    except Interrupted:
        raise
    except Exception as error:
        failure = _as_failure(path, error)
    told = ctx.comm.allgather(None if failure is None else failure.to_map())
    for rank, about in enumerate(told):
        if about is not None:
            about["facts"].update(rank=rank, path=path, agreed=True)
            about["message"] = f"{about['message']} (rank {rank})"
            for value in values:
                if hasattr(value, "close"):
                    with contextlib.suppress(Exception):  # the first error is reported
                        value.close()
            raise Failure.from_map(about)
    return values[0]


def _as_failure(path: str, error: Exception) -> Failure:
    if isinstance(error, Failure):
        return error
    if isinstance(error, MemoryError):
        return Failure("ResourceError", f"{path}: out of memory: {error}")
    if isinstance(error, OSError):
        return Failure("FileError", f"{path}: {error.strerror or error}")
    words = f"{path}: {type(error).__name__}: {error}"  # of a format's library, or a URL's
    return Failure("FileError", words, traceback=traceback.format_exc())


def on_rank_0(ctx: Context, path: str, work: Callable[[], T]) -> T | None:
    """`together`, of work that rank 0 does alone; None on other ranks."""
    return together(ctx, path, lambda: work() if ctx.rank == 0 else None)


def extra(path: str, module: str) -> Any:
    """Import a library that only some formats need.

    Raises
    ------
    Failure
        FileError, if it is not installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        if error.name != module.partition(".")[0]:
            raise
        raise Failure(
            "FileError", f"{path}: this format needs {error.name}, which is not installed: {EXTRA}"
        ) from None


# --- reading ---


@dataclass(frozen=True, slots=True)
class Place:
    """A path as the user gave it: on a file system that all nodes share, or a URL for fsspec.

    Attributes
    ----------
    path : str
    format : str
        The suffix of its format, if the path has none that says it.
    """

    path: str
    format: str = ""

    @property
    def is_url(self) -> bool:
        return "://" in self.path

    @property
    def suffix(self) -> str:
        return self.format or Path(self.path.rstrip("/")).suffix.lower()

    def filesystem(self) -> tuple[Any, str]:
        """fsspec's file system for a URL, and the path in it."""
        fs, inside = extra(self.path, "fsspec.core").url_to_fs(self.path)
        return fs, str(inside)

    def holds(self, ending: str) -> bool:
        """Whether it is a folder that has files with this ending."""
        with contextlib.suppress(Exception):  # opening it tells
            if self.is_url:
                fs, inside = self.filesystem()
                return any(name.endswith(ending) for name in fs.ls(inside, detail=False))
            return any(name.endswith(ending) for name in os.listdir(self.path))
        return False

    def members(self, ending: str) -> list[str]:
        """Paths of the files in a folder with this ending, in natural order; of a file, itself.

        Raises
        ------
        Failure
            FileError, if the folder has subfolders: their files would be left out silently.
        """
        if self.is_url:
            fs, inside = self.filesystem()
            if not fs.isdir(inside):
                return [inside]
            found = [(e["name"], e["type"] == "directory") for e in fs.ls(inside, detail=True)]
            found = [(n, folder) for n, folder in found if n.rstrip("/") != inside.rstrip("/")]
        elif os.path.isdir(self.path):
            found = [(entry.path, entry.is_dir()) for entry in os.scandir(self.path)]
        else:
            return [self.path]
        shown = [(name, folder) for name, folder in found if Path(name).name[0] not in "._"]
        for name, folder in shown:
            if folder:
                raise Failure(
                    "FileError",
                    f"{self.path} has subfolders ({Path(name).name}): a partitioned table is not "
                    "read; give the path of one folder of files",
                )
        return sorted((name for name, _ in shown if name.endswith(ending)), key=_natural)

    def seen(self) -> tuple[str, int, int]:
        """Kind, size in bytes and modification time, as this rank sees them."""
        if self.is_url:
            fs, inside = self.filesystem()
            about = fs.info(inside)
            return about["type"], int(about.get("size") or 0), 0
        # Opening makes a network file system refresh its attributes, and checks the permission.
        fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            about = os.fstat(fd)
            if stat.S_ISDIR(about.st_mode):
                return "directory", len(os.listdir(fd)), about.st_mtime_ns
            if not stat.S_ISREG(about.st_mode):
                raise Failure("FileError", f"{self.path} is neither a file nor a folder")
            return "file", about.st_size, about.st_mtime_ns
        finally:
            os.close(fd)

    def open(self) -> Bytes:
        """The file for reading at any offset."""
        return Bytes(self.path, self.filesystem() if self.is_url else None)


def _natural(path: str) -> list[str | int]:
    """Sorts part.2 before part.10, as Dask does."""
    parts: list[str | int] = [*re.split(r"(\d+)", Path(path).name)]
    parts[1::2] = map(int, parts[1::2])
    return parts


def agree_on(ctx: Context, place: Place) -> list[str]:
    """Check that all ranks see the same file; the node of each rank. Collective.

    Raises
    ------
    Failure
        FileError, if it is missing, cannot be read, or differs between nodes.
    """
    told: tuple[str, int, int] | str
    try:
        told = place.seen()
    except Exception as error:
        told = _as_failure(place.path, error).message
    everyone = ctx.comm.allgather((told, os.uname().nodename))
    errors = [(r, t, node) for r, (t, node) in enumerate(everyone) if isinstance(t, str)]
    if errors:
        rank, words, node = errors[0]
        if len(errors) < len(everyone):
            words += f", but other nodes have it: give a path that {node} sees too"
        raise Failure(
            "FileError", f"{words} (rank {rank})", rank=rank, path=place.path, agreed=True
        )
    for rank, (there, node) in enumerate(everyone):
        if there != everyone[0][0]:
            raise Failure(
                "FileError",
                f"{place.path} is not the same file on {everyone[0][1]} and on {node} (rank "
                f"{rank}): give a path that all nodes share, of a file that is not being written",
                rank=rank,
                path=place.path,
                agreed=True,
            )
    return [node for _, node in everyone]


# --- writing ---


def remove(path: str) -> None:
    """Remove a file or a folder and all names that begin with it; other ranks may do the same."""
    for found in glob.glob(glob.escape(path) + "*"):
        if os.path.isdir(found) and not os.path.islink(found):
            shutil.rmtree(found, ignore_errors=True)
        else:
            with contextlib.suppress(OSError):
                os.unlink(found)


def hidden(path: str, token: str) -> str:
    """The name under which a file or folder is written until it is complete."""
    whole = Path(path)
    return str(whole.parent / f".{whole.name}.{token}.part")


@contextlib.contextmanager
def replacing(
    ctx: Context, path: str, token: str | None, may_replace: Callable[[Path], bool]
) -> Iterator[str]:
    """Write under the yielded name; at the end of the block rename it to `path`. Collective.

    If a rank fails inside, the old file is unchanged. The block must end on all ranks alike.

    Parameters
    ----------
    path : str
        The final path; a symbolic link is followed.
    token : str, optional
        Makes the hidden name unique.
    may_replace : callable
        Whether an existing *folder* may be replaced.
    """
    path = os.path.realpath(path)
    token = ctx.comm.bcast(token or uuid.uuid4().hex[:12])
    temporary = hidden(path, token)

    def check() -> None:
        final = Path(path)
        if not final.parent.is_dir():
            raise Failure("FileError", f"{path}: the folder {final.parent} does not exist")
        if final.is_dir() and not may_replace(final):
            raise Failure(
                "FileError",
                f"{path} is a folder with other contents, which would be lost: choose another name "
                "or remove it first",
            )

    together(ctx, path, check)
    try:
        yield temporary
        on_rank_0(ctx, path, lambda: _publish(temporary, path))
    except BaseException:
        remove(temporary)  # on every rank: the last one removes all of it
        raise


def _publish(temporary: str, path: str) -> None:
    """Flush it to the disk, then put it in its place in one step."""
    for folder, _, names in os.walk(temporary):
        for name in names:
            flush(os.path.join(folder, name))
        flush(folder)
    if not os.path.isdir(temporary):
        flush(temporary)
    if os.path.isfile(path) and os.path.isfile(temporary):
        os.chmod(temporary, stat.S_IMODE(os.stat(path).st_mode))
    if os.path.isdir(path) or (os.path.exists(path) and os.path.isdir(temporary)):
        _swap(temporary, path)
        remove(temporary)
    else:
        os.replace(temporary, path)
    flush(os.path.dirname(path))


def flush(path: str) -> None:
    """Wait until a file's bytes, or a folder's names, are on the disk."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def begin_flush(fd: int, offset: int = 0, nbytes: int = 0) -> None:
    """Start writing the bytes (by default all) to the disk, without waiting."""
    _libc.sync_file_range(fd, ctypes.c_int64(offset), ctypes.c_int64(nbytes), SYNC_FILE_RANGE_WRITE)


def _swap(one: str, other: str) -> None:
    """Exchange two names, in one step where the file system can."""
    ends = [os.fsencode(one), os.fsencode(other)]
    if _libc.renameat2(AT_FDCWD, ends[0], AT_FDCWD, ends[1], RENAME_EXCHANGE) == 0:
        return
    aside = f"{one.removesuffix('.part')}.old"  # `remove` must not find it
    os.rename(other, aside)
    try:
        os.rename(one, other)
    except OSError:
        os.rename(aside, other)
        raise
    os.rename(aside, one)
