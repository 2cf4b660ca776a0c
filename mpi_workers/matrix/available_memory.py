"""Memory that can be allocated: the node's, within the limits of this process's cgroup.

Large allocations of the ranks of a node are admitted one decision at a time.

All checks before an allocation call `available_bytes`. cgroup v2 and v1: in a container the
controller's files are at the mount itself; otherwise ``/proc/self/cgroup`` gives the folder below
it (systemd, Slurm).

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
from dataclasses import dataclass
from pathlib import Path

import numpy as np

MOUNT = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")
NO_LIMIT = 1 << 60  # v1 writes a number near 2**63 instead of "max"
RANK_OOM_SCORE, KEEPER_OOM_SCORE = 1000, 500  # the highest, and half of the node's memory less
RECLAIMABLE = ("inactive_file", "active_file", "slab_reclaimable")  # in memory.stat


def available_bytes() -> int:
    """Bytes that can be allocated: the kernel's estimate for the node, and the cgroups' limits."""
    available = _meminfo("MemAvailable")
    cgroup = MemoryCgroup.find()
    bound = cgroup.available() if cgroup is not None else None
    return max(0, available if bound is None else min(available, bound))


def set_oom_score(score: int) -> None:
    """Let the kernel end this process before those of a lower score where memory runs out.

    Ranks can be started again; what keeps their matrices cannot. Ray gives all its workers 1000.
    """
    with contextlib.suppress(OSError):  # lower than a process without rights may go
        Path("/proc/self/oom_score_adj").write_text(str(score))


def _meminfo(name: str) -> int:
    """Bytes of a field of /proc/meminfo."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{name}:"))


@dataclass(frozen=True, slots=True)
class FileNames:
    """Names of the controller's files."""

    events: str
    limit: str
    usage: str
    prefix: str  # of the fields of memory.stat that include the cgroups below


V2 = FileNames("memory.events", "memory.max", "memory.current", "")
V1 = FileNames("memory.oom_control", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_")


@dataclass(frozen=True, slots=True)
class MemoryCgroup:
    """This process's cgroup in the memory controller: limits and use, along the path to the root.

    Attributes
    ----------
    folder, mount : Path
        Of the cgroup, and of the file system.
    names : FileNames
        Of the files in it.
    """

    folder: Path
    mount: Path
    names: FileNames

    @classmethod
    def find(cls, membership: Path = MEMBERSHIP, mount: Path = MOUNT) -> MemoryCgroup | None:
        """The cgroup, or None if there is no memory controller."""
        try:
            lines = membership.read_text().splitlines()
        except OSError:
            return None
        for line in lines:
            number, _, rest = line.partition(":")
            controllers, _, below = rest.partition(":")
            if "memory" in controllers.split(","):
                top, names = mount / "memory", V1
            elif number == "0":
                top, names = mount, V2
            else:
                continue
            for folder in (top / below.lstrip("/"), top):
                if (folder / names.events).is_file():
                    return cls(folder, mount, names)
        return None

    def _limits(self) -> Iterator[tuple[Path, int]]:
        """This cgroup and those above it that have a limit, with the limit in bytes."""
        for folder in (self.folder, *self.folder.parents):
            limit = _number(folder / self.names.limit)
            if limit is not None and limit < NO_LIMIT:
                yield folder, limit
            if folder == self.mount:
                return

    def limit(self) -> int | None:
        """The lowest limit in bytes; None without a limit."""
        return min((limit for _, limit in self._limits()), default=None)

    def available(self) -> int | None:
        """Bytes below the nearest limit, page cache not counted as used; None without a limit."""
        spare = []
        for folder, limit in self._limits():
            used = _number(folder / self.names.usage)
            if used is not None:
                spare.append(limit - max(0, used - self._reclaimable(folder)))
        return min(spare, default=None)

    def _reclaimable(self, folder: Path) -> int:
        """Bytes that the kernel takes back before it reports a lack of memory."""
        fields = _fields(folder / "memory.stat")
        return sum(fields.get(self.names.prefix + name, 0) for name in RECLAIMABLE)

    def oom_kills(self) -> int:
        """How many processes the kernel has killed in this cgroup for lack of memory."""
        return _fields(self.folder / self.names.events).get("oom_kill", 0)


def _number(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _fields(path: Path) -> dict[str, int]:
    try:
        pairs = (line.split() for line in path.read_text().splitlines())
        return {name: int(value) for name, value in pairs}
    except (OSError, ValueError):
        return {}


ALLOCATIONS = "allocations"  # in the gang's folder
RETRY_S = 0.005  # between looks while other ranks allocate
ALLOCATIONS_S = 60.0  # for the allocations of other ranks to end
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
        self._fd = os.open(folder / ALLOCATIONS, flags, 0o600)
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
        deadline = time.monotonic() + ALLOCATIONS_S
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
            hopeless = nbytes > _meminfo("MemTotal")
            if now > deadline or hopeless or (not others and now > asked_at + ROOM_S):
                yield max(0, spare)
                return
            time.sleep(RETRY_S)
        try:
            yield None
        finally:
            self._nbytes[self._rank] = 0
