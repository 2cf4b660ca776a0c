"""Programs on a communicator that code keeps from one call to the next.

In the first call rank 2 fails, and the others leave what they have under way on the communicator.
The second call uses it: it gets what it would get without the first one, or runs in new processes.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
from mpi4py import MPI

from tests.mpi_workers.waits.ranks_programs import RENEWED, VALUE, Calls

Comm = MPI.Intracomm
LARGE = 1 << 18  # elements
LATE_S = 0.05  # of rank 2: the others wait


def _old(count: int = 2) -> Any:
    return np.full(count, 100.0)


def _summed(c: Comm, make: Callable[[Any, Any], Any] | None = None, count: int = 2) -> float:
    """The sum over the ranks of 1."""
    x, y = np.ones(count), np.zeros(count)
    if make is None:
        c.Allreduce(x, y)
    else:
        make(x, y)
    return float(y[0])


def _started(request: Any) -> Any:
    request.Start()
    return request


def _from_zero(c: Comm) -> Any:
    """Rank 1 receives from rank 0."""
    x = np.full(LARGE, 2.0)
    if c.rank == 0:
        c.Send(x, 1, 6)
    if c.rank == 1:
        x[:] = 0
        c.Recv(x, 0, 6)
    return float(x[0])


def _object_from_one(c: Comm) -> Any:
    if c.rank == 1:
        c.send("new", 0, 6)
    return c.recv(source=1, tag=6) if c.rank == 0 else "new"


def _polled(request: MPI.Request) -> None:
    while not request.Test():
        pass


def _after_message(c: Comm, wait: Callable[[Comm], Any]) -> None:
    """Rank 1 sends a message of this call, and waits."""
    if c.rank == 1:
        c.isend("old", 0, 6).wait()
        c.Barrier()
    else:
        wait(c)


# What ranks 0 and 1 leave (the communicator, that of the call), and the second call.
First = Callable[[Comm, Comm], Any]
KEPT: dict[str, tuple[First, Callable[[Comm], Any], Any]] = {
    "Iallreduce": (
        lambda c, _: c.Iallreduce(_old(), np.zeros(2)).Wait(),
        lambda c: _summed(c, lambda x, y: c.Iallreduce(x, y).Wait()), 3.0,
    ),
    "Iallreduce, Waitall": (
        lambda c, _: MPI.Request.Waitall([c.Iallreduce(_old(), np.zeros(2))]), _summed, 3.0,
    ),
    "Iallreduce, Waitany": (
        lambda c, _: MPI.Request.Waitany([c.Iallreduce(_old(), np.zeros(2))]), _summed, 3.0,
    ),
    "Iallreduce, Test": (lambda c, _: _polled(c.Iallreduce(_old(), np.zeros(2))), _summed, 3.0),
    "Iallreduce, and a wait elsewhere": (
        lambda c, own: [c.Iallreduce(_old(), np.zeros(2)), own.Barrier()],
        lambda c: _summed(c, lambda x, y: c.Iallreduce(x, y).Wait()), 3.0,
    ),
    "Iallreduce large": (
        lambda c, _: c.Iallreduce(_old(LARGE), np.zeros(LARGE)).Wait(),
        lambda c: _summed(c, None, LARGE), 3.0,
    ),
    "Ibcast": (
        lambda c, _: c.Ibcast(_old(), 2).Wait(), lambda c: c.bcast("new" if c.rank == 2 else 0, 2),
        "new",
    ),
    "Ibarrier": (lambda c, _: c.Ibarrier().Wait(), _summed, 3.0),
    "Allreduce_init": (
        lambda c, _: _started(c.Allreduce_init(_old(), np.zeros(2))).Wait(), _summed, 3.0,
    ),
    "Barrier_init": (lambda c, _: _started(c.Barrier_init()).Wait(), _summed, 3.0),
    "irecv": (
        lambda c, _: _after_message(c, lambda c: c.irecv(source=2, tag=5).wait()),
        _object_from_one, "new",
    ),
    "Irecv, Waitall": (
        lambda c, _: _after_message(
            c, lambda c: MPI.Request.Waitall([c.Irecv(np.zeros(2), 2, 5)])
        ),
        _object_from_one, "new",
    ),
    "Recv_init": (
        lambda c, _: _after_message(c, lambda c: _started(c.Recv_init(np.zeros(2), 2, 5)).Wait()),
        _object_from_one, "new",
    ),
    "Isend": (
        lambda c, own: c.Isend(_old(LARGE), 1, 6).Wait() if c.rank == 0 else own.Barrier(),
        _from_zero, 2.0,
    ),
    "Isend, and a wait elsewhere": (
        lambda c, own: [c.Isend(_old(LARGE), 1, 6) if c.rank == 0 else None, own.Barrier()],
        _from_zero, 2.0,
    ),
    "Issend": (
        lambda c, own: c.Issend(_old(), 1, 6).Wait() if c.rank == 0 else own.Barrier(),
        _from_zero, 2.0,
    ),
    "Send_init": (
        lambda c, own: _started(c.Send_init(_old(LARGE), 1, 6)).Wait() if c.rank == 0
        else own.Barrier(),
        _from_zero, 2.0,
    ),
    "Send large": (
        lambda c, own: c.Send(_old(LARGE), 1, 6) if c.rank == 0 else own.Barrier(), _from_zero, 2.0,
    ),
    "a message that nobody receives": (
        lambda c, own: [c.Send(_old(), 1, 6) if c.rank == 0 else None, own.Barrier()],
        _from_zero, 2.0,
    ),
    "Sendrecv": (
        lambda c, _: c.Sendrecv(
            _old(LARGE), (c.rank + 1) % 3, 6, np.zeros(LARGE), (c.rank + 2) % 3, 6
        ),
        _from_zero, 2.0,
    ),
    "Probe": (lambda c, _: _after_message(c, lambda c: c.Probe(2, 5)), _object_from_one, "new"),
    "Mprobe": (lambda c, _: _after_message(c, lambda c: c.Mprobe(2, 5)), _object_from_one, "new"),
    "Recv": (
        lambda c, _: _after_message(c, lambda c: c.Recv(np.zeros(2), 2, 5)),
        _object_from_one, "new",
    ),
    "Barrier": (lambda c, _: c.Barrier(), _summed, 3.0),
    "Allreduce": (lambda c, _: c.Allreduce(_old(), np.zeros(2)), _summed, 3.0),
    "Allreduce large": (
        lambda c, _: c.Allreduce(_old(LARGE), np.zeros(LARGE)),
        lambda c: _summed(c, None, LARGE), 3.0,
    ),
    "Dup": (lambda c, _: c.Dup(), _summed, 3.0),
    "Idup": (lambda c, _: c.Idup()[1].Wait(), _summed, 3.0),
}  # fmt: skip


def _kept(first: First, second: Callable[[Comm], Any], expected: Any) -> Callable[[Calls], Any]:
    def program(calls: Calls) -> Any:
        own: Any = None

        def make(comm: Comm) -> None:
            nonlocal own
            own = comm.Dup()

        def fail(comm: Comm) -> None:
            if comm.rank == 2:
                time.sleep(LATE_S)
                raise ValueError("rank 2 fails")
            first(own, comm)
            own.Barrier()

        calls.call(make)
        calls.call(fail)
        told = calls.together(calls.call(lambda comm: second(own)))
        right = all(how == RENEWED or (how, value) == (VALUE, expected) for how, value in told)
        return [] if right else told

    return program


PROGRAMS = {name: _kept(*three) for name, three in KEPT.items()}
