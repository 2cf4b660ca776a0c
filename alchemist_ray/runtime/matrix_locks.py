"""Locks of matrices: no process fetches one that a call is changing in place.

Commands of a gang run one at a time; fetches go directly to the ranks beside them. On a gang that
several programs use, a fetch asks for a read lock first. When it ends it asks whether the lock
was held all the time: a lock ends with its control connection, not with the data connections.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Any


class MatrixLocks:
    """Reads that are under way, and the matrices that the running command changes."""

    def __init__(self) -> None:
        self._reads: dict[int, tuple[Any, int]] = {}  # by number: connection, matrix
        self._last = 0
        self._written: frozenset[int] = frozenset()
        self._waiting: list[tuple[Any, int, Callable[[int], None]]] = []
        self._changed = asyncio.Event()

    def begin_read(self, connection: Any, matrix: int, granted: Callable[[int], None]) -> None:
        """Call `granted` with the read's number: at once, or after the running command."""
        if matrix in self._written:
            self._waiting.append((connection, matrix, granted))
            return
        self._last += 1
        self._reads[self._last] = connection, matrix
        granted(self._last)

    def end_read(self, number: int) -> bool:
        """A read has ended; whether its lock was held until now."""
        self._changed.set()
        return self._reads.pop(number, None) is not None

    def lost(self, connection: Any) -> None:
        """A connection is gone: its locks end. Its transfers may go on, see `end_read`."""
        self._reads = {n: read for n, read in self._reads.items() if read[0] is not connection}
        self._waiting = [entry for entry in self._waiting if entry[0] is not connection]
        self._changed.set()

    async def begin_write(self, matrices: Iterable[int], wanted: Callable[[], bool]) -> None:
        """Wait until no process reads the matrices; new readers wait until `end_write`.

        Returns early when the command is no longer `wanted`; see `interrupt`.
        """
        self._written = frozenset(matrices)
        while wanted() and any(matrix in self._written for _, matrix in self._reads.values()):
            self._changed.clear()
            await self._changed.wait()

    def interrupt(self) -> None:
        """The command that waits for readers has been cancelled."""
        self._changed.set()

    def end_write(self) -> None:
        """The command has ended."""
        if not self._written:
            return
        self._written = frozenset()
        waiting, self._waiting = self._waiting, []
        for entry in waiting:
            self.begin_read(*entry)
