"""Functions that test_communicator.py runs: abandoned operations, and calls that fail."""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
from mpi4py import MPI

from mpi_workers.failures import Failure, Interrupted
from mpi_workers.rank.gang import Gang
from mpi_workers.waits import communicator, interruption
from mpi_workers.waits.interruption import InterruptWord

Comm = MPI.Intracomm

# Each with both buffers, of 4 and of 4 for each rank; rank 1 cannot be done without rank 0.
UNDER_WAY: dict[str, Callable[[Comm, Any, Any], Any]] = {
    "Allgatherv": lambda c, x, y: c.Allgatherv(x, [y, [4] * c.size]),
    "Allreduce": lambda c, x, y: c.Allreduce(x, y[:4]),
    "Alltoallv": lambda c, x, y: c.Alltoallv([x, [2] * c.size], [y, [2] * c.size]),
    "Iallgatherv, dropped": lambda c, x, y: c.Iallgatherv(x, [y, [4] * c.size]) and c.Barrier(),
    "Iallreduce, dropped": lambda c, x, y: c.Iallreduce(x, y[:4]) and c.Barrier(),
    "Sendrecv": lambda c, x, y: c.Sendrecv(x, 1 - c.rank, 0, y, 1 - c.rank, 0),
    "Irecv, dropped": lambda c, x, y: _exchange(c, x, y) and c.Barrier(),
    "Reduce": lambda c, x, y: c.Reduce(x, y[:4], root=1),
    "Reduce_scatter_block": lambda c, x, y: c.Reduce_scatter_block(y, x),
    "Scan": lambda c, x, y: c.Scan(x, y[:4]),
}


def _exchange(comm: Comm, x: Any, y: Any) -> Any:
    return comm.Issend(x, 1 - comm.rank), comm.Irecv(y, 1 - comm.rank)


def given_up(gang: Gang, path: str) -> dict[str, list[bool]]:
    """Rank 1 gives up what rank 0 takes part in later.

    Returns for each operation whether rank 1 kept its buffers as long as MPI could write into
    them, and no longer.
    """
    word = InterruptWord(path)
    interruption.watch(word, crowded=True)
    world = MPI.COMM_WORLD
    found: dict[str, list[bool]] = {}
    for call, (name, operation) in enumerate(UNDER_WAY.items(), start=2):
        kept = gone = True
        x, y = np.arange(4.0), np.zeros(4 * gang.size)
        buffers = [weakref.ref(x), weakref.ref(y)]
        if gang.rank == 1:
            interruption.begin(call)
            word.raise_to(call)
            try:
                operation(gang.comm, x, y)
                kept = False
            except Interrupted:
                pass
            del x, y
            gc.collect()
            kept = kept and all(buffer() is not None for buffer in buffers)
        world.Barrier()
        interruption.begin(call + 1000)
        if gang.rank == 0:
            operation(gang.comm, x, y)
        else:
            deadline = time.monotonic() + 5
            while any(buffer() is not None for buffer in buffers):
                communicator.release_finished()
                if time.monotonic() > deadline:
                    gone = False
                    break
        gang.renew()
        found[name] = [world.allreduce(kept, MPI.LAND), world.allreduce(gone, MPI.LAND)]
    return found


def never_waited_for(gang: Gang) -> int:
    """How many of a thousand messages that were sent and forgotten are still kept."""
    other = 1 - gang.rank
    for number in range(1000):
        gang.comm.isend(number, other)
        assert gang.comm.recv(source=other) == number
    return communicator.abandoned()


def communicators(gang: Gang, path: str) -> list[Any]:
    """The failed calls that use up a communicator, and the message when no more can be made."""
    interruption.watch(InterruptWord(path), crowded=True)
    first = gang.comm
    gang.enter()
    gang.renew()  # the call that failed had not looked at it
    same = gang.comm is first
    gang.enter()
    if gang.rank == 1:
        assert gang.comm is first
    gang.renew()  # one rank had
    other = gang.comm is not first
    # Most of MPI's communicators are taken without messages: on busy cores each message takes long.
    taken = [MPI.COMM_SELF.Dup() for _ in range(1500)]
    count, said = len(taken), ""
    try:
        while count < 3000:
            assert gang.comm is not first
            gang.renew()
            count += 1
    except Failure as failure:
        said = f"{failure.kind}: {failure}"
    gang.enter()
    return [same, other, count, said, gang.comm.allreduce(1)]
