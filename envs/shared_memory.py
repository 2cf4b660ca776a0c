"""Memory that an environment shares with rank 0 of its gang, for the results of steps."""

from __future__ import annotations

import mmap
import os
import secrets

import numpy as np
from numpy.typing import NDArray

HEADER = 64  # bytes before the data, as in ali/simulator/spec.py
MARK = 16  # bytes at its beginning, by which a rank recognises it


class SharedBytes:
    """Bytes in anonymous memory, which ends with its processes.

    Parameters
    ----------
    size : int

    Attributes
    ----------
    data : ndarray of uint8, shape (size,)
    address : str
        What a rank on this node needs to open it, until `seal`.
    """

    def __init__(self, size: int) -> None:
        self._fd = os.memfd_create("alchemist-env")
        os.ftruncate(self._fd, HEADER + size)
        memory = mmap.mmap(self._fd, HEADER + size)
        mark = secrets.token_bytes(MARK)
        memory[:MARK] = mark
        self.data: NDArray[np.uint8] = np.frombuffer(memory, np.uint8, size, HEADER)
        self.address = f"/proc/{os.getpid()}/fd/{self._fd} {mark.hex()}"

    def seal(self) -> None:
        """Close the descriptor: no other process can open the memory any more."""
        os.close(self._fd)
