"""Tools for processes: how they ended, their descendants, ending with a parent, descriptors."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import stat
import time
from collections import defaultdict
from collections.abc import Collection

END_TIMEOUT_S = 10.0  # for descendants to end after SIGKILL
REAP_INTERVAL_S = 0.002
PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
PR_SET_PTRACER = 0x59616D61
_libc = ctypes.CDLL(None, use_errno=True)


def adopt_orphans() -> None:
    """Become the parent of every descendant whose own parent ends (a child subreaper)."""
    if _libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")


def let_trace(pid: int) -> None:
    """Allow a process and its descendants to read this one's stack, where Yama restricts that."""
    _libc.prctl(PR_SET_PTRACER, ctypes.c_ulong(pid), 0, 0, 0)  # an error: there is no Yama


def _children() -> dict[int, list[int]]:
    """The children of every process on this machine."""
    found = defaultdict(list)
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError), open(f"/proc/{name}/stat") as stat:
                found[int(stat.read().rpartition(")")[2].split()[1])].append(int(name))
    return found


def descendants(pids: Collection[int]) -> set[int]:
    """The children of these processes, their children, and so on."""
    children = _children()
    found: set[int] = set()
    left = list(pids)
    while left:
        for child in children[left.pop()]:
            if child not in found:
                found.add(child)
                left.append(child)
    return found


def end_descendants(spared: Collection[int] = ()) -> None:
    """Kill and reap all descendants of this process, which must have called `adopt_orphans`.

    Children in `spared` and their descendants are left alone. A process that was forked in the
    meantime becomes our child when its parent dies, and is killed in the next turn. Gives up after
    `END_TIMEOUT_S`: a process that waits for a dead disk or device cannot be killed.
    """
    deadline = time.monotonic() + END_TIMEOUT_S
    while time.monotonic() < deadline:
        ours = set(_children()[os.getpid()]) - set(spared)
        if not ours:
            return
        for pid in ours | descendants(ours):
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        while (ours := {pid for pid in ours if not _reaped(pid)}) and time.monotonic() < deadline:
            time.sleep(REAP_INTERVAL_S)


def _reaped(pid: int) -> bool:
    """Whether a child has ended; it is reaped."""
    try:
        return os.waitpid(pid, os.WNOHANG)[0] == pid
    except ChildProcessError:
        return True


def die_with_parent(parent: int, number: int = signal.SIGKILL) -> None:
    """Have the kernel send this process a signal when its parent dies."""
    _libc.prctl(PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:
        os._exit(1)


def close_all_but(*keep: int) -> None:
    """Close every inherited file descriptor but these."""
    for fd in [int(name) for name in os.listdir("/proc/self/fd")]:
        if fd not in keep:
            with contextlib.suppress(OSError):
                os.close(fd)


def close_listeners() -> None:
    """Close inherited sockets that accept connections: Hydra leaves its control port to ranks."""
    for fd in [int(name) for name in os.listdir("/proc/self/fd")]:
        with contextlib.suppress(OSError):
            if stat.S_ISSOCK(os.fstat(fd).st_mode):
                with socket.socket(fileno=os.dup(fd)) as copy:
                    listens = copy.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
                if listens:
                    os.close(fd)
