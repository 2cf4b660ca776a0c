"""The last commands of this rank, and the spans that libraries mark in them, with their times."""

from __future__ import annotations

import os
import time
from collections import deque
from typing import Any, NamedTuple

from mpi_workers.waits import interruption
from mpi_workers.wire.commands import command_name
from mpi_workers.wire.frames import Body

KEPT = 10_000  # commands, and as many spans
SPAN_NAME = 200  # characters


class Entry(NamedTuple):
    """A command of this rank, or a span of a routine.

    Attributes
    ----------
    name : str
        ``linalg.svd``, the name of a function, the operation, or that of the span.
    begun : float
        Seconds since the epoch, on this node's clock.
    seconds, mpi_s : float
        How long it ran; how much of that it waited for other ranks in MPI.
    grown_nbytes : int
        By how much it raised the peak of this process's memory; 0 for a span.
    failed : bool
        Whether it ended with an exception.
    span : bool
    """

    name: str
    begun: float
    seconds: float
    mpi_s: float
    grown_nbytes: int
    failed: bool
    span: bool = False


_entries: deque[Entry] = deque(maxlen=KEPT)
_spans: deque[Entry] = deque(maxlen=KEPT)


class Span:
    """A part of a routine that a trace shows: a context manager.

    Parameters
    ----------
    name : str
    """

    __slots__ = ("_begun", "_counter", "_name", "_waited_s")

    def __init__(self, name: str) -> None:
        self._name = name[:SPAN_NAME]

    def __enter__(self) -> None:
        self._begun, self._waited_s = time.time(), interruption.waited_s()
        self._counter = time.perf_counter()

    def __exit__(self, kind: object, *_: object) -> None:
        seconds = time.perf_counter() - self._counter
        mpi_s = min(interruption.waited_s() - self._waited_s, seconds)
        _spans.append(Entry(self._name, self._begun, seconds, mpi_s, 0, kind is not None, True))


def add(
    body: Body, begun: float, seconds: float, mpi_s: float, grown_nbytes: int, *, failed: bool
) -> None:
    """Note a command that has ended."""
    _entries.append(Entry(command_name(body), begun, seconds, mpi_s, grown_nbytes, failed))


def collected(comm: Any, since: float) -> list[tuple[int, str, list[tuple[Any, ...]]]] | None:
    """Run on all ranks: rank, host and entries since a time, of all ranks, on rank 0."""
    kept = [*_entries, *_spans]
    here = [tuple(entry) for entry in kept if entry.begun + entry.seconds >= since]
    gathered: list[tuple[int, str, list[tuple[Any, ...]]]] | None = comm.gather(
        (comm.rank, os.uname().nodename, here)
    )
    return gathered
