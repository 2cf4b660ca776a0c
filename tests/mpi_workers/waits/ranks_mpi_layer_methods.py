"""Calls of every method of a communicator: with the layer they must return what they do without."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from mpi4py import MPI

Comm = MPI.Intracomm


def _own(comm: Comm, count: int = 4) -> Any:
    return np.arange(count, dtype=np.float64) + 10 * comm.rank


def _counts(comm: Comm) -> list[int]:
    return [rank + 1 for rank in range(comm.size)]


def _object(comm: Comm) -> Any:
    """Of a different size on every rank."""
    return {"rank": comm.rank, "text": "x" * (10**comm.rank), "none": None}


def _next(comm: Comm) -> tuple[int, int]:
    return (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size


def gatherv_buffer(comm: Comm) -> Any:
    root = comm.size - 1
    buffer = np.zeros(sum(_counts(comm))) if comm.rank == root else None
    target = None if buffer is None else [buffer, _counts(comm)]
    comm.Gatherv(_own(comm, comm.rank + 1), target, root)
    return buffer


def alltoallv_buffer(comm: Comm) -> Any:
    mine = comm.rank + 1
    buffer = np.zeros(mine * comm.size)
    comm.Alltoallv([_own(comm, sum(_counts(comm))), _counts(comm)], [buffer, [mine] * comm.size])
    return buffer


def alltoallw_buffer(comm: Comm) -> Any:
    buffer, one = np.zeros(comm.size), [1] * comm.size
    places = [8 * rank for rank in range(comm.size)]
    types = [MPI.DOUBLE] * comm.size
    comm.Alltoallw([_own(comm, comm.size), one, places, types], [buffer, one, places, types])
    return buffer


def exscan_buffer(comm: Comm) -> Any:
    buffer = np.full(4, -1.0)
    comm.Exscan(_own(comm), buffer)
    return buffer if comm.rank else None  # undefined on the first rank


def barrier(comm: Comm) -> Any:
    comm.barrier()
    return comm.Barrier()


def _ring(comm: Comm, send: Callable[..., None]) -> Any:
    """Each rank in turn sends to the next: blocking sends cannot meet."""
    after, before = _next(comm)
    buffer, status = np.zeros(1 << 17), MPI.Status()  # 1 MiB: beyond any eager limit
    for rank in range(comm.size):
        if comm.size == 1:
            break
        if rank == comm.rank:
            send(np.full(1 << 17, float(rank)), after, 5)
        elif rank == before:
            comm.Recv(buffer, MPI.ANY_SOURCE, 5, status)
    return [buffer.sum(), status.Get_source(), status.Get_tag(), status.Get_count(MPI.DOUBLE)]


def sendrecv_buffer(comm: Comm) -> Any:
    after, before = _next(comm)
    buffer, status = np.zeros(1 << 17), MPI.Status()
    comm.Sendrecv(np.full(1 << 17, 1.0 + comm.rank), after, 3, buffer, before, 3, status)
    return [buffer.sum(), status.Get_source(), status.Get_tag()]


def probe_then_recv(comm: Comm) -> Any:
    after, before = _next(comm)
    request = comm.Isend(_own(comm, 6), after, 9)
    status = MPI.Status()
    comm.Probe(before, MPI.ANY_TAG, status)
    buffer = np.zeros(status.Get_count(MPI.DOUBLE))
    message = comm.Mprobe(before, 9)
    message.Recv(buffer)
    request.Wait()
    return buffer


def send_recv_object(comm: Comm) -> Any:
    after, before = _next(comm)
    if comm.size == 1:
        return None
    if comm.rank % 2 == 0:
        comm.send(_object(comm), after, 4)
        return comm.recv(None, before, 4)
    received = comm.recv(source=before, tag=MPI.ANY_TAG)
    comm.ssend(_object(comm), after, 4)
    return received


def sendrecv_object(comm: Comm) -> Any:
    after, before = _next(comm)
    status = MPI.Status()
    received = comm.sendrecv(_object(comm), after, 1, None, before, 1, status)
    return [received, status.Get_source(), status.Get_tag()]


def probe_object(comm: Comm) -> Any:
    after, before = _next(comm)
    request = comm.isend(_object(comm), after, 2)
    status = MPI.Status()
    comm.probe(before, 2, status)
    received = comm.mprobe(status.Get_source(), 2).recv()
    request.wait()
    return received


def split(comm: Comm) -> Any:
    part = comm.Split(comm.rank % 2, -comm.rank)
    total = part.allreduce([comm.rank])
    part.Free()
    return total


def _filled(buffer: Any, call: Callable[[Any], None]) -> Any:
    call(buffer)
    return buffer


IN_STEPS = (
    gatherv_buffer, alltoallv_buffer, alltoallw_buffer, exscan_buffer, barrier, sendrecv_buffer,
    probe_then_recv, send_recv_object, sendrecv_object, probe_object, split,
)  # fmt: skip
METHODS: dict[str, Callable[[Comm], Any]] = {
    "scatter_buffer": lambda c: _filled(
        np.zeros(3),
        lambda b: c.Scatter(np.arange(3.0 * c.size) if c.rank == 0 else None, b, root=0),
    ),
    "scatterv_buffer": lambda c: _filled(
        np.zeros(c.rank + 1),
        lambda b: c.Scatterv(
            [np.arange(float(sum(_counts(c)))), _counts(c)] if c.rank == 0 else None, b, root=0
        ),
    ),
    "bcast_buffer": lambda c: _filled(_own(c), lambda b: c.Bcast(b, root=c.size - 1)),
    "gather_buffer": lambda c: _filled(
        np.zeros(4 * c.size) if c.rank == 0 else None, lambda b: c.Gather(_own(c), b, root=0)
    ),
    "reduce_buffer": lambda c: _filled(
        np.zeros(4) if c.rank == 0 else None, lambda b: c.Reduce(_own(c), b, MPI.MAX, 0)
    ),
    "allreduce_in_place": lambda c: _filled(_own(c), lambda b: c.Allreduce(MPI.IN_PLACE, b)),
    "allgather_buffer": lambda c: _filled(np.zeros(4 * c.size), lambda b: c.Allgather(_own(c), b)),
    "allgatherv_buffer": lambda c: _filled(
        np.zeros(sum(_counts(c))), lambda b: c.Allgatherv(_own(c, c.rank + 1), [b, _counts(c)])
    ),
    "alltoall_buffer": lambda c: _filled(
        np.zeros(2 * c.size), lambda b: c.Alltoall(_own(c, 2 * c.size), b)
    ),
    "allreduce_buffer": lambda c: _filled(
        np.zeros(4), lambda b: c.Allreduce(_own(c), b, op=MPI.SUM)
    ),
    "reduce_scatter_buffer": lambda c: _filled(
        np.zeros(c.rank + 1), lambda b: c.Reduce_scatter(_own(c, sum(_counts(c))), b, _counts(c))
    ),
    "reduce_scatter_block_buffer": lambda c: _filled(
        np.zeros(2), lambda b: c.Reduce_scatter_block(_own(c, 2 * c.size), b)
    ),
    "scan_buffer": lambda c: _filled(np.zeros(4), lambda b: c.Scan(_own(c), b)),
    # Of objects, in one expression.
    "send_recv_buffer": lambda c: _ring(c, c.Send),
    "ssend_recv_buffer": lambda c: _ring(c, c.Ssend),
    "bcast_object": lambda c: c.bcast(_object(c) if c.rank == c.size - 1 else None, c.size - 1),
    "gather_object": lambda c: c.gather(_object(c), c.size - 1),
    "allgather_object": lambda c: c.allgather(_object(c)),
    "scatter_object": lambda c: c.scatter(
        [["x" * r, r] for r in range(c.size)] if c.rank == 0 else None, 0
    ),
    "alltoall_object": lambda c: c.alltoall([[c.rank, "y" * r] for r in range(c.size)]),
    "reduce_object": lambda c: c.reduce(10 ** (20 * c.rank), MPI.SUM, c.size - 1),  # beyond 64 bits
    "allreduce_object": lambda c: c.allreduce([c.rank]),  # joined in the order of the ranks
    "allreduce_maxloc": lambda c: c.allreduce((c.rank % 2, c.rank), MPI.MAXLOC),
    "scan_object": lambda c: c.scan([c.rank]),
    "exscan_object": lambda c: c.exscan([c.rank]),
} | {method.__name__: method for method in IN_STEPS}
