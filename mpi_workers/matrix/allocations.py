"""Admission of large allocations of the ranks of one node, one decision at a time.

Several ranks that compare their needs with the same free memory would take more than there is.
Each therefore records its allocation in a file that the ranks of the gang's node share, and
counts those of the others as used until their pages are there. If memory is short, it asks the
other ranks to return theirs that is idle.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from mpi_workers.matrix.available_memory import available_bytes

RETRY_S = 0.005  # between looks while other ranks allocate
WAIT_S = 60.0  # for the allocations of other ranks to end
ROOM_S = 0.5  # for other ranks to return idle memory


class NodeAllocations:
    """The large allocations of a node's ranks that are under way. For one thread per rank.

    Parameters
    ----------
    folder : Path
        The gang's private folder on this node.
    rank, size : int
        This rank, and the number of ranks of the gang.
    """

    def __init__(self, folder: Path, rank: int, size: int) -> None:
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        self._fd = os.open(folder / "allocations", flags, 0o600)
        os.ftruncate(self._fd, 8 * (size + 1))
        words = np.frombuffer(mmap.mmap(self._fd, 8 * (size + 1)), np.int64)
        self._nbytes, self._shortages = words[:size], words[size:]  # by rank; a counter
        self._rank = rank

    def shortages(self) -> int:
        """How often memory was short for a rank of this node."""
        return int(self._shortages[0])

    @contextlib.contextmanager
    def admit(self, nbytes: int, make_room: Callable[[], bool]) -> Iterator[int | None]:
        """Record an allocation for the duration of the context.

        Parameters
        ----------
        nbytes : int
            Bytes that this rank allocates in the context.
        make_room : callable() -> bool
            Called if memory is short: returns this rank's idle memory to the system, and whether
            there was some.

        Yields
        ------
        int or None
            None if there is room; otherwise the bytes that are available.
        """
        deadline = time.monotonic() + WAIT_S
        asked_at: float | None = None
        while True:
            fcntl.flock(self._fd, fcntl.LOCK_EX)
            try:
                others = int(self._nbytes.sum())
                spare = available_bytes() - others
                if nbytes <= spare:
                    self._nbytes[self._rank] = nbytes
                    break
                if asked_at is None:
                    asked_at = time.monotonic()
                    self._shortages[0] += 1
            finally:
                fcntl.flock(self._fd, fcntl.LOCK_UN)
            if make_room():
                continue
            now = time.monotonic()
            if now > deadline or (not others and now > asked_at + ROOM_S):
                yield max(0, spare)
                return
            time.sleep(RETRY_S)
        try:
            yield None
        finally:
            self._nbytes[self._rank] = 0
