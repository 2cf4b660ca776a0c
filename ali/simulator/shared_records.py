"""The rank's end of the memory in which it leaves records for the environment's process."""

from __future__ import annotations

import mmap
import os
from typing import Any

import numpy as np

HEADER = 64  # bytes before the records; they begin with the mark


def open_shared(address: str | None, size: int) -> np.ndarray[Any, Any] | None:
    """`size` bytes in memory of a process on this node; None if it is not here.

    Parameters
    ----------
    address : str or None
        ``"PATH MARK"``: a file descriptor of that process below ``/proc``, and the hexadecimal
        bytes at its beginning. The same path on another node is another file.
    size : int
    """
    if address is None:
        return None
    path, _, mark = address.rpartition(" ")
    expected = bytes.fromhex(mark)
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return None
    try:
        if os.pread(fd, len(expected), 0) != expected:
            return None
        memory = mmap.mmap(fd, HEADER + size)
    except (OSError, ValueError):
        return None
    finally:
        os.close(fd)
    return np.frombuffer(memory, np.uint8, size, HEADER)
