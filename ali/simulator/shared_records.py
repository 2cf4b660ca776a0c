"""The rank's end of the memory in which it leaves records for the environment's process."""

from __future__ import annotations

import mmap
import os
from typing import Any

import numpy as np

HEADER = 64  # bytes before the records; they begin with the mark


def open_shared(address: str | None, count: int) -> np.ndarray[Any, Any] | None:
    """`count` float64 numbers in memory of a process on this node; None if it is not here.

    Parameters
    ----------
    address : str or None
        ``"PATH MARK"``: a file descriptor of that process below ``/proc``, and the hexadecimal
        bytes at its beginning. The same path on another node is another file.
    count : int
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
        memory = mmap.mmap(fd, HEADER + 8 * count)
    except (OSError, ValueError):
        return None
    finally:
        os.close(fd)
    return np.frombuffer(memory, np.float64, count, HEADER)
