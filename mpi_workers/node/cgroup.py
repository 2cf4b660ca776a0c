"""What the kernel's memory controller says of this process: its limit, and whom it has killed.

cgroup v2 and v1; in a container, where the controller's files stand at the mount itself, and
outside, where ``/proc/self/cgroup`` says how far below it.
"""

from __future__ import annotations

import signal
from pathlib import Path

from mpi_workers.matrix.memory import readable

MOUNT = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")
V2 = ("memory.events", "memory.max")
V1 = ("memory.oom_control", "memory.limit_in_bytes")
NO_LIMIT = 1 << 60  # v1 writes a number near 2**63 where there is none


def memory_cgroup(membership: str, mount: Path) -> tuple[Path, tuple[str, str]] | None:
    """This process's folder of the memory controller, and what its files are called there."""
    for line in membership.splitlines():
        number, _, rest = line.partition(":")
        controllers, _, below = rest.partition(":")
        if "memory" in controllers.split(","):
            top, files = mount / "memory", V1
        elif number == "0":
            top, files = mount, V2
        else:
            continue
        for folder in (top / below.lstrip("/"), top):
            if (folder / files[0]).is_file():
                return folder, files
    return None


class OomWatch:
    """Whether the kernel has killed for want of memory since this was made."""

    def __init__(self, membership: Path = MEMBERSHIP, mount: Path = MOUNT) -> None:
        self._mount = mount
        try:
            self._found = memory_cgroup(membership.read_text(), mount)
        except OSError:
            self._found = None
        self._before = self._kills()

    def _kills(self) -> int:
        if self._found is None:
            return 0
        folder, (events, _) = self._found
        try:
            fields = dict(line.split() for line in (folder / events).read_text().splitlines())
            return int(fields.get("oom_kill", 0))
        except (OSError, ValueError):
            return 0

    def limit(self) -> int | None:
        """Bytes that may be used here: the least of the folder's limit and those above it."""
        if self._found is None:
            return None
        folder, (_, name) = self._found
        limits = []
        for place in (folder, *folder.parents):
            try:
                text = (place / name).read_text().strip()
            except OSError:
                text = ""
            if text.isdigit() and int(text) < NO_LIMIT:
                limits.append(int(text))
            if place == self._mount:
                break
        return min(limits, default=None)

    def explained(self, status: int, words: str) -> str:
        """How a process ended, in words; with the kernel's reason, if it had one to kill."""
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
