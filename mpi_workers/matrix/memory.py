"""Memory that other processes of the node can map, kept warm because first touch is slow.

Fresh pages cost ten times a warm copy, so blocks come from a pool of memfd segments. A segment
returns to its pool when the last array on it is deleted, and to the system when it has been idle
for `IDLE_S`. A memfd has no name: nothing remains when a process is killed.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import mmap
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from mpi_workers.failures import Failure
from mpi_workers.matrix.available_memory import available_bytes
from mpi_workers.matrix.mapping import PrivateMapping, SharedMapping
from mpi_workers.matrix.sizes import readable

PAGE = mmap.PAGESIZE
UNCHECKED_BYTES = 1 << 20  # 1 MiB: up to this size free memory is not checked
ANY_FIT_BYTES = 1 << 16  # 64 KiB: a warm segment up to this size may be any number of times too big
IDLE_S = 30.0  # warm memory is returned to the system after this time
SHORTAGE_POLL_S = 0.1  # while there is idle memory

_ids = itertools.count(1)


def number_segments(first: int) -> None:
    """Give the segments of this process numbers from `first` on.

    Clients keep mappings by rank and number, so ranks that are started again use others.
    """
    global _ids
    _ids = itertools.count(first)


class Segment:
    """Mapped memory: a memfd, or private to this process.

    Parameters
    ----------
    nbytes : int
    shared : bool
        Whether it is a memfd. All pages of new memory are present.
    held : (int, int), optional
        Number and file descriptor of a segment of a rank that has ended, which becomes this one.
    """

    __slots__ = ("fd", "id", "memory", "nbytes", "pid", "tainted", "unpin")

    def __init__(self, nbytes: int, *, shared: bool, held: tuple[int, int] | None = None) -> None:
        self.id, self.fd = (next(_ids), -1) if held is None else held
        self.pid = os.getpid()
        self.nbytes = max(PAGE, -(-nbytes // PAGE) * PAGE)
        self.tainted = False
        self.unpin: Callable[[], object] | None = None  # if a GPU's driver knows the pages
        if held is not None:
            self.memory: SharedMapping | PrivateMapping = SharedMapping(self.fd, self.nbytes)
            return
        try:
            # The allocation would succeed and trigger the OOM killer later.
            if self.nbytes > UNCHECKED_BYTES and self.nbytes > available_bytes():
                raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
            if not shared:
                self.memory = PrivateMapping(self.nbytes)
                return
            self.fd = os.memfd_create("alchemist", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            os.ftruncate(self.fd, self.nbytes)
            # Processes that map it can write, but not remove the rank's pages.
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
            self.memory = SharedMapping(self.fd, self.nbytes)
            self.memory.allocate(self.fd)
        except OSError as error:
            self.close()
            if error.errno in (errno.ENOMEM, errno.ENOSPC, errno.EFBIG, errno.EMFILE, errno.ENFILE):
                raise Failure(
                    "ResourceError",
                    f"not enough memory on this node for a block of {readable(nbytes)}: "
                    f"{error.strerror}",
                ) from error
            raise

    def release(self) -> None:
        """Return the pages to the system, also those that other processes still map."""
        if self.unpin is not None:
            self.unpin()
            self.unpin = None
        if self.fd >= 0:
            with contextlib.suppress(OSError):
                self.memory.advise(mmap.MADV_REMOVE)
        self.close()

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)  # the mapping ends with its last view


class MemoryBlock:
    """A part of a segment, lent until this object and all arrays made from it are deleted.

    Attributes
    ----------
    steady : bool
        Whether nothing changes the bytes before the end of the call under way.
    copy : (tensor, int), optional
        The bytes as elements on the rank's GPU, and the tensor's version at that time; see
        `mpi_workers.matrix.device`.
    """

    def __init__(self, segment: Segment, nbytes: int) -> None:
        self.segment = segment
        self.nbytes = nbytes
        self.steady = False
        self.copy: tuple[Any, int] | None = None
        self.__array_interface__: dict[str, Any] = {
            **segment.memory.__array_interface__,
            "shape": (max(1, nbytes),),
        }

    def array(self) -> NDArray[np.uint8]:
        """The bytes; the array (and every view of it) keeps this block lent."""
        return np.asarray(self)[: self.nbytes]

    def matrix(self, shape: tuple[int, int], dtype: np.dtype[Any]) -> NDArray[Any]:
        """The bytes as a Fortran-ordered matrix of `shape`."""
        return self.array().view(dtype).reshape(shape, order="F")


class Keeper(Protocol):
    """Has the file descriptors of a pool's segments, which outlive this process then."""

    def keep(self, segment: Segment) -> None:
        """A segment has been made. Raises `Failure` (ResourceError) if there are too many."""

    def drop(self, number: int) -> None:
        """A segment has been returned to the system."""


class Pool:
    """Lends blocks and keeps returned segments warm, for `IDLE_S` and up to `keep_bytes`.

    Parameters
    ----------
    keep_bytes : int
        Most bytes kept for reuse.
    shared : bool
        Whether other processes may map the segments (by file descriptor).
    shortages : callable() -> int, optional
        A counter of requests to return all idle memory.

    Attributes
    ----------
    keeper : Keeper or None
    """

    def __init__(
        self, keep_bytes: int, *, shared: bool, shortages: Callable[[], int] | None = None
    ) -> None:
        self.keep_bytes = keep_bytes
        self.shared = shared
        self.keeper: Keeper | None = None
        self._shortages = shortages
        self._lock = threading.Lock()
        self._idle: dict[Segment, float] = {}  # when they came back, oldest first
        # Finalizers may run anywhere, even inside `take`: they only append here.
        self._returned: deque[Segment] = deque()
        self._large_returned: SimpleQueue[None] = SimpleQueue()
        self._count = 0  # of segments, lent or idle
        self._trimmer: threading.Thread | None = None
        _pools.add(self)

    def take(self, nbytes: int) -> MemoryBlock:
        """A block of `nbytes`, from a warm segment if one fits.

        Raises
        ------
        Failure
            ResourceError, if there is not enough memory.
        """
        with self._lock:
            self._collect()
            segment = self._fitting(nbytes)
            if segment is not None:
                del self._idle[segment]
        created = segment is None
        if segment is None:  # without the lock: page faults take long
            segment = Segment(nbytes, shared=self.shared)
            self._keep(segment)
        return self._lend(segment, nbytes, created=created)

    def adopt(self, number: int, fd: int, nbytes: int) -> MemoryBlock:
        """A block of `nbytes` in a segment of a rank that has ended, with its elements.

        Raises
        ------
        OSError
            If it is smaller, or cannot be mapped.
        """
        there = os.fstat(fd).st_size
        if nbytes > there:
            raise OSError(errno.EINVAL, f"segment {number} has {there} bytes, not {nbytes}")
        return self._lend(Segment(there, shared=True, held=(number, fd)), nbytes, created=True)

    def _keep(self, segment: Segment) -> None:
        if self.keeper is not None:
            try:
                self.keeper.keep(segment)
            except Failure:
                segment.release()
                raise

    def _lend(self, segment: Segment, nbytes: int, *, created: bool) -> MemoryBlock:
        with self._lock:
            self._count += created
            if segment.nbytes > UNCHECKED_BYTES:
                self._start_trimmer()
        block = MemoryBlock(segment, nbytes)
        weakref.finalize(block, self._give_back, segment).atexit = False
        return block

    def _give_back(self, segment: Segment) -> None:
        if segment.pid != os.getpid():
            return  # in a forked child: the parent still uses the pages
        self._returned.append(segment)
        if segment.nbytes > UNCHECKED_BYTES:
            self._large_returned.put(None)

    def has_warm(self, nbytes: int) -> bool:
        """Whether `take` would find a warm segment."""
        with self._lock:
            self._collect()
            return self._fitting(nbytes) is not None

    def _fitting(self, nbytes: int) -> Segment | None:
        """The smallest warm segment that holds `nbytes` without much waste."""
        limit = max(ANY_FIT_BYTES, nbytes + nbytes // 4)
        fitting = [segment for segment in self._idle if nbytes <= segment.nbytes <= limit]
        return min(fitting, key=lambda segment: segment.nbytes, default=None)

    def idle_bytes(self) -> int:
        """Bytes that are kept warm and not in use."""
        with self._lock:
            self._collect()
            return sum(segment.nbytes for segment in self._idle)

    def trim(self, keep_bytes: int = 0, idle_s: float = 0.0) -> int:
        """Return warm memory to the system.

        Parameters
        ----------
        keep_bytes : int
            Keep at most this many bytes, those that were used last.
        idle_s : float
            Keep segments that came back in this time.

        Returns
        -------
        int
            Bytes returned.
        """
        with self._lock:
            self._collect()
            return self._trim(keep_bytes, time.monotonic() - idle_s)

    def _collect(self) -> None:
        while self._returned:
            segment = self._returned.popleft()
            self._idle[segment] = time.monotonic()
            if segment.tainted:
                self._drop(segment)
        self._trim(self.keep_bytes, time.monotonic())

    def _trim(self, keep_bytes: int, before: float) -> int:
        kept = sum(segment.nbytes for segment in self._idle)
        dropped = 0
        for segment, since in list(self._idle.items()):
            if kept - dropped <= keep_bytes or since > before:
                break
            dropped += segment.nbytes
            self._drop(segment)
        return dropped

    def _drop(self, segment: Segment) -> None:
        del self._idle[segment]
        self._count -= 1
        segment.release()
        if self.keeper is not None:
            self.keeper.drop(segment.id)

    def _start_trimmer(self) -> None:
        if self._trimmer is None or not self._trimmer.is_alive():
            self._trimmer = threading.Thread(target=self._trim_idle, daemon=True)
            self._trimmer.start()

    def _trim_idle(self) -> None:
        """Return segments that have been idle for `IDLE_S`; ends when none is left."""
        while True:
            self._large_returned.get()  # without a time limit: an unused pool costs nothing
            while self.idle_bytes():
                self.trim(idle_s=0.0 if self._short_within(IDLE_S / 2) else IDLE_S)
            with self._lock:
                if not self._count and not self._returned:
                    self._trimmer = None
                    return

    def _short_within(self, seconds: float) -> bool:
        """Whether memory becomes short in this time."""
        if self._shortages is None:
            time.sleep(seconds)
            return False
        before = self._shortages()
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            time.sleep(SHORTAGE_POLL_S)
            if self._shortages() != before:
                return True
        return False

    def after_fork(self) -> None:
        """In a forked child: another thread of the parent may have held the lock."""
        self._lock = threading.Lock()
        self._trimmer = self.keeper = None
        if self.shared:  # its segments are the parent's: releasing one would clear the parent's
            self._idle.clear()
            self._returned.clear()


_pools: weakref.WeakSet[Pool] = weakref.WeakSet()


def _after_fork() -> None:
    for pool in list(_pools):
        pool.after_fork()


os.register_at_fork(after_in_child=_after_fork)
