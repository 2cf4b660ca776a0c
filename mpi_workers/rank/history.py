"""The last commands of this rank: when each ran, how long, and how much of it waited in MPI."""

from __future__ import annotations

import os
from collections import deque
from typing import Any, NamedTuple

from mpi_workers.wire.frames import Body

KEPT = 10_000


class Entry(NamedTuple):
    """A command of this rank.

    Attributes
    ----------
    name : str
        ``linalg.svd``, the name of a function, or the operation.
    begun : float
        Seconds since the epoch, on this node's clock.
    seconds, mpi_s : float
        How long it ran; how much of that it waited for other ranks, in waits of this package
        (`GangComm`, ``alchemist_wait``; those inside of a native library's MPI are not seen).
    grown_nbytes : int
        By how much it raised the peak of this process's memory.
    failed : bool
    """

    name: str
    begun: float
    seconds: float
    mpi_s: float
    grown_nbytes: int
    failed: bool


_entries: deque[Entry] = deque(maxlen=KEPT)


def add(
    body: Body, begun: float, seconds: float, mpi_s: float, grown_nbytes: int, *, failed: bool
) -> None:
    """Note a command that has ended."""
    _entries.append(Entry(_name(body), begun, seconds, mpi_s, grown_nbytes, failed))


def _name(body: Body) -> str:
    if body["op"] == "call":
        return f"{body['library']}.{body['routine']}"
    return str(body.get("name") or body["op"])


def collected(comm: Any, since: float) -> list[tuple[int, str, list[tuple[Any, ...]]]] | None:
    """Run on all ranks: rank, host and entries since a time, of all ranks, on rank 0."""
    here = [tuple(entry) for entry in _entries if entry.begun + entry.seconds >= since]
    gathered: list[tuple[int, str, list[tuple[Any, ...]]]] | None = comm.gather(
        (comm.rank, os.uname().nodename, here)
    )
    return gathered
