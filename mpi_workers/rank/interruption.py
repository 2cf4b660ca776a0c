"""How a call is ended from outside: the interrupt word, and a signal for code that ignores it."""

from __future__ import annotations

import mmap
import os
import signal
import stat
from collections.abc import Callable, Container
from pathlib import Path
from types import CodeType, FrameType

from mpi_workers.failures import Interrupted

OURS = "mpi_workers."


class InterruptWord:
    """The number of the last call that must end, in a file that all ranks of a node map.

    The node's proxy raises the number. A rank leaves its wait if its call's number is not above it.

    Raises
    ------
    OSError
        If the path is a symbolic link, or another user's file.
    """

    def __init__(self, path: str | Path) -> None:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            about = os.fstat(fd)
            if about.st_uid != os.getuid() or not stat.S_ISREG(about.st_mode):
                raise PermissionError(
                    f"{path} is not a file of this user: remove it, or set TMPDIR to a folder of "
                    "your own"
                )
            os.ftruncate(fd, mmap.PAGESIZE)
            self._map = mmap.mmap(fd, mmap.PAGESIZE)
        finally:
            os.close(fd)
        self._words = memoryview(self._map).cast("Q")

    def raise_to(self, call: int) -> None:
        """End every call up to number `call` on this node."""
        self._words[0] = max(self._words[0], call)

    def ends(self, call: int) -> bool:
        return bool(self._words[0] >= call)


def end_on_signal(cancelled: Callable[[], bool], entry_points: Container[CodeType]) -> None:
    """Have SIGINT raise `Interrupted` in the code that a cancelled call runs.

    For loops and sleeps that do not read the word. It is raised only in code that the functions
    `entry_points` have called, and not within functions of this package: waits in MPI read the word
    themselves, and must not lose their request.
    """

    def on_signal(_number: int, frame: FrameType | None) -> None:
        if cancelled() and _foreign(frame, entry_points):
            raise Interrupted

    signal.signal(signal.SIGINT, on_signal)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # Ray's workers block it


def _foreign(frame: FrameType | None, entry_points: Container[CodeType]) -> bool:
    """Whether a routine's or a user's own code runs in this frame, below an entry point."""
    while frame is not None:
        if frame.f_code in entry_points:
            return True
        if str(frame.f_globals.get("__name__", "")).startswith(OURS):
            return False
        frame = frame.f_back
    return False


def place(interrupted: Interrupted) -> str:
    """Where a call was interrupted: ``recv at hang (lib.py:12)``; empty if not known.

    The innermost code outside of this package, and the wait that it has called.
    """
    if interrupted.place:
        return interrupted.place
    found, wait, trace = "", "", interrupted.__traceback__
    while trace is not None:
        code, module = trace.tb_frame.f_code, str(trace.tb_frame.f_globals.get("__name__", ""))
        if not module.startswith(OURS):
            file = os.path.basename(code.co_filename)
            found, wait = f"{code.co_qualname} ({file}:{trace.tb_lineno})", ""
        elif found and not wait and module != __name__:  # not the handler of the signal
            wait = f"{code.co_name} at "
        trace = trace.tb_next
    return wait + found if found else ""
