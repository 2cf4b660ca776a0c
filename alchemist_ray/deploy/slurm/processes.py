"""All descendants of a process: a subreaper keeps those whose parent has ended."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path

PR_SET_CHILD_SUBREAPER = 36
LIMIT_S = 3.0
POLL_INTERVAL_S = 0.02


def adopt_orphans() -> None:
    """Become the parent of all descendants whose own parent ends."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)


def kill_descendants(spare: subprocess.Popen[bytes] | None = None) -> None:
    """Kill all descendants of this process but `spare`; wait up to `LIMIT_S` for their end."""
    me = os.getpid()
    spared = {me} if spare is None else {me, spare.pid}
    deadline = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline:
        parents = _parents()
        ours = {me}
        while more := {pid for pid, parent in parents.items() if parent in ours} - ours:
            ours |= more
        if ours <= spared:
            return
        for pid in ours - spared:
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)
            with suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
        time.sleep(POLL_INTERVAL_S)


def _parents() -> dict[int, int]:
    """Return the parent of every process."""
    found = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with suppress(OSError, IndexError, ValueError):
                # pid (name, which may contain any character) state parent ...
                found[int(folder.name)] = int(
                    (folder / "stat").read_text().rpartition(")")[2].split()[1]
                )
    return found
