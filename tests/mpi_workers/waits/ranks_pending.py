"""Programs in which a rank waits while operations of its own are pending.

Rank 1 starts an operation (`PENDING`), waits for the other ranks in another call (`WAITS`), and
completes the operation then. The others complete their side of it before they enter that call: so
rank 1 has to make progress on the operation while it waits. MPI demands that of every wait.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from mpi4py import MPI

from tests.mpi_workers.waits.ranks_programs import Calls

Comm = MPI.Intracomm
Finish = Callable[[], Any]

LARGE = 1 << 18  # elements: 2 MiB, beyond what MPI sends at once
MANY = 3000  # small messages: more than MPI's queues between two ranks hold
PENDING_TAG, WAIT_TAG = 7, 5
PAUSE_S = 0.002  # until rank 1 waits; without it the programs are correct, and find less


def _ones(count: int = LARGE) -> Any:
    return np.ones(count)


def _sum(x: Any) -> float:
    return float(np.sum(x))


# --- operations of which rank 1's part is pending ---


def _pair(
    first: Callable[[Comm], Finish], other: Callable[[Comm], Any]
) -> Callable[[Comm], Finish]:
    """An operation between ranks 1 and 0."""

    def start(c: Comm) -> Finish:
        if c.rank == 1:
            return first(c)
        if c.rank == 0:
            time.sleep(PAUSE_S)
            other(c)
        return lambda: None

    return start


def _received(make: Callable[[Comm, Any], Any], count: int = LARGE) -> Callable[[Comm], Finish]:
    def first(c: Comm) -> Finish:
        x = np.zeros(count)
        request = make(c, x)
        return lambda: [request.Wait() and None, _sum(x)]

    return first


def _sent(make: Callable[[Comm, Any], Any], count: int = LARGE) -> Callable[[Comm], Finish]:
    def first(c: Comm) -> Finish:
        request = make(c, _ones(count))
        return lambda: request.Wait() and None

    return first


def _received_by_zero(c: Comm, count: int = LARGE) -> None:
    x = np.zeros(count)
    c.Recv(x, 1, PENDING_TAG)
    assert _sum(x) == count


def _started(request: Any) -> Any:
    request.Start()
    return request


def _many_isends(c: Comm) -> Finish:
    requests = [c.Isend(_ones(4), 0, PENDING_TAG) for _ in range(MANY)]
    return lambda: MPI.Request.Waitall(requests) and None


def _many_received(c: Comm) -> None:
    for _ in range(MANY):
        _received_by_zero(c, 4)


def _imrecv(c: Comm) -> Finish:
    x = np.zeros(LARGE)
    message = c.Mprobe(0, PENDING_TAG)
    request = message.Irecv(x)
    return lambda: [request.Wait() and None, _sum(x)]


def _isendrecv(c: Comm) -> Finish:
    x, y = _ones(), np.zeros(LARGE)
    request = c.Isendrecv(x, 0, PENDING_TAG, y, 0, PENDING_TAG)
    return lambda: [request.Wait() and None, _sum(y)]


def _partitioned(c: Comm) -> Finish:
    x = np.zeros(LARGE)
    request = c.Precv_init(x, 4, 0, PENDING_TAG)
    request.Start()

    def finish() -> Any:
        request.Wait()
        request.Free()
        return _sum(x)

    return finish


def _partitioned_send(c: Comm) -> None:
    request = c.Psend_init(_ones(), 4, 1, PENDING_TAG)
    request.Start()
    for partition in range(4):
        request.Pready(partition)
    request.Wait()
    request.Free()


def _collective(
    make: Callable[[Comm, Any, Any], Any], count: int = LARGE
) -> Callable[[Comm], Finish]:
    """A nonblocking or persistent collective, which all but rank 1 complete at once."""

    def start(c: Comm) -> Finish:
        y = np.zeros(count)
        if c.rank != 1:
            time.sleep(PAUSE_S)
        x = _ones()  # of a persistent collective mpi4py keeps only the memory that is written
        request = make(c, x[: len(y)], y)
        if c.rank != 1:
            request.Wait()

        def finish() -> Any:
            if c.rank == 1:
                request.Wait()
            assert x.all()
            if isinstance(request, MPI.Prequest):
                request.Free()
            return _sum(y)

        return finish

    return start


def _window(access: Callable[[MPI.Win, Any], Any]) -> Callable[[Comm], Finish]:
    """Rank 0 has access to a window of rank 1, which does not take part."""

    def start(c: Comm) -> Finish:
        window = MPI.Win.Allocate(8 * LARGE, 8, comm=c)
        memory = np.frombuffer(window.tomemory(), "f8")
        memory[:] = c.rank
        c.Barrier()
        got = None
        if c.rank == 0:
            time.sleep(PAUSE_S)
            x = np.full(LARGE, 3.0)
            access(window, x)
            got = _sum(x)

        def finish() -> Any:
            c.Barrier()
            window.Lock(c.rank)
            total = _sum(memory)
            window.Unlock(c.rank)
            window.Free()
            return [got, total]

        return finish

    return start


def _locked(access: Callable[[MPI.Win, Any], Any]) -> Callable[[MPI.Win, Any], None]:
    def run(window: MPI.Win, x: Any) -> None:
        window.Lock(1, MPI.LOCK_EXCLUSIVE)
        access(window, x)
        window.Unlock(1)

    return run


def _flushed(access: Callable[[MPI.Win, Any], Any]) -> Callable[[MPI.Win, Any], None]:
    def run(window: MPI.Win, x: Any) -> None:
        window.Lock_all()
        for _ in range(20):
            access(window, x)
            window.Flush(1)
        window.Unlock_all()

    return run


def _exposed(c: Comm) -> Finish:
    """Rank 1 has exposed its window, into which rank 0 puts."""
    window = MPI.Win.Allocate(8 * LARGE, 8, comm=c)
    memory = np.frombuffer(window.tomemory(), "f8")
    memory[:] = 0
    c.Barrier()
    if c.rank == 1:
        window.Post(c.group.Incl([0]))
    if c.rank == 0:
        time.sleep(PAUSE_S)
        window.Start(c.group.Incl([1]))
        window.Put(_ones(), 1)
        window.Complete()

    def finish() -> Any:
        if c.rank == 1:
            window.Wait()
        total = _sum(memory)
        window.Free()
        return total

    return finish


PENDING: dict[str, Callable[[Comm], Finish]] = {
    "Irecv large": _pair(
        _received(lambda c, x: c.Irecv(x, 0, PENDING_TAG)),
        lambda c: c.Ssend(_ones(), 1, PENDING_TAG),
    ),
    "Irecv of any source": _pair(
        _received(lambda c, x: c.Irecv(x, MPI.ANY_SOURCE, PENDING_TAG)),
        lambda c: c.Send(_ones(), 1, PENDING_TAG),
    ),
    "Isend large": _pair(_sent(lambda c, x: c.Isend(x, 0, PENDING_TAG)), _received_by_zero),
    "Issend small": _pair(
        _sent(lambda c, x: c.Issend(x, 0, PENDING_TAG), 4), lambda c: _received_by_zero(c, 4)
    ),
    "3000 Isends": _pair(_many_isends, _many_received),
    "Imrecv": _pair(_imrecv, lambda c: c.Send(_ones(), 1, PENDING_TAG)),
    "Isendrecv": _pair(
        _isendrecv,
        lambda c: c.Sendrecv(_ones(), 1, PENDING_TAG, np.zeros(LARGE), 1, PENDING_TAG),
    ),
    "Recv_init": _pair(
        _received(lambda c, x: _started(c.Recv_init(x, 0, PENDING_TAG))),
        lambda c: c.Ssend(_ones(), 1, PENDING_TAG),
    ),
    "Send_init": _pair(
        _sent(lambda c, x: _started(c.Send_init(x, 0, PENDING_TAG))), _received_by_zero
    ),
    "Precv_init": _pair(_partitioned, _partitioned_send),
    "Ibarrier": _collective(lambda c, x, y: c.Ibarrier()),
    "Iallreduce": _collective(lambda c, x, y: c.Iallreduce(x, y)),
    "Iallreduce small": _collective(lambda c, x, y: c.Iallreduce(x, y), 3),
    "Ibcast": _collective(lambda c, x, y: c.Ibcast(x if c.rank == 1 else y, 1)),
    "Igather": _collective(
        lambda c, x, y: c.Igather(x, np.zeros(LARGE * c.size) if c.rank == 0 else None, 0)
    ),
    "Ialltoall": _collective(
        lambda c, x, y: c.Ialltoall(x[: LARGE // 6 * c.size], y[: LARGE // 6 * c.size])
    ),
    "Iallgatherv": _collective(
        lambda c, x, y: c.Iallgatherv(x[: LARGE // 8], [y, [LARGE // 8] * c.size])
    ),
    "Iscan": _collective(lambda c, x, y: c.Iscan(x, y)),
    "Allreduce_init": _collective(lambda c, x, y: _started(c.Allreduce_init(x, y))),
    "Bcast_init": _collective(lambda c, x, y: _started(c.Bcast_init(y, 1))),
    "Put": _window(_locked(lambda w, x: w.Put(x, 1))),
    "Get": _window(_locked(lambda w, x: w.Get(x, 1))),
    "Accumulate": _window(_locked(lambda w, x: w.Accumulate(x, 1))),
    "Rget": _window(_locked(lambda w, x: w.Rget(x, 1).Wait())),
    "Rput": _window(_locked(lambda w, x: w.Rput(x, 1).Wait())),
    "Fetch_and_op": _window(_flushed(lambda w, x: w.Fetch_and_op(x[:1], x[1:2], 1))),
    "Compare_and_swap": _window(
        _flushed(
            lambda w, x: w.Compare_and_swap(*(x[i : i + 1].view("i8") for i in range(3)), 1)
        )
    ),
    "Get_accumulate": _window(_flushed(lambda w, x: w.Get_accumulate(x[:9], x[9:18], 1))),
    "Post": _exposed,
}  # fmt: skip


# --- calls in which rank 1 waits for the others ---


def _at_one(wait: Callable[[Comm, Any], Any], count: int = 3) -> Callable[[Comm], Any]:
    """Rank 1 waits for a message of rank 0."""

    def run(c: Comm) -> Any:
        x = np.zeros(count)
        if c.rank == 0:
            c.Send(np.full(count, 2.0), 1, WAIT_TAG)
        if c.rank == 1:
            wait(c, x)
        return _sum(x)

    return run


def _to_zero(send: Callable[[Comm, Any], Any], count: int) -> Callable[[Comm], Any]:
    """Rank 1 waits until rank 0 receives."""

    def run(c: Comm) -> Any:
        x = np.full(count, 1.0 + c.rank)
        if c.rank == 1:
            send(c, x)
        if c.rank == 0:
            c.Recv(x, 1, WAIT_TAG)
        return _sum(x)

    return run


def _exchange(run: Callable[[Comm, Any, int], Any], count: int) -> Callable[[Comm], Any]:
    def exchange(c: Comm) -> Any:
        x = np.full(count, 1.0 + c.rank)
        y = run(c, x, 1 - c.rank) if c.rank < 2 else x
        return _sum(x if y is None else y)

    return exchange


def _sendrecv(c: Comm, x: Any, to: int) -> Any:
    y = np.zeros_like(x)
    c.Sendrecv(x, to, WAIT_TAG, y, to, WAIT_TAG)
    return y


def _polls(test: Callable[[Any], Any]) -> Callable[[Comm, Any], None]:
    def wait(c: Comm, x: Any) -> None:
        requests = [c.Irecv(x, 0, WAIT_TAG)]
        while not test(requests):
            pass
        requests[0].Wait()

    return wait


def _iprobe(c: Comm, x: Any) -> None:
    while not c.Iprobe(0, WAIT_TAG):
        pass
    c.Recv(x, 0, WAIT_TAG)


def _improbe(c: Comm, x: Any) -> None:
    while (message := c.Improbe(0, WAIT_TAG)) is None:
        pass
    message.Recv(x)


def _into(c: Comm, count: int, call: Callable[[Any, Any], Any]) -> float:
    x, y = np.full(count, 1.0 + c.rank), np.zeros(count)
    call(x, y)
    return _sum(y)


def _made(make: Callable[[Comm], Any]) -> Callable[[Comm], Any]:
    def run(c: Comm) -> Any:
        made = make(c)
        size = made.size
        made.Free()
        return size

    return run


def _windowed(use: Callable[[MPI.Win, Comm], Any]) -> Callable[[Comm], Any]:
    def run(c: Comm) -> Any:
        x = np.zeros(4)
        window = MPI.Win.Create(x, 8, comm=c)
        use(window, c)
        window.Free()
        return _sum(x)

    return run


def _fenced(window: MPI.Win, c: Comm) -> None:
    window.Fence()
    window.Put(np.ones(1), (c.rank + 1) % c.size)
    window.Fence()


def _post_wait(window: MPI.Win, c: Comm) -> None:
    if c.rank == 1:
        window.Post(c.group.Incl([0]))
        window.Wait()
    if c.rank == 0:
        window.Start(c.group.Incl([1]))
        window.Put(np.ones(1), 1)
        window.Complete()


def _file(c: Comm) -> Any:
    path = f"{tempfile.gettempdir()}/pending-{os.getppid()}"
    file = MPI.File.Open(c, path, MPI.MODE_CREATE | MPI.MODE_RDWR | MPI.MODE_DELETE_ON_CLOSE)
    file.Write_at_all(8 * 3 * c.rank, np.full(3, 1.0 + c.rank))
    file.Sync()
    x = np.zeros(3)
    file.Read_at_all(8 * 3 * ((c.rank + 1) % c.size), x)
    file.Close()
    return _sum(x)


def _intercomm(c: Comm) -> Any:
    """All ranks but the first make an intercommunicator with it."""
    part = c.Split(min(c.rank, 1))
    between = part.Create_intercomm(0, c, 1 if c.rank == 0 else 0, WAIT_TAG)
    y = np.zeros(1)
    between.Allreduce(np.full(1, 1.0 + c.rank), y)
    between.Barrier()
    between.Free()
    part.Free()
    return _sum(y)


def _neighbours(c: Comm) -> Any:
    cart = c.Create_cart([c.size], [True])
    y = np.zeros(2)
    cart.Neighbor_alltoall(np.full(2, 1.0 + c.rank), y)
    cart.Free()
    return _sum(y)


WAITS: dict[str, Callable[[Comm], Any]] = {
    "Barrier": lambda c: c.Barrier(),
    "Allreduce": lambda c: _into(c, 1, c.Allreduce),
    "Allreduce large": lambda c: _into(c, LARGE, c.Allreduce),
    "allreduce": lambda c: c.allreduce([c.rank]),
    "Bcast": lambda c: _into(c, 3, lambda x, y: c.Bcast(x, 0)),
    "Bcast large": lambda c: _into(c, LARGE, lambda x, y: c.Bcast(x, 0)),
    "bcast": lambda c: c.bcast({"of": c.rank}, 0),
    "Reduce": lambda c: _into(c, 3, lambda x, y: c.Reduce(x, y, root=1)),
    "Reduce large": lambda c: _into(c, LARGE, lambda x, y: c.Reduce(x, y, root=1)),
    "Gather": lambda c: _into(c, c.size, lambda x, y: c.Gather(x[:1], y, 1)),
    "Gatherv": lambda c: _into(c, c.size, lambda x, y: c.Gatherv(x[:1], [y, [1] * c.size], 1)),
    "Scatter": lambda c: _into(c, c.size, lambda x, y: c.Scatter(x, y[:1], 0)),
    "Scatterv": lambda c: _into(c, c.size, lambda x, y: c.Scatterv([x, [1] * c.size], y[:1], 0)),
    "Allgather": lambda c: _into(c, c.size, lambda x, y: c.Allgather(x[:1], y)),
    "Allgatherv": lambda c: _into(c, c.size, lambda x, y: c.Allgatherv(x[:1], [y, [1] * c.size])),
    "Alltoall": lambda c: _into(c, c.size, c.Alltoall),
    "Alltoallv": lambda c: _into(
        c, c.size, lambda x, y: c.Alltoallv([x, [1] * c.size], [y, [1] * c.size])
    ),
    "Reduce_scatter": lambda c: _into(
        c, c.size, lambda x, y: c.Reduce_scatter(x, y[:1], [1] * c.size)
    ),
    "Reduce_scatter_block": lambda c: _into(
        c, c.size, lambda x, y: c.Reduce_scatter_block(x, y[:1])
    ),
    "Scan": lambda c: _into(c, 3, c.Scan),
    "Exscan": lambda c: _into(c, 3, c.Exscan),
    "Neighbor_alltoall": _neighbours,
    "Ibarrier, Wait": lambda c: c.Ibarrier().Wait() and None,
    "Iallreduce, Wait": lambda c: _into(c, 3, lambda x, y: c.Iallreduce(x, y).Wait()),
    "Recv": _at_one(lambda c, x: c.Recv(x, 0, WAIT_TAG)),
    "Recv large": _at_one(lambda c, x: c.Recv(x, 0, WAIT_TAG), LARGE),
    "Probe": _at_one(lambda c, x: c.Probe(0, WAIT_TAG) and c.Recv(x, 0, WAIT_TAG)),
    "Mprobe": _at_one(lambda c, x: c.Mprobe(0, WAIT_TAG).Recv(x)),
    "Wait": _at_one(lambda c, x: c.Irecv(x, 0, WAIT_TAG).Wait()),
    "Waitall": _at_one(lambda c, x: MPI.Request.Waitall([c.Irecv(x, 0, WAIT_TAG)])),
    "Waitany": _at_one(lambda c, x: MPI.Request.Waitany([c.Irecv(x, 0, WAIT_TAG)])),
    "Waitsome": _at_one(lambda c, x: MPI.Request.Waitsome([c.Irecv(x, 0, WAIT_TAG)])),
    "Start, Wait": _at_one(lambda c, x: _started(c.Recv_init(x, 0, WAIT_TAG)).Wait()),
    "Test": _at_one(_polls(lambda r: r[0].Test())),
    "Testall": _at_one(_polls(MPI.Request.Testall)),
    "Testany": _at_one(_polls(lambda r: MPI.Request.Testany(r)[1])),
    "Testsome": _at_one(_polls(MPI.Request.Testsome)),
    "Get_status": _at_one(_polls(lambda r: r[0].Get_status())),
    "Iprobe": _at_one(_iprobe),
    "Improbe": _at_one(_improbe),
    "Ssend": _to_zero(lambda c, x: c.Ssend(x, 0, WAIT_TAG), 3),
    "Send large": _to_zero(lambda c, x: c.Send(x, 0, WAIT_TAG), LARGE),
    "Sendrecv": _exchange(_sendrecv, LARGE),
    "Sendrecv_replace": _exchange(
        lambda c, x, to: c.Sendrecv_replace(x, to, WAIT_TAG, to, WAIT_TAG), LARGE
    ),
    "sendrecv": lambda c: c.sendrecv([c.rank], 1 - c.rank, source=1 - c.rank) if c.rank < 2 else 0,
    "Dup": _made(lambda c: c.Dup()),
    "Split": _made(lambda c: c.Split(0)),
    "Split_type": _made(lambda c: c.Split_type(MPI.COMM_TYPE_SHARED)),
    "Create": _made(lambda c: c.Create(c.group)),
    "Create_group": _made(lambda c: c.Create_group(c.group)),
    "Create_cart": _made(lambda c: c.Create_cart([c.size])),
    "Create_intercomm": _intercomm,
    "Win.Create": _windowed(lambda w, c: None),
    "Win.Fence": _windowed(_fenced),
    "Win.Wait": _windowed(_post_wait),
    "File": _file,
}  # fmt: skip


def _beside(start: Callable[[Comm], Finish], wait: Callable[[Comm], Any]) -> Callable[[Calls], Any]:
    def both(comm: Comm) -> Any:
        c = comm.Dup()
        c.Barrier()
        finish = start(c)
        found = wait(c)
        completed = finish()
        c.Free()
        return [found, completed]

    return lambda calls: calls.call(both)


PROGRAMS: dict[str, Callable[[Calls], Any]] = {
    f"{pending}; {wait}": _beside(start, call)
    for pending, start in PENDING.items()
    for wait, call in WAITS.items()
}
