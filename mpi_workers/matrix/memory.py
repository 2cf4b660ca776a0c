"""Memory that other processes of the node can map, recycled because first touch is slow.

Fresh pages cost ten times a warm copy, so blocks come from a pool of memfd
segments. A segment returns to its pool when the last array that looks at it is
gone. A memfd has no name: nothing is left behind when a process is killed.
"""

from __future__ import annotations

import errno
import fcntl
import itertools
import mmap
import os
import threading
import weakref
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpi_workers.failures import Failure

PAGE = mmap.PAGESIZE
SAFE = 1 << 20  # 1 MiB: below this a new segment is not worth a look at what is free
SMALL = 1 << 16  # 64 KiB: below this a recycled segment may be any number of times too big

_ids = itertools.count(1)


def available_bytes() -> int:
    """Bytes that this node can still give: the kernel's estimate, and the cgroup's limit."""
    fields = dict(
        line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines() if ":" in line
    )
    available = int(fields["MemAvailable"].split()[0]) << 10
    for limit, used in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        (
            "/sys/fs/cgroup/memory/memory.limit_in_bytes",
            "/sys/fs/cgroup/memory/memory.usage_in_bytes",
        ),
    ):
        try:
            bound = Path(limit).read_text().strip()
            if bound.isdigit():
                available = min(available, int(bound) - int(Path(used).read_text()))
        except OSError:
            continue
    return max(0, available)


def readable(nbytes: float) -> str:
    """``"1.5 GB"``: bytes for people, in decimal units."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if nbytes < 1000 or unit == "TB":
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1000
    raise AssertionError("unreachable")


class Segment:
    """Mapped memory with all its pages present: a memfd, or private to this process."""

    __slots__ = ("fd", "id", "map", "nbytes", "tainted")

    def __init__(self, nbytes: int, *, shared: bool) -> None:
        self.id = next(_ids)
        self.nbytes = max(PAGE, -(-nbytes // PAGE) * PAGE)
        self.tainted = False
        self.fd = -1
        try:
            # The kernel would fill the node and kill somebody before it says no.
            if self.nbytes > SAFE and self.nbytes > available_bytes():
                raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
            if not shared:
                flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE
                self.map = mmap.mmap(-1, self.nbytes, flags=flags)
                return
            self.fd = os.memfd_create("alchemist", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            # Allocated now, so that a lack of memory is an error here and not a SIGBUS later.
            os.posix_fallocate(self.fd, 0, self.nbytes)
            # Whoever maps it can write, but not pull the pages from under the rank.
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
            self.map = mmap.mmap(self.fd, self.nbytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
        except OSError as error:
            self.close()
            if error.errno in (errno.ENOMEM, errno.ENOSPC, errno.EFBIG, errno.EMFILE, errno.ENFILE):
                raise Failure(
                    "ResourceError",
                    f"no room for a block of {readable(nbytes)} on this node: {error.strerror}",
                ) from error
            raise

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)  # the mapping goes with its last view


class MemoryBlock:
    """A stretch of a segment, lent to whoever holds this object or an array made from it."""

    def __init__(self, segment: Segment, nbytes: int) -> None:
        self.segment = segment
        self.nbytes = nbytes
        view = np.frombuffer(segment.map, dtype=np.uint8, count=max(1, nbytes))
        self.__array_interface__: dict[str, Any] = view.__array_interface__

    def array(self) -> NDArray[np.uint8]:
        """The bytes; the array (and every view of it) keeps this block lent."""
        return np.asarray(self)[: self.nbytes]

    def matrix(self, shape: tuple[int, int], dtype: np.dtype[Any]) -> NDArray[Any]:
        """The bytes as a Fortran-ordered matrix of `shape`."""
        return self.array().view(dtype).reshape(shape, order="F")

    def taint(self) -> None:
        """Never recycle this segment: another process may still write into it."""
        self.segment.tainted = True


class Pool:
    """Lends blocks and keeps returned segments warm, up to `keep_bytes`.

    Parameters
    ----------
    keep_bytes : int
        Most bytes kept for reuse; what is over is given back to the system.
    shared : bool
        Whether other processes may map the segments (by file descriptor).
    """

    def __init__(self, keep_bytes: int, *, shared: bool) -> None:
        self.keep_bytes = keep_bytes
        self.shared = shared
        self._lock = threading.Lock()
        self._idle: list[Segment] = []
        # Finalizers may run anywhere, even inside `take`: they only append here.
        self._returned: deque[Segment] = deque()
        self._live: set[int] = set()

    def take(self, nbytes: int) -> MemoryBlock:
        """A block of `nbytes`, from a warm segment where one fits.

        Raises
        ------
        Failure
            ResourceError, if the system has no memory for it.
        """
        with self._lock:
            self._settle()
            segment = self._fitting(nbytes)
            if segment is not None:
                self._idle.remove(segment)
        if segment is None:  # fresh pages take their time: others must not wait for them
            segment = Segment(nbytes, shared=self.shared)
            with self._lock:
                self._live.add(segment.id)
        block = MemoryBlock(segment, nbytes)
        weakref.finalize(block, self._returned.append, segment).atexit = False
        return block

    def has_warm(self, nbytes: int) -> bool:
        """Whether `take` would find a warm segment."""
        with self._lock:
            self._settle()
            return self._fitting(nbytes) is not None

    def _fitting(self, nbytes: int) -> Segment | None:
        """The smallest warm segment that holds `nbytes` without much waste."""
        fitting = [
            s for s in self._idle
            if s.nbytes >= nbytes and (s.nbytes <= SMALL or s.nbytes <= nbytes + nbytes // 4)
        ]  # fmt: skip
        return min(fitting, key=lambda s: s.nbytes, default=None)

    def is_live(self, segment_id: int) -> bool:
        """Whether a segment of this pool still exists (lent or warm)."""
        with self._lock:
            self._settle()
            return segment_id in self._live

    def idle_bytes(self) -> int:
        """Bytes kept warm that nothing uses."""
        with self._lock:
            self._settle()
            return sum(segment.nbytes for segment in self._idle)

    def trim(self, keep_bytes: int = 0) -> None:
        """Give warm memory back to the system until at most `keep_bytes` are kept."""
        with self._lock:
            self._settle()
            self._trim(keep_bytes)

    def _settle(self) -> None:
        while self._returned:
            segment = self._returned.popleft()
            if segment.tainted:
                self._drop(segment)
            else:
                self._idle.append(segment)
        self._trim(self.keep_bytes)

    def _trim(self, keep_bytes: int) -> None:
        kept = sum(segment.nbytes for segment in self._idle)
        while self._idle and kept > keep_bytes:
            segment = self._idle.pop(0)  # the one that has been idle longest
            kept -= segment.nbytes
            self._drop(segment)

    def _drop(self, segment: Segment) -> None:
        self._live.discard(segment.id)
        segment.close()
