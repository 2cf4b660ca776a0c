"""Functions that test_programs.py runs on the ranks: memory that MPI may still write into."""

from __future__ import annotations

import contextlib
import gc
import itertools
import time
from collections.abc import Callable
from threading import Timer
from typing import Any

import numpy as np
from mpi4py import MPI

from mpi_workers.failures import Interrupted
from mpi_workers.rank.gang_view import GangView
from mpi_workers.waits import interruption
from mpi_workers.waits.interruption import InterruptWord

Comm = MPI.Intracomm
CANARY = 7.0
SIZES = (5, 100_000)  # elements: NumPy keeps small memory, large memory goes back to the kernel
SPARE = 8  # arrays that get the memory
WINDOWS: dict[int, MPI.Win] = {}  # of each size


def _wait(request: Any) -> None:
    if isinstance(request, MPI.Prequest):
        request.Start()
    request.Wait()


def _message(receive: Callable[[Comm, Any], Any]) -> Callable[[Comm, Any, Any], Any]:
    """Rank 0 receives from the others."""
    return lambda c, x, y: receive(c, x) if c.rank == 0 else c.Isend(x, 0).Wait()


def _partitioned(c: Comm, x: Any, y: Any) -> None:
    if c.rank == 0:
        _wait(c.Precv_init(x, 1, 2, 0))
    elif c.rank == 2:
        request = c.Psend_init(x, 1, 0)
        request.Start()
        request.Pready(0)
        request.Wait()


def _window(access: Callable[[MPI.Win, Any, Any], Any]) -> Callable[[Comm, Any, Any], Any]:
    """Rank 0 asks for what is in the window of rank 2, which comes later."""

    def run(c: Comm, x: Any, y: Any) -> None:
        if c.rank == 0:
            window = WINDOWS[len(x)]
            _wait(access(window, x, y[: len(x)]))
        c.Barrier()

    return run


# Of c, x and y, which has space for the elements of all ranks.
OPERATIONS: dict[str, Callable[[Comm, Any, Any], Any]] = {
    "Iallreduce": lambda c, x, y: _wait(c.Iallreduce(x, y[: len(x)])),
    "Iallgather": lambda c, x, y: _wait(c.Iallgather(x, y)),
    "Ialltoall": lambda c, x, y: _wait(c.Ialltoall(y.copy(), y)),
    "Ialltoallv": lambda c, x, y: _wait(
        c.Ialltoallv([y.copy(), [len(x)] * c.size], [y, [len(x)] * c.size])
    ),
    "Igather": lambda c, x, y: _wait(c.Igather(x, y)),
    "Ireduce": lambda c, x, y: _wait(c.Ireduce(x, y[: len(x)])),
    "Ibcast": lambda c, x, y: _wait(c.Ibcast(x, 2)),
    "Iscatter": lambda c, x, y: _wait(c.Iscatter(y, x, 2)),
    "Iscan": lambda c, x, y: _wait(c.Iscan(x, y[: len(x)])),
    "Ireduce_scatter_block": lambda c, x, y: _wait(c.Ireduce_scatter_block(y, x)),
    "Allreduce_init": lambda c, x, y: _wait(c.Allreduce_init(x, y[: len(x)])),
    "Allgather_init": lambda c, x, y: _wait(c.Allgather_init(x, y)),
    "Allgatherv_init": lambda c, x, y: _wait(c.Allgatherv_init(x, [y, [len(x)] * c.size])),
    "Alltoall_init": lambda c, x, y: _wait(c.Alltoall_init(y.copy(), y)),
    "Gather_init": lambda c, x, y: _wait(c.Gather_init(x, y)),
    "Reduce_init": lambda c, x, y: _wait(c.Reduce_init(x, y[: len(x)])),
    "Bcast_init": lambda c, x, y: _wait(c.Bcast_init(x, 2)),
    "Scatter_init": lambda c, x, y: _wait(c.Scatter_init(y, x, 2)),
    "Scan_init": lambda c, x, y: _wait(c.Scan_init(x, y[: len(x)])),
    "Reduce_scatter_block_init": lambda c, x, y: _wait(c.Reduce_scatter_block_init(y, x)),
    "Recv_init": _message(lambda c, x: _wait(c.Recv_init(x))),
    "Irecv": _message(lambda c, x: _wait(c.Irecv(x))),
    "Isendrecv": lambda c, x, y: _wait(
        c.Isendrecv(x, (c.rank + 2) % c.size, 0, y[: len(x)], (c.rank + 2) % c.size)
    ),
    "Isendrecv_replace": lambda c, x, y: _wait(
        c.Isendrecv_replace(x, (c.rank + 2) % c.size, 0, (c.rank + 2) % c.size)
    ),
    "Precv_init": _partitioned,
    "Rget": _window(lambda w, x, y: w.Rget(y, 2)),
    "Rget_accumulate": _window(lambda w, x, y: w.Rget_accumulate(x, y, 2)),
}


def reused(gang: GangView, path: str) -> dict[str, Any]:
    """How many elements MPI has written into memory that a left call's code no longer has.

    Rank 0 leaves an operation before ranks 2 and 3 begin it, whose interrupt word is raised later,
    as on other nodes. Rank 1 does not take part.
    """
    word = InterruptWord(f"{path}{gang.rank}")
    interruption.watch(word, crowded=True)
    kept: list[tuple[str, Any]] = []
    found = dict.fromkeys(OPERATIONS, 0)
    with interruption.uninterruptible():
        for size in SIZES:
            WINDOWS[size] = MPI.Win.Allocate(8 * size, 8, comm=gang.world)
            WINDOWS[size].Lock_all()
    for number, (name, size) in enumerate(itertools.product(OPERATIONS, SIZES), start=2):
        with interruption.uninterruptible():
            interruption.begin(number)
            gang.renew()
            gang.world.Barrier()
        if gang.rank > 1:
            time.sleep(0.1)
        Timer(0.0 if gang.rank == 1 else 0.05, word.raise_to, [number]).start()
        if gang.rank != 1:
            with contextlib.suppress(Interrupted), interruption.EndedWaits():
                OPERATIONS[name](gang.comm, np.ones(size), np.ones(size * gang.size))
        gc.collect()  # the frames of an exception are in a cycle
        for length in (size, size * gang.size):
            kept += [(name, np.full(length, CANARY)) for _ in range(SPARE)]
    interruption.begin(1000)
    with interruption.uninterruptible():
        gang.renew()
    for _ in range(1000):
        gang.comm.allreduce(1)
        gang.comm.sendrecv(1, (gang.rank + 1) % gang.size, source=MPI.ANY_SOURCE)
    for name, array in kept:
        found[name] += int((array != CANARY).sum())
    return {name: gang.comm.allreduce(count) for name, count in found.items()}
