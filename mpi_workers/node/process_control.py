"""Tools for processes: how they ended, their descendants, ending with a parent, descriptors."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
from pathlib import Path

PR_SET_PDEATHSIG = 1


def descendants(pid: int) -> set[int]:
    """The children of a process, their children, and so on."""
    found: set[int] = set()
    with contextlib.suppress(OSError):
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        for child in map(int, children):
            found |= {child} | descendants(child)
    return found


def describe_status(status: int) -> str:
    """How a process ended, in words. `status` is that of waitpid."""
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        try:
            name = signal.Signals(number).name
        except ValueError:
            name = "an unknown signal"
        return f"was killed by signal {number} ({name})"
    return f"exited with code {os.WEXITSTATUS(status)}"


def die_with_parent(parent: int, number: int = signal.SIGKILL) -> None:
    """Have the kernel send this process a signal when its parent dies."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:
        os._exit(1)


def close_all_but(*keep: int) -> None:
    """Close every inherited file descriptor but these."""
    for fd in [int(name) for name in os.listdir("/proc/self/fd")]:
        if fd not in keep:
            with contextlib.suppress(OSError):
                os.close(fd)
