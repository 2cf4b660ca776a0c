"""How a call is ended from outside: the interrupt word, waits that read it, and a signal.

A blocking MPI call cannot be interrupted, so a rank that raises before a collective would hang
the other ranks in it. Waits in this package test a request, and read the node's interrupt word
between tests.
"""

from __future__ import annotations

import mmap
import os
import signal
import stat
import sys
import time
from collections.abc import Callable, Container
from pathlib import Path
from types import CodeType, FrameType
from typing import TypeVar

from mpi_workers.failures import Interrupted

# Modules in which the signal raises nothing: waits, functions that native code calls, through which
# no exception passes, and programs of ranks, which must not be left half started or half ended.
OURS = ("mpi_workers.", "ali.native.host", "ali.executables.process", "ali.executables.program")
CLEAN_UP_S = 5.0  # of the 30 that a cancelled call has before its gang is ended


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
    `entry_points` have called, and not within `OURS`: waits in MPI read the word themselves, and
    must not lose their request. The signal is repeated, so code that cleans up after `Interrupted`
    is left alone for `CLEAN_UP_S`.
    """

    def on_signal(_number: int, frame: FrameType | None) -> None:
        if cancelled() and not _cleans_up() and _foreign(frame, entry_points):
            raise Interrupted

    signal.signal(signal.SIGINT, on_signal)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # Ray's workers block it


def _cleans_up() -> bool:
    """Whether a recent `Interrupted` is being handled, or what was raised meanwhile."""
    error = sys.exception()
    while error is not None and not isinstance(error, Interrupted):
        error = error.__context__
    return error is not None and time.monotonic() < error.raised_s + CLEAN_UP_S


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


T = TypeVar("T")
TESTS_PER_LOOK = 64  # tests of a request between two reads of the interrupt word
# Where ranks share cores: Linux since 6.6 (EEVDF) may continue the process that has yielded, but
# not one that sleeps. The yields before it have to outlast a sleep, or one rank that sleeps makes
# the others sleep: a barrier of 4 ranks on 2 cores took 460 us with 8 yields, takes 30 with 200.
YIELDS = 200
SLEEP_S = 50e-6


class _Process:
    """State of this process's waits: one rank, one gang, one call at a time."""

    word: InterruptWord | None = None
    call = 0
    crowded = False
    waited_s = 0.0


def watch(word: InterruptWord, *, crowded: bool) -> None:
    """Let this process's waits read `word`. `crowded`: the node has more ranks than cores."""
    _Process.word = word
    _Process.crowded = crowded


def begin(call: int) -> None:
    """Assign the waits from now on to this call."""
    _Process.call = call


def interrupt(call: int) -> None:
    """End every call up to this number on this node, as a failure on another rank would."""
    if _Process.word is not None:
        _Process.word.raise_to(call)


def interrupted() -> bool:
    """Whether the current call has failed on another rank or was cancelled."""
    return _Process.word is not None and _Process.word.ends(_Process.call)


def until(ready: Callable[[], T]) -> T:
    """Call `ready` until it returns a true value, and return that.

    Raises
    ------
    Interrupted
        If the current call ends first.
    """
    if answer := ready():
        return answer
    begun = time.perf_counter()
    try:
        return _waited(ready)
    finally:
        _Process.waited_s += time.perf_counter() - begun


def waited_s() -> float:
    """Seconds that this process has spent in waits."""
    return _Process.waited_s


def note_wait(seconds: float) -> None:
    """Count a wait of native code."""
    _Process.waited_s += seconds


def _waited(ready: Callable[[], T]) -> T:
    turns = 0
    while not (answer := ready()):
        turns += 1
        if _Process.crowded or turns % TESTS_PER_LOOK == 0:
            if interrupted():
                raise Interrupted
            if _Process.crowded and turns > YIELDS:
                time.sleep(SLEEP_S)
            else:
                os.sched_yield()
    return answer
