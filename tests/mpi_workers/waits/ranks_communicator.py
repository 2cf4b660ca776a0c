"""Functions that test_communicator.py runs on the ranks."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
from mpi4py import MPI

from mpi_workers.failures import Interrupted
from mpi_workers.rank.gang import Gang
from mpi_workers.waits import communicator, interruption
from mpi_workers.waits.communicator import GangComm
from mpi_workers.waits.interruption import InterruptWord
from tests.mpi_workers.waits.ranks_communicator_methods import METHODS


def _plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, np.ndarray) else value


def agreement(gang: Gang) -> dict[str, bool]:
    """For every method: whether all ranks get from a GangComm what mpi4py's own gives."""
    own = MPI.COMM_WORLD.Dup()
    found: dict[str, bool] = {}
    for name, method in METHODS.items():
        expected = repr(_plain(method(own)))
        same = repr(_plain(method(gang.comm))) == expected
        found[name] = own.allreduce(same, MPI.LAND)
    return found


def trees(gang: Gang) -> dict[str, bool]:
    """The same of reductions along trees, for every root and number of ranks."""
    communicator.FLAT_SIZE = 0
    own = MPI.COMM_WORLD.Dup()
    found: dict[str, bool] = {}
    waiting = gang.comm.irecv(source=MPI.ANY_SOURCE, tag=MPI.ANY_TAG)  # must match no tree's
    for size in range(1, own.size + 1):
        theirs, ours = own.Split(own.rank < size), gang.comm.Split(own.rank < size)
        for root in range(size if own.rank < size else own.size - size):
            expected = theirs.reduce([own.rank], MPI.SUM, root)
            found[f"reduce {size} {root}"] = ours.reduce([own.rank], MPI.SUM, root) == expected
        for name in ("allreduce", "scan", "exscan"):
            value = getattr(ours, name)([own.rank])  # lists are joined: the order is the ranks'
            found[f"{name} {size}"] = value == getattr(theirs, name)([own.rank])
        ours.Free()
        theirs.Free()
    gang.comm.allreduce(1)
    gang.comm.send("mine", (own.rank + 1) % own.size)
    found["message"] = waiting.wait() == "mine"
    merged: dict[str, bool] = {}
    for ours_found in own.allgather(found):  # groups of ranks have entries of their own
        for name, same in ours_found.items():
            merged[name] = merged.get(name, True) and same
    return merged


def derived(gang: Gang) -> list[bool]:
    """Whether communicators made from a GangComm are interruptible as well; null ones are null."""
    comm = gang.comm
    node = comm.Split_type(MPI.COMM_TYPE_SHARED)
    none = comm.Split(MPI.UNDEFINED if gang.rank == 0 else 0)
    made = comm.Create(comm.Get_group().Incl([0]))
    return [
        isinstance(comm.Dup(), GangComm),
        isinstance(node, GangComm) and node.size == gang.size,
        isinstance(comm.Split(0), GangComm),
        none == MPI.COMM_NULL and not none,
        isinstance(made, GangComm) and bool(made) == (gang.rank == 0),
    ]


def bad_calls(gang: Gang) -> list[str]:
    """Errors that only the caller's own arguments decide: no rank waits."""
    said = []
    for call in (
        lambda: gang.comm.scatter([1] * (gang.size + 1), gang.rank),
        lambda: gang.comm.alltoall([1] * (gang.size + 1)),
    ):
        try:
            call()
        except ValueError as error:
            said.append(str(error))
    return said


WAITS: dict[str, Callable[[GangComm], Any]] = {
    "Allreduce": lambda comm: comm.Allreduce(np.ones(3), np.ones(3)),
    "allreduce": lambda comm: comm.allreduce(1),
    "Barrier": lambda comm: comm.Barrier(),
    "Bcast": lambda comm: comm.Bcast(np.ones(3), 1),
    "bcast": lambda comm: comm.bcast(None, 1),
    "Recv": lambda comm: comm.Recv(np.ones(3), 1),
    "recv": lambda comm: comm.recv(source=1),
    "Probe": lambda comm: comm.Probe(1),
    "mprobe": lambda comm: comm.mprobe(1),
    "Sendrecv": lambda comm: comm.Sendrecv(np.ones(1 << 18), 1, 0, np.ones(1 << 18), 1, 0),
    "sendrecv": lambda comm: comm.sendrecv("x" * (1 << 20), 1, 0, None, 1, 0),
    "Ssend": lambda comm: comm.Ssend(np.ones(3), 1),
    "Split": lambda comm: comm.Split(0 if comm.rank == 1 else 1).Recv(np.ones(1)),
}


def interrupts(gang: Gang, path: str) -> dict[str, Any]:
    """Rank 1 fails instead of taking part; the others are freed, and then all work again.

    Returns for each kind of wait: whether every other rank left with `Interrupted`, the
    longest time that this took from the moment of the interrupt, and whether the renewed
    communicator gives right results.
    """
    word = InterruptWord(path)
    interruption.watch(word, crowded=gang.size > 2)
    world = MPI.COMM_WORLD
    found: dict[str, Any] = {}
    for call, (name, wait) in enumerate(WAITS.items(), start=2):
        interruption.begin(call)
        world.Barrier()
        raised, left, freed = 0.0, 0.0, True
        if gang.rank == 1:
            if name == "Split":
                gang.comm.Split(0)  # mpi4py's own, collective and not interruptible
            time.sleep(0.02)
            raised = time.monotonic()  # one clock for all processes of a machine
            word.raise_to(call)
        else:
            try:
                wait(gang.comm)
                freed = False
            except Interrupted:
                left = time.monotonic()
        world.Barrier()
        interruption.begin(call + 1000)
        gang.renew()
        total = gang.comm.allreduce(gang.rank)
        buffer = np.zeros(2)
        gang.comm.Allreduce(np.full(2, float(gang.rank)), buffer)
        right = total == sum(range(gang.size)) and (buffer == total).all()
        found[name] = [
            world.allreduce(freed, MPI.LAND),
            world.allreduce(left, MPI.MAX) - world.allreduce(raised, MPI.MAX),
            world.allreduce(bool(right), MPI.LAND),
        ]
    return found


def not_yet(gang: Gang, path: str) -> list[Any]:
    """An interrupt of an earlier call does not end this one; one of this call does."""
    word = InterruptWord(path)
    interruption.watch(word, crowded=True)
    interruption.begin(7)
    word.raise_to(6)
    earlier = interruption.interrupted()
    total = gang.comm.allreduce(1)
    MPI.COMM_WORLD.Barrier()
    word.raise_to(7)
    word.raise_to(3)
    return [earlier, total, interruption.interrupted()]
