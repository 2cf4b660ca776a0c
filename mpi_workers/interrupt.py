"""The interrupt word: how a node's proxy reaches ranks that are busy in MPI."""

from __future__ import annotations

import mmap
import os
from pathlib import Path


class InterruptWord:
    """A number in a file that all ranks of a node map: the last call that must end.

    The node's proxy raises it; a rank that works on a call with a number not
    above it leaves its wait.
    """

    def __init__(self, path: str | Path) -> None:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.ftruncate(fd, mmap.PAGESIZE)
            self._map = mmap.mmap(fd, mmap.PAGESIZE)
        finally:
            os.close(fd)
        self._words = memoryview(self._map).cast("Q")

    def raise_to(self, call: int) -> None:
        """End every call up to number `call` on this node."""
        self._words[0] = max(self._words[0], call)

    def ends(self, call: int) -> bool:
        return bool(self._words[0] >= call)
