"""The last commands of this rank, and the spans that libraries mark in them, with their times."""

from __future__ import annotations

import os
import time
from collections import deque
from typing import Any, NamedTuple

from mpi_workers.matrix import device
from mpi_workers.protocol.commands import command_name
from mpi_workers.waits import interruption
from mpi_workers.wire.frames import Body

ENTRIES_KEPT = 10_000  # commands, and as many spans
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
    device_nbytes : int
        Bytes that were copied to and from the rank's GPU.
    """

    name: str
    begun: float
    seconds: float
    mpi_s: float
    grown_nbytes: int
    failed: bool
    span: bool = False
    device_nbytes: int = 0


_entries: deque[Entry] = deque(maxlen=ENTRIES_KEPT)
_spans: deque[Entry] = deque(maxlen=ENTRIES_KEPT)


class Span:
    """A part of a routine that a trace shows: a context manager.

    Parameters
    ----------
    name : str
    """

    __slots__ = ("_begun", "_copied", "_counter", "_name", "_waited_s")

    def __init__(self, name: str) -> None:
        self._name = name[:SPAN_NAME]

    def __enter__(self) -> None:
        self._begun, self._waited_s = time.time(), interruption.waited_s()
        self._copied = device.copied_nbytes()
        self._counter = time.perf_counter()

    def __exit__(self, kind: object, *_: object) -> None:
        seconds = time.perf_counter() - self._counter
        mpi_s = min(interruption.waited_s() - self._waited_s, seconds)
        copied = device.copied_nbytes() - self._copied
        failed = kind is not None
        _spans.append(Entry(self._name, self._begun, seconds, mpi_s, 0, failed, True, copied))


def add(
    body: Body,
    begun: float,
    seconds: float,
    mpi_s: float,
    grown_nbytes: int,
    *,
    failed: bool,
    device_nbytes: int = 0,
) -> None:
    """Note a command that has ended."""
    name = command_name(body)
    _entries.append(Entry(name, begun, seconds, mpi_s, grown_nbytes, failed, False, device_nbytes))


def collected(comm: Any, since: float) -> list[tuple[int, str, list[tuple[Any, ...]]]] | None:
    """Run on all ranks: rank, host and entries since a time, of all ranks, on rank 0."""
    kept = [*_entries, *_spans]
    here = [tuple(entry) for entry in kept if entry.begun + entry.seconds >= since]
    gathered: list[tuple[int, str, list[tuple[Any, ...]]]] | None = comm.gather(
        (comm.rank, os.uname().nodename, here)
    )
    return gathered
