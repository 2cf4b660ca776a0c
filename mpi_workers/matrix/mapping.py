"""Memory mapped at addresses where huge pages fit, and filled with them.

A process that maps huge pages has one page table entry and one page fault for each 2 MiB. Without
privileges a memfd gets them by MADV_COLLAPSE, wherever ``shmem_enabled`` is ``never``.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import weakref
from typing import Any

import numpy as np
from numpy.typing import NDArray

HUGE_BYTES = 2 << 20  # 2 MiB
PROT_NONE, MAP_FIXED = 0, 0x10
MADV_POPULATE_WRITE = 23  # Linux 5.14
MADV_COLLAPSE = 25  # Linux 6.1

_libc: Any = None
if os.name == "posix":  # a thin client elsewhere maps nothing
    _libc = ctypes.CDLL(None, use_errno=True)
    _libc.mmap.restype = ctypes.c_void_p
    _libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *3 * [ctypes.c_int], ctypes.c_long]
    _libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    _libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_FAILED = ctypes.c_void_p(-1).value


class _Mapping:
    """Mapped bytes, until this object and all its arrays are deleted."""

    def __init__(self, nbytes: int, flags: int, fd: int) -> None:
        self.nbytes = nbytes
        protection = mmap.PROT_READ | mmap.PROT_WRITE
        if nbytes < HUGE_BYTES:
            start = self.address = _map(None, nbytes, protection, flags, fd)
            reserved = nbytes
        else:  # reserve addresses, and map at the first aligned one
            reserved = nbytes + HUGE_BYTES
            start = _map(None, reserved, PROT_NONE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1)
            self.address = -(-start // HUGE_BYTES) * HUGE_BYTES
            try:
                _map(self.address, nbytes, protection, flags | MAP_FIXED, fd)
            except OSError:
                _libc.munmap(start, reserved)
                raise
        weakref.finalize(self, _libc.munmap, start, reserved).atexit = False
        self.__array_interface__: dict[str, Any] = {
            "data": (self.address, False),
            "shape": (nbytes,),
            "typestr": "|u1",
            "version": 3,
        }

    def array(self) -> NDArray[np.uint8]:
        """The bytes; the array (and every view of it) keeps the mapping."""
        return np.asarray(self)

    def advise(self, advice: int) -> None:
        """Call madvise on all bytes. Raises `OSError`."""
        if _libc.madvise(self.address, self.nbytes, advice):
            raise _error()


class SharedMapping(_Mapping):
    """Bytes of a memfd, which may be closed afterwards. Raises `OSError`."""

    def __init__(self, fd: int, nbytes: int) -> None:
        super().__init__(nbytes, mmap.MAP_SHARED, fd)

    def allocate(self, fd: int) -> None:
        """Allocate all pages now, huge ones where the kernel has them.

        Raises
        ------
        OSError
            If there is not enough memory, which would be a SIGBUS later.
        """
        for offset in range(0, self.nbytes - HUGE_BYTES + 1, HUGE_BYTES):
            os.posix_fallocate(fd, offset, 1)  # a page of each can be collapsed
        if self.nbytes >= HUGE_BYTES:
            with contextlib.suppress(OSError):  # an older kernel, or no huge page is free
                self.advise(MADV_COLLAPSE)
        os.posix_fallocate(fd, 0, self.nbytes)
        self.populate()

    def populate(self) -> None:
        """Map all pages now, if the kernel can; else page faults do it."""
        with contextlib.suppress(OSError):
            self.advise(MADV_POPULATE_WRITE)


class PrivateMapping(_Mapping):
    """Anonymous memory of this process, with all pages present. Raises `OSError`."""

    def __init__(self, nbytes: int) -> None:
        super().__init__(nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1)
        with contextlib.suppress(OSError):
            self.advise(mmap.MADV_HUGEPAGE)
        try:
            self.advise(MADV_POPULATE_WRITE)
        except OSError:  # Linux < 5.14
            self.array()[:: mmap.PAGESIZE] = 0


def _map(address: int | None, nbytes: int, protection: int, flags: int, fd: int) -> int:
    found = _libc.mmap(address, nbytes, protection, flags, fd, 0)
    if found is None or found == _FAILED:
        raise _error()
    return int(found)


def _error() -> OSError:
    number = ctypes.get_errno()
    return OSError(number, os.strerror(number))
