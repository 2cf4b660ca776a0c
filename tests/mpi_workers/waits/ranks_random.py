"""Random programs that are correct MPI: pending operations of all kinds across waits of all kinds.

A program is some calls. Their steps come from a random number that all ranks have: each rank takes
its part in each, on communicators that the program makes, frees and keeps for later calls. When a
rank completes what it has under way, and how, is its own choice. Some calls fail on one rank; what
they gave is not compared, and they are left out under plain MPI, where they would hang.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from mpi4py import MPI

from tests.mpi_workers.waits.ranks_programs import RENEWED, Calls

Comm = MPI.Intracomm
COUNTS = (1, 3, 40, 3000, 1 << 16)  # elements: of one cache line to what MPI does not send at once
STEPS = 14
LATE_S = 0.001


@dataclass(frozen=True)
class Draw:
    """The random numbers of a step, equal on all ranks."""

    kind: int
    count: int
    root: int
    shift: int
    tag: int
    way: int
    late: int


@dataclass(eq=False)
class Operation:
    """What this rank has under way."""

    requests: list[Any]
    value: Callable[[], Any]
    sent: Any = None  # memory that mpi4py does not keep
    ready: bool = True  # all ranks have begun their part
    done: bool = False
    persistent: bool = False  # a collective
    later: tuple[Comm, int, Draw] | None = None  # the receive of a message that has begun


@dataclass(eq=False)
class State:
    """A call of a program on this rank."""

    comms: list[Comm]
    kept: int  # the first ones belong to the program
    own: np.random.Generator
    operations: list[Operation] = field(default_factory=list)
    values: list[Any] = field(default_factory=list)
    window: MPI.Win | None = None


def _data(c: Comm, draw: Draw, count: int | None = None) -> Any:
    """Elements that no other rank or step has."""
    n = draw.count if count is None else count
    return np.arange(n) % 97 + 1000.0 * draw.tag + 10.0 * c.rank


def _summary(x: Any) -> list[float]:
    return [float(x.sum()), float(x[0]), float(x[-1])] if len(x) else []


def _ends(c: Comm, draw: Draw) -> tuple[int, int]:
    """The ranks that send and receive a message."""
    source = draw.root % c.size
    return source, (source + 1 + draw.shift % max(c.size - 1, 1)) % c.size


# --- operations that are under way after their step ---


def _message(c: Comm, draw: Draw) -> Operation:
    source, target = _ends(c, draw)
    x, y = _data(c, draw), np.zeros(draw.count)
    requests: list[Any] = []
    if c.rank == target:
        place = MPI.ANY_SOURCE if draw.way & 4 else source
        receive = c.Recv_init if draw.way & 8 else c.Irecv
        requests.append(receive(y, place, draw.tag))
    if c.rank == source:
        send = (c.Isend, c.Issend, c.Send_init, c.Ssend_init)[draw.way % 4]
        requests.append(send(x, target, draw.tag))
    for request in requests:
        if isinstance(request, MPI.Prequest):
            request.Start()
    return Operation(requests, lambda: _summary(y), x)


def _later(c: Comm, draw: Draw) -> Operation:
    """A message whose receive begins in a later step."""
    source, target = _ends(c, draw)
    x, requests = _data(c, draw), []
    if c.rank == source:
        requests.append((c.Isend, c.Issend)[draw.way % 2](x, target, draw.tag))
    return Operation(requests, list, x, ready=False, later=(c, source, draw))


def _exchange(c: Comm, draw: Draw) -> Operation:
    x, y = _data(c, draw), np.zeros(draw.count)
    to, source = (c.rank + draw.shift) % c.size, (c.rank - draw.shift) % c.size
    return Operation([c.Isendrecv(x, to, draw.tag, y, source, draw.tag)], lambda: _summary(y), x)


Started = Callable[[Comm, Any, Any, int, int], Any]  # x, y: for all ranks; the count, the root
COLLECTIVES: tuple[Started, ...] = (
    lambda c, x, y, n, r: c.Ibarrier(),
    lambda c, x, y, n, r: c.Iallreduce(x[:n], y[:n]),
    lambda c, x, y, n, r: c.Ibcast(x[:n] if c.rank == r else y[:n], r),
    lambda c, x, y, n, r: c.Ireduce(x[:n], y[:n], MPI.MAX, r),
    lambda c, x, y, n, r: c.Igather(x[:n], y if c.rank == r else None, r),
    lambda c, x, y, n, r: c.Iscatter(x if c.rank == r else None, y[:n], r),
    lambda c, x, y, n, r: c.Iallgather(x[:n], y),
    lambda c, x, y, n, r: c.Iallgatherv(x[:n], [y, [n] * c.size]),
    lambda c, x, y, n, r: c.Ialltoall(x, y),
    lambda c, x, y, n, r: c.Ialltoallv([x, [n] * c.size], [y, [n] * c.size]),
    lambda c, x, y, n, r: c.Iscan(x[:n], y[:n]),
    lambda c, x, y, n, r: c.Ireduce_scatter(x, y[:n], [n] * c.size),
    lambda c, x, y, n, r: c.Ireduce_scatter_block(x, y[:n]),
    lambda c, x, y, n, r: c.Barrier_init(),
    lambda c, x, y, n, r: c.Allreduce_init(x[:n], y[:n]),
    lambda c, x, y, n, r: c.Bcast_init(x[:n] if c.rank == r else y[:n], r),
    lambda c, x, y, n, r: c.Allgather_init(x[:n], y),
    lambda c, x, y, n, r: c.Alltoall_init(x, y),
)


def _collective(c: Comm, draw: Draw) -> Operation:
    n = min(draw.count, 1 << 13)
    x, y = _data(c, draw, n * c.size), np.zeros(n * c.size)
    make = COLLECTIVES[draw.way % len(COLLECTIVES)]
    request = make(c, x, y, n, draw.root % c.size)
    persistent = isinstance(request, MPI.Prequest)
    if persistent:
        request.Start()
    return Operation([request], lambda: _summary(y), x, persistent=persistent)


# --- calls that wait ---


def _receive(state: State, operation: Operation) -> None:
    """Receive the message of a `_later`, in one of many ways."""
    assert operation.later is not None
    c, source, draw = operation.later
    operation.later, operation.ready = None, True
    if c.rank != _ends(c, draw)[1]:
        return
    y, status, place = (
        np.zeros(draw.count),
        MPI.Status(),
        (source, MPI.ANY_SOURCE)[draw.way >> 3 & 1],
    )
    match draw.way % 6:
        case 0:
            c.Recv(y, place, draw.tag, status)
        case 1:
            c.Probe(place, draw.tag, status)
            c.Recv(y, status.source, status.tag)
        case 2:
            c.Mprobe(place, draw.tag, status).Recv(y)
        case 3:
            while not c.Iprobe(place, draw.tag, status):
                pass
            c.Recv(y, place, draw.tag)
        case 4:
            while (message := c.Improbe(place, draw.tag, status)) is None:
                pass
            message.Irecv(y).Wait()
        case _:
            c.Irecv(y, place, draw.tag).Wait(status)
    state.values += [*_summary(y), status.source, status.tag, status.Get_count(MPI.DOUBLE)]


Waiting = Callable[[Comm, Any, Any, int, int], Any]
WAITS: tuple[Waiting, ...] = (
    lambda c, x, y, n, r: c.Barrier(),
    lambda c, x, y, n, r: c.Allreduce(x[:n], y[:n]),
    lambda c, x, y, n, r: c.Bcast(x[:n], r) or y.__setitem__(slice(0, n), x[:n]),
    lambda c, x, y, n, r: c.Reduce(x[:n], y[:n], MPI.MIN, r),
    lambda c, x, y, n, r: c.Gather(x[:n], y if c.rank == r else None, r),
    lambda c, x, y, n, r: c.Scatter(x if c.rank == r else None, y[:n], r),
    lambda c, x, y, n, r: c.Gatherv(x[:n], [y, [n] * c.size] if c.rank == r else None, r),
    lambda c, x, y, n, r: c.Scatterv([x, [n] * c.size] if c.rank == r else None, y[:n], r),
    lambda c, x, y, n, r: c.Allgather(x[:n], y),
    lambda c, x, y, n, r: c.Allgatherv(x[:n], [y, [n] * c.size]),
    lambda c, x, y, n, r: c.Alltoall(x, y),
    lambda c, x, y, n, r: c.Alltoallv([x, [n] * c.size], [y, [n] * c.size]),
    lambda c, x, y, n, r: c.Scan(x[:n], y[:n]),
    lambda c, x, y, n, r: c.Exscan(x[:n], y[:n]),
    lambda c, x, y, n, r: c.Reduce_scatter(x, y[:n], [n] * c.size),
    lambda c, x, y, n, r: c.Reduce_scatter_block(x, y[:n]),
    lambda c, x, y, n, r: c.allreduce([x[0], c.rank]),
    lambda c, x, y, n, r: c.bcast({"of": x[0]}, r),
    lambda c, x, y, n, r: c.gather(x[0], r),
    lambda c, x, y, n, r: c.alltoall([x[0]] * c.size),
    lambda c, x, y, n, r: c.Sendrecv(
        x[:n], (c.rank + 1) % c.size, 0, y[:n], (c.rank - 1) % c.size, 0
    ),
    lambda c, x, y, n, r: c.Sendrecv_replace(
        x[:n], (c.rank + 1) % c.size, 0, (c.rank - 1) % c.size, 0
    )
    or y.__setitem__(slice(0, n), x[:n]),
    lambda c, x, y, n, r: c.sendrecv(
        x[0], (c.rank + 1) % c.size, 0, None, (c.rank - 1) % c.size, 0
    ),
)  # fmt: skip


def _wait(state: State, c: Comm, draw: Draw) -> None:
    n = min(draw.count, 1 << 13)
    x, y = _data(c, draw, n * c.size), np.zeros(n * c.size)
    got = WAITS[draw.way % len(WAITS)](c, x, y, n, draw.root % c.size)
    state.values += [*_summary(y), got]


def _complete(state: State, *, everything: bool = False) -> None:
    """Wait for some operations, in an order and by calls of this rank's own choice."""
    open_ones = [one for one in state.operations if one.ready and not one.done]
    if not everything:
        open_ones = [one for one in open_ones if state.own.integers(2)]
    requests = [request for one in open_ones for request in one.requests]
    way = int(state.own.integers(8))
    if way == 3 and any(one.persistent for one in open_ones):
        way = 0  # MPICH's Testall reports errors of persistent collectives that have none
    if way == 0:
        MPI.Request.Waitall(requests)
    elif way == 1:
        while MPI.Request.Waitany(requests) != MPI.UNDEFINED:
            pass
    elif way == 2:
        while MPI.Request.Waitsome(requests) is not None:
            pass
    elif way == 3:
        while not MPI.Request.Testall(requests):
            pass
    elif way == 4:
        while MPI.Request.Testsome(requests) is not None:
            pass
    else:
        for place in state.own.permutation(len(requests)):
            request = requests[place]
            if way == 5:
                while not request.Test():
                    pass
            elif way == 6:
                while not request.Get_status():
                    pass
            request.Wait()
    for one in open_ones:
        one.done = True
        for request in one.requests:
            if isinstance(request, MPI.Prequest):
                request.Free()


def _make(state: State, c: Comm, draw: Draw) -> None:
    """A further communicator, or a freed one."""
    if draw.way % 5 == 4 and len(state.comms) > state.kept + 1 and not state.operations:
        state.comms.pop().Free()
    elif len(state.comms) < state.kept + 5:
        made: Any
        match draw.way % 4:
            case 0:
                made = c.Dup()
            case 1:
                made = c.Split(c.rank % 2, -c.rank)
            case 2:
                made, request = c.Idup()
                request.Wait()
            case _:
                made = c.Create(c.group)
        state.comms.append(made)


def _access(state: State, c: Comm, draw: Draw) -> None:
    """One rank has access to the memory of another one, which does something else."""
    if state.window is None:
        state.window = MPI.Win.Allocate(8 * 4, 8, comm=state.comms[0])
        memory = np.frombuffer(state.window.tomemory(), "i8")
        memory[:] = 0
        state.comms[0].Barrier()
    size = state.comms[0].size
    target, x, y = (draw.root + draw.shift) % size, np.full(2, draw.tag), np.zeros(1, "i8")
    if state.comms[0].rank != draw.root % size:
        return
    match draw.way % 3:
        case 0:
            state.window.Lock(target, MPI.LOCK_EXCLUSIVE)
            state.window.Accumulate(x, target)
            state.window.Unlock(target)
        case 1:
            state.window.Lock_all()
            state.window.Fetch_and_op(x[:1], y, target, 2)
            state.window.Flush(target)
            state.window.Unlock_all()
        case _:
            state.window.Lock(target, MPI.LOCK_SHARED)
            state.window.Raccumulate(x, target).Wait()
            state.window.Unlock(target)


STARTS = (_message, _message, _later, _exchange, _collective, _collective, _collective)


def _step(state: State, draw: Draw, which: int, receive: int) -> None:
    c = state.comms[which % len(state.comms)]
    if draw.late == c.rank:
        time.sleep(LATE_S)
    waiting = [one for one in state.operations if one.later is not None]
    if draw.kind < 7:
        state.operations.append(STARTS[draw.kind](c, draw))
    elif draw.kind < 12:
        _wait(state, c, draw)
    elif draw.kind == 12:
        _access(state, c, draw)
    elif draw.kind == 13:
        _make(state, c, draw)
    elif waiting:
        _receive(state, waiting[receive % len(waiting)])
    if state.own.integers(3) == 0:
        _complete(state)


def _run(
    comm: Comm, seed: int, kept: list[Comm], keeps: bool, fails: tuple[int, int] | None
) -> Any:
    """A call: its values as a number. Rank `fails[0]` raises after so many steps."""
    random = np.random.default_rng(seed)
    state = State([*kept, comm], len(kept), np.random.default_rng([seed, comm.rank]))
    for number in range(STEPS):
        if fails == (comm.rank, number):
            raise ValueError("this rank fails")
        draw = Draw(
            kind=int(random.integers(17)), count=int(random.choice(COUNTS)),
            root=int(random.integers(12)), shift=int(random.integers(12)), tag=number + 1,
            way=int(random.integers(1 << 10)), late=int(random.integers(9)),
        )  # fmt: skip
        _step(state, draw, int(random.integers(60)), int(random.integers(60)))
    for one in [one for one in state.operations if one.later is not None]:
        _receive(state, one)
    _complete(state, everything=True)
    state.values += [value for one in state.operations for value in one.value()]
    if state.window is not None:
        state.comms[0].Barrier()
        state.window.Lock(state.comms[0].rank)
        state.values += np.frombuffer(state.window.tomemory(), "i8").tolist()
        state.window.Unlock(state.comms[0].rank)
        state.window.Free()
    mine = state.comms[len(kept) + 1 :]
    if keeps and mine and len(kept) < 3:
        kept.append(mine.pop(0))
    for made in mine:
        made.Free()
    return [len(state.values), zlib.crc32(repr(state.values).encode())]


def _program(seed: int) -> Callable[[Calls, bool], Any]:
    def program(calls: Calls, plain: bool) -> list[Any]:
        random, kept, told = np.random.default_rng(seed), [], []
        for _ in range(1 + random.integers(4)):
            keeps, uses, bad = (int(random.integers(3)) for _ in range(3))
            number, rank, step = (int(random.integers(1 << 20)) for _ in range(3))
            if bad == 0:
                fails = (rank % calls.size, step % STEPS)
                if not plain:
                    calls.call(_run, number, kept[:] if uses else [], False, fails)
            else:
                told.append(calls.call(_run, number, kept, keeps > 0, None))
                if told[-1][0] == RENEWED:
                    break  # the program's communicators are gone
        return told

    return program


class _Programs:
    """All of them, by number."""

    def __getitem__(self, name: str) -> Callable[..., Any]:
        return _program(int(name))


PROGRAMS = _Programs()
