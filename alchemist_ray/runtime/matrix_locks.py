"""Locks of matrices: no process fetches one that a call is changing in place.

Commands of a gang run one at a time; fetches go directly to the ranks beside them. On a gang that
several programs use, a fetch asks for a read lock first.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable


class MatrixLocks:
    """Readers by process, and the matrices that the running command changes."""

    def __init__(self) -> None:
        self._readers: dict[str, Counter[int]] = {}
        self._written: frozenset[int] = frozenset()
        self._waiting: list[tuple[str, int, Callable[[], None]]] = []
        self._changed = asyncio.Event()

    def begin_read(self, process: str, matrix: int, granted: Callable[[], None]) -> None:
        """Call `granted` when the matrix can be read: at once, or after the running command."""
        if matrix in self._written:
            self._waiting.append((process, matrix, granted))
        else:
            self._readers.setdefault(process, Counter())[matrix] += 1
            granted()

    def end_read(self, process: str, matrix: int) -> None:
        """A process has read the matrix."""
        if process in self._readers:
            self._readers[process] -= Counter([matrix])
            if not self._readers[process]:
                del self._readers[process]
        self._changed.set()

    def lost(self, process: str) -> None:
        """A connection of a process is gone, and its transfers with it."""
        self._readers.pop(process, None)
        self._waiting = [entry for entry in self._waiting if entry[0] != process]
        self._changed.set()

    async def begin_write(self, matrices: Iterable[int], wanted: Callable[[], bool]) -> None:
        """Wait until no process reads the matrices; new readers wait until `end_write`.

        Returns early when the command is no longer `wanted`; see `interrupt`.
        """
        self._written = frozenset(matrices)
        while wanted() and any(
            not self._written.isdisjoint(read) for read in self._readers.values()
        ):
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
