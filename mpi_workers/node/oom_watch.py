"""Whether the kernel's OOM killer has ended a process of this cgroup."""

from __future__ import annotations

import signal
from pathlib import Path

from mpi_workers.matrix.available_memory import MEMBERSHIP, MOUNT, MemoryCgroup
from mpi_workers.matrix.sizes import readable


class OomWatch:
    """Counts the kills of the kernel's OOM killer from the creation of this object."""

    def __init__(self, membership: Path = MEMBERSHIP, mount: Path = MOUNT) -> None:
        self._cgroup = MemoryCgroup.find(membership, mount)
        self._before = self._kills()

    def _kills(self) -> int:
        return self._cgroup.oom_kills() if self._cgroup is not None else 0

    def limit(self) -> int | None:
        """Bytes that may be used: the lowest limit of the cgroup and those above it."""
        return self._cgroup.limit() if self._cgroup is not None else None

    def explained(self, status: int, words: str) -> str:
        """`words`, how a process ended, or that the OOM killer has killed it and why."""
        if not (status & 0x7F == signal.SIGKILL and self._kills() > self._before):
            return words
        self._before = self._kills()
        limit = self.limit()
        why = (
            f"the memory limit of its pod, container or job is {readable(limit)} ({limit} bytes)"
            if limit is not None
            else "the node has run out of memory"
        )
        return f"was killed by the kernel's OOM killer (signal 9): {why}"
