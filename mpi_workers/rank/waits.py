"""Waits that end when the call fails on another rank, or is cancelled.

A blocking MPI call cannot be interrupted, so a rank that raises before a collective would hang
the other ranks in it. Waits in this package test a request, and read the node's interrupt word
between tests.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import TypeVar

from mpi_workers.failures import Interrupted
from mpi_workers.rank.interruption import InterruptWord

T = TypeVar("T")
TESTS_PER_LOOK = 64  # tests of a request between two reads of the interrupt word
# Where ranks share cores: Linux since 6.6 (EEVDF) often continues the process that has yielded,
# but not one that sleeps. An allreduce of 6 ranks on 2 cores took 5 ms with yields alone, 1 ms now.
YIELDS = 8
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
