"""Processes, folders, shared memory and ports of a test run on this machine.

The variable `RUN` in the environment marks all processes of a run, and its files are in its own
``TMPDIR``: concurrent runs are told apart.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from mpi_workers.node.cleanup import segments_in

RUN = "ALCHEMIST_TEST_RUN"
SHM = Path("/dev/shm")
PART = "mpi_workers"  # in the command line of every fork server, proxy and rank

_segments: set[str] = set()
_marked: dict[tuple[int, str], bool] = {}  # by process id and time of its start


def processes() -> dict[int, str]:
    """All descendants of this run: pid and command line.

    They inherit the mark in their environment. A process that was forked without starting a
    program does not show it, but is a child of this process.
    """
    mark = f"{RUN}={os.environ[RUN]}".encode()
    parents, ours, marked = {}, {os.getpid()}, {}
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            if fields[0] in "ZX":  # ended, not yet waited for
                continue
            key = pid, _ = int(folder.name), fields[19]
            parents[pid] = int(fields[1])
            if key not in _marked:
                _marked[key] = mark in (folder / "environ").read_bytes().split(b"\0")
        except OSError:  # ended, or another user's
            continue
        marked[key] = _marked[key]
        if marked[key]:
            ours.add(pid)
    _marked.clear()  # of those that have ended
    _marked.update(marked)
    while more := {pid for pid, parent in parents.items() if parent in ours} - ours:
        ours |= more
    return {pid: command_line(pid) for pid in ours - {os.getpid()}}


def command_line(pid: int) -> str:
    """The command line of a process, or its name if it has none."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
        return words or Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return "(ended)"


def memory(pid: int, key: str = "VmRSS") -> int:
    """Bytes of a process's memory, by their name in its status."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{key}:"))


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def alive(pid: int) -> bool:
    """Whether a process runs; one that has ended and was not waited for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def folders() -> set[Path]:
    """The private folders of gangs."""
    return set(Path(tempfile.gettempdir()).glob("alchemist-*"))


def note_segments() -> None:
    """Remember the names in /dev/shm of the gangs that exist now."""
    for folder in folders():
        _segments.update(segments_in(folder))


def shared_memory() -> set[Path]:
    """Names in /dev/shm of this run: noted before, or mapped by its processes.

    A name does not show its owner, and other runs use names of their own meanwhile.
    """
    there = set(SHM.iterdir())
    if not there:
        return there
    found = {path for path in there if path.name in _segments}
    for pid in (os.getpid(), *processes()):
        with contextlib.suppress(OSError):
            mapped = Path(f"/proc/{pid}/maps").read_text()
            found |= {path for path in there if f"{path}\n" in mapped}
    return found


def abandoned() -> set[Path]:
    """MPICH's names in /dev/shm that no process of this machine has mapped.

    A rank that is killed leaves one, also one that was started without a launcher.
    """
    there = set(SHM.glob("mpich_*"))
    for maps in Path("/proc").glob("[0-9]*/maps"):
        if there:
            with contextlib.suppress(OSError):
                mapped = maps.read_text()
                there = {path for path in there if f"{path}\n" not in mapped}
    return there


def gangs() -> set[str]:
    """Names of the reservations of gangs in the Ray of this process."""
    ray = sys.modules.get("ray")
    if ray is None or not ray.is_initialized():
        return set()
    table = ray.util.placement_group_table().values()
    return {group["name"] for group in table if group["state"] != "REMOVED"}


def everything() -> dict[str, str]:
    """All of them, with the command lines of processes."""
    found = {f"process {pid}": line[:160] for pid, line in sorted(processes().items())}
    found |= {f"folder {path}": "" for path in sorted(folders())}
    found |= {f"shared memory {path}": "" for path in sorted(shared_memory() | abandoned())}
    return found


def clock() -> float:
    """Seconds of a clock that runs at a tenth of its speed while programs wait for CPU cores.

    Limits by this clock hold beside other programs. Without the kernel's count of such seconds
    (``/proc/pressure``) it is the usual clock.
    """
    waited_s = 0.0
    with contextlib.suppress(OSError):
        words = Path("/proc/pressure/cpu").read_text().split()
        waited_s = int(words[4].removeprefix("total=")) / 1e6
    return time.monotonic() - 0.9 * waited_s


def wait_until(settled: Callable[[], bool], limit_s: float, every_s: float = 0.02) -> float | None:
    """Wait for a condition; returns the seconds until it was true, None after the limit.

    The limit is one of `clock`. Looks are further apart the longer it takes: they cost CPU time.
    After the limit the stacks of all threads are in the captured output of the test, if it fails.
    """
    start, limited = time.monotonic(), clock()
    while not settled():
        if clock() - limited > limit_s:
            faulthandler.dump_traceback(file=2, all_threads=True)
            return None
        time.sleep(max(every_s, (time.monotonic() - start) / 10))
    return time.monotonic() - start


@contextlib.contextmanager
def within(limit_s: float) -> Iterator[None]:
    """Check that the block takes less than so many seconds of `clock`."""
    begun = clock()
    yield
    spent_s = clock() - begun
    assert spent_s < limit_s, f"it took {spent_s:.2f} s"


def free_port() -> int:
    """A TCP port of loopback that nothing listens at."""
    with socket.create_server(("127.0.0.1", 0)) as sock:
        return int(sock.getsockname()[1])


TCP_LISTEN, UDP_UNCONNECTED = "0A", "07"


def listening_ports(pid: int) -> list[str]:
    """TCP and UDP ports of this process that accept packets, as ``tcp:0100007F:1F90``."""
    inodes = set()
    for name in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(OSError):
            target = os.readlink(f"/proc/{pid}/fd/{name}")
            if target.startswith("socket:["):
                inodes.add(target[8:-1])
    found = []
    for kind, state in (("tcp", TCP_LISTEN), ("udp", UDP_UNCONNECTED)):
        for table in (kind, kind + "6"):
            for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
                fields = line.split()
                if fields[9] in inodes and fields[3] == state:
                    found.append(f"{kind}:{fields[1]}")
    return sorted(found)
