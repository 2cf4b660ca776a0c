"""GangComm: a communicator whose waits end when the call fails on another rank.

A blocking MPI call cannot be left, so one rank that raises before a collective
would hang the others in it for ever. Here the blocking calls are built from the
non-blocking ones and a wait that also looks at the node's interrupt word: when
a rank of the gang fails, the others leave their wait with `Interrupted`, the
communicator is given up, and the gang goes on with a fresh duplicate.

Collectives and point-to-point calls are covered, with buffers (``Allreduce``)
and with pickled objects (``allreduce``); what ``Irecv``, ``isend`` and their like return
is a `GangRequest`, whose waits end as well. Not covered are ``MPI.Request.Waitall`` and its
like (`GangRequest.Waitall` is, and stands in for it in scripts), files, windows, communicator
constructors (though what ``Split``, ``Create`` and ``Dup`` return is a `GangComm` again),
and MPI called from native code.
"""

from __future__ import annotations

import functools
import os
import pickle
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Literal, TypeVar

import numpy as np
from mpi4py import MPI

from mpi_workers.failures import Interrupted
from mpi_workers.rank.interruption import InterruptWord

T = TypeVar("T")


class _Rank:
    """What the waits of this process look at. One rank, one gang, one call at a time."""

    word: InterruptWord | None = None
    call = 0
    crowded = False
    # MPI may still write into their buffers.
    abandoned: ClassVar[deque[GangRequest]] = deque()
    many = 64  # of these: then look which are done


def watch(word: InterruptWord, *, crowded: bool) -> None:
    """Let this process's waits look at `word`; `crowded`: more ranks than cores here."""
    _Rank.word = word
    _Rank.crowded = crowded


def begin(call: int) -> None:
    """Waits from now on belong to this call."""
    _Rank.call = call


def interrupted() -> bool:
    """Whether the current call has failed elsewhere or was cancelled."""
    return _Rank.word is not None and _Rank.word.ends(_Rank.call)


def _until(ready: Callable[[], T]) -> T:
    """Ask until there is an answer. Raises `Interrupted` if the call ends first."""
    turns = 0
    while not (answer := ready()):
        turns += 1
        if _Rank.crowded or turns % 64 == 0:
            if interrupted():
                raise Interrupted
            os.sched_yield()
    return answer


def wait(request: GangRequest, status: MPI.Status | None = None) -> None:
    """Wait for a request. Raises `Interrupted` if the call ends first."""
    _until(lambda: request.Test(status))


def forget() -> None:
    """Let go of the buffers of given-up operations that have come to their end since."""
    for _ in range(len(_Rank.abandoned)):  # others may come meanwhile, from other threads
        request = _Rank.abandoned.popleft()
        if not request.Test():
            _Rank.abandoned.append(request)
    _Rank.many = max(64, 2 * len(_Rank.abandoned))


def _outcome(test: Callable[[], tuple[bool, T]]) -> T:
    """What a test of requests gives once they are done. Raises `Interrupted`."""
    found: list[T] = []

    def done() -> bool:
        is_done, value = test()
        if is_done:
            found.append(value)
        return is_done

    _until(done)
    return found[0]


class GangRequest(MPI.Request):
    """An `mpi4py.MPI.Request` with waits that can be interrupted.

    An operation that is under way when its request is dropped keeps its buffers: whoever leaves
    a call in the middle need not think of the memory that other ranks still write into.
    """

    _buffers: Any  # mpi4py 4.1 itself forgets those of Iallgatherv and of all reductions

    @classmethod
    def of(cls, request: MPI.Request, *buffers: Any) -> GangRequest:
        """The request, and what the operation reads and writes."""
        if len(_Rank.abandoned) >= _Rank.many:  # not in __del__, which any thread may run
            forget()
        own = cls(request)
        own._buffers = buffers
        return own

    def __del__(self) -> None:
        if self:  # not done
            _Rank.abandoned.append(self)

    def Wait(self, status: MPI.Status | None = None) -> Literal[True]:
        wait(self, status)
        return True

    def wait(self, status: MPI.Status | None = None) -> Any:
        return _outcome(lambda: self.test(status))

    @classmethod
    def Waitall(
        cls, requests: Sequence[MPI.Request], statuses: list[MPI.Status] | None = None
    ) -> Literal[True]:
        return _outcome(lambda: (cls.Testall(requests, statuses), True))

    @classmethod
    def waitall(
        cls, requests: Sequence[MPI.Request], statuses: list[MPI.Status] | None = None
    ) -> list[Any]:
        return _outcome(lambda: cls.testall(requests, statuses)) or []

    @classmethod
    def Waitany(cls, requests: Sequence[MPI.Request], status: MPI.Status | None = None) -> int:
        def test() -> tuple[bool, int]:
            index, done = cls.Testany(requests, status)
            return done, index

        return _outcome(test)


def _starting(name: str) -> Callable[..., GangRequest]:
    start = getattr(MPI.Intracomm, name)

    @functools.wraps(start)
    def method(self: MPI.Intracomm, *args: Any, **kwargs: Any) -> GangRequest:
        return GangRequest.of(start(self, *args, **kwargs), args, kwargs)

    return method


def _blocking(name: str) -> Callable[..., None]:
    start = getattr(MPI.Intracomm, "I" + name.lower())

    @functools.wraps(getattr(MPI.Intracomm, name))
    def method(self: MPI.Intracomm, *args: Any, **kwargs: Any) -> None:
        wait(GangRequest.of(start(self, *args, **kwargs), args, kwargs))

    return method


class GangComm(MPI.Intracomm):
    """An `mpi4py.MPI.Intracomm` with waits that can be interrupted."""

    Request = GangRequest  # what its calls that do not block return

    Barrier = _blocking("Barrier")
    Bcast = _blocking("Bcast")
    Gather = _blocking("Gather")
    Gatherv = _blocking("Gatherv")
    Scatter = _blocking("Scatter")
    Scatterv = _blocking("Scatterv")
    Allgather = _blocking("Allgather")
    Allgatherv = _blocking("Allgatherv")
    Alltoall = _blocking("Alltoall")
    Alltoallv = _blocking("Alltoallv")
    Alltoallw = _blocking("Alltoallw")
    Reduce = _blocking("Reduce")
    Allreduce = _blocking("Allreduce")
    Reduce_scatter = _blocking("Reduce_scatter")
    Reduce_scatter_block = _blocking("Reduce_scatter_block")
    Scan = _blocking("Scan")
    Exscan = _blocking("Exscan")
    Send = _blocking("Send")
    Ssend = _blocking("Ssend")
    Rsend = _blocking("Rsend")
    Sendrecv_replace = _blocking("Sendrecv_replace")

    Isend = _starting("Isend")
    Issend = _starting("Issend")
    Irsend = _starting("Irsend")
    Ibsend = _starting("Ibsend")
    Irecv = _starting("Irecv")
    isend = _starting("isend")
    issend = _starting("issend")
    ibsend = _starting("ibsend")
    irecv = _starting("irecv")
    Isendrecv = _starting("Isendrecv")
    Isendrecv_replace = _starting("Isendrecv_replace")
    Ibarrier = _starting("Ibarrier")
    Ibcast = _starting("Ibcast")
    Igather = _starting("Igather")
    Igatherv = _starting("Igatherv")
    Iscatter = _starting("Iscatter")
    Iscatterv = _starting("Iscatterv")
    Iallgather = _starting("Iallgather")
    Iallgatherv = _starting("Iallgatherv")
    Ialltoall = _starting("Ialltoall")
    Ialltoallv = _starting("Ialltoallv")
    Ialltoallw = _starting("Ialltoallw")
    Ireduce = _starting("Ireduce")
    Iallreduce = _starting("Iallreduce")
    Ireduce_scatter = _starting("Ireduce_scatter")
    Ireduce_scatter_block = _starting("Ireduce_scatter_block")
    Iscan = _starting("Iscan")
    Iexscan = _starting("Iexscan")

    def Split(self, color: int = 0, key: int = 0) -> GangComm:
        return GangComm(super().Split(color, key))

    def Split_type(self, split_type: int, key: int = 0, info: MPI.Info = MPI.INFO_NULL) -> GangComm:
        return GangComm(super().Split_type(split_type, key, info))

    def Create(self, group: MPI.Group) -> GangComm:
        return GangComm(super().Create(group))

    def Probe(
        self,
        source: int = MPI.ANY_SOURCE,
        tag: int = MPI.ANY_TAG,
        status: MPI.Status | None = None,
    ) -> Literal[True]:
        _until(lambda: self.Iprobe(source, tag, status))
        return True

    def Mprobe(
        self,
        source: int = MPI.ANY_SOURCE,
        tag: int = MPI.ANY_TAG,
        status: MPI.Status | None = None,
    ) -> MPI.Message:
        message = _until(lambda: self.Improbe(source, tag, status))
        assert message is not None
        return message

    def Recv(
        self,
        buf: Any,
        source: int = MPI.ANY_SOURCE,
        tag: int = MPI.ANY_TAG,
        status: MPI.Status | None = None,
    ) -> None:
        wait(self.Irecv(buf, source, tag), status)

    def Sendrecv(
        self,
        sendbuf: Any,
        dest: int,
        sendtag: int = 0,
        recvbuf: Any = None,
        source: int = MPI.ANY_SOURCE,
        recvtag: int = MPI.ANY_TAG,
        status: MPI.Status | None = None,
    ) -> None:
        receiving = self.Irecv(recvbuf, source, recvtag)
        sending = self.Isend(sendbuf, dest, sendtag)
        wait(receiving, status)
        wait(sending)

    # --- pickled objects ---

    def barrier(self) -> None:
        self.Barrier()

    def bcast(self, obj: Any, root: int = 0) -> Any:
        data = np.frombuffer(pickle.dumps(obj), np.uint8) if self.rank == root else None
        size = np.array([0 if data is None else data.size], np.int64)
        self.Bcast(size, root)
        buffer = np.empty(int(size[0]), np.uint8) if data is None else data.copy()
        self.Bcast(buffer, root)
        return obj if self.rank == root else pickle.loads(buffer.tobytes())

    def gather(self, sendobj: Any, root: int = 0) -> list[Any] | None:
        data = np.frombuffer(pickle.dumps(sendobj), np.uint8)
        sizes = np.empty(self.size, np.int64)
        self.Gather(np.array([data.size], np.int64), sizes, root)
        if self.rank != root:
            self.Gatherv(data, None, root)
            return None
        buffer = np.empty(int(sizes.sum()), np.uint8)
        self.Gatherv(data, [buffer, sizes.tolist()], root)
        return _unpickled(buffer, sizes)

    def allgather(self, sendobj: Any) -> list[Any]:
        data = np.frombuffer(pickle.dumps(sendobj), np.uint8)
        sizes = np.empty(self.size, np.int64)
        self.Allgather(np.array([data.size], np.int64), sizes)
        buffer = np.empty(int(sizes.sum()), np.uint8)
        self.Allgatherv(data, [buffer, sizes.tolist()])
        return _unpickled(buffer, sizes)

    def scatter(self, sendobj: Any, root: int = 0) -> Any:
        size = np.empty(1, np.int64)
        if self.rank == root:
            objects = list(sendobj)
            if len(objects) != self.size:
                raise ValueError(f"scatter of {len(objects)} objects to {self.size} ranks")
            parts = [pickle.dumps(item) for item in objects]
            sizes = np.array([len(part) for part in parts], np.int64)
            self.Scatter(sizes, size, root)
            mine = np.empty(int(size[0]), np.uint8)
            everything = np.frombuffer(b"".join(parts), np.uint8)
            self.Scatterv([everything, sizes.tolist()], mine, root)
        else:
            self.Scatter(None, size, root)
            mine = np.empty(int(size[0]), np.uint8)
            self.Scatterv(None, mine, root)
        return pickle.loads(mine.tobytes())

    def alltoall(self, sendobj: Any) -> list[Any]:
        parts = [pickle.dumps(item) for item in sendobj]
        if len(parts) != self.size:
            raise ValueError(f"alltoall of {len(parts)} objects to {self.size} ranks")
        counts = np.array([len(part) for part in parts], np.int64)
        sizes = np.empty(self.size, np.int64)
        self.Alltoall(counts, sizes)
        buffer = np.empty(int(sizes.sum()), np.uint8)
        data = np.frombuffer(b"".join(parts), np.uint8)
        self.Alltoallv([data, counts.tolist()], [buffer, sizes.tolist()])
        return _unpickled(buffer, sizes)

    def reduce(self, sendobj: Any, op: Any = MPI.SUM, root: int = 0) -> Any:
        objects = self.gather(sendobj, root)
        return None if objects is None else functools.reduce(op, objects)

    def allreduce(self, sendobj: Any, op: Any = MPI.SUM) -> Any:
        return self.bcast(self.reduce(sendobj, op))

    def scan(self, sendobj: Any, op: Any = MPI.SUM) -> Any:
        return functools.reduce(op, self.allgather(sendobj)[: self.rank + 1])

    def exscan(self, sendobj: Any, op: Any = MPI.SUM) -> Any:
        before = self.allgather(sendobj)[: self.rank]
        return functools.reduce(op, before) if before else None

    def send(self, obj: Any, dest: int, tag: int = 0) -> None:
        wait(self.isend(obj, dest, tag))

    def ssend(self, obj: Any, dest: int, tag: int = 0) -> None:
        wait(self.issend(obj, dest, tag))

    def probe(
        self,
        source: int = MPI.ANY_SOURCE,
        tag: int = MPI.ANY_TAG,
        status: MPI.Status | None = None,
    ) -> Literal[True]:
        return self.Probe(source, tag, status)

    def mprobe(
        self,
        source: int = MPI.ANY_SOURCE,
        tag: int = MPI.ANY_TAG,
        status: MPI.Status | None = None,
    ) -> MPI.Message:
        message = _until(lambda: self.improbe(source, tag, status))
        assert message is not None
        return message

    def recv(
        self,
        buf: Any = None,
        source: int = MPI.ANY_SOURCE,
        tag: int = MPI.ANY_TAG,
        status: MPI.Status | None = None,
    ) -> Any:
        return self.mprobe(source, tag, status).recv()

    def sendrecv(
        self,
        sendobj: Any,
        dest: int,
        sendtag: int = 0,
        recvbuf: Any = None,
        source: int = MPI.ANY_SOURCE,
        recvtag: int = MPI.ANY_TAG,
        status: MPI.Status | None = None,
    ) -> Any:
        sending = self.isend(sendobj, dest, sendtag)
        received = self.recv(None, source, recvtag, status)
        wait(sending)
        return received


def _unpickled(buffer: np.ndarray[Any, Any], sizes: np.ndarray[Any, Any]) -> list[Any]:
    ends = np.cumsum(sizes)
    return [
        pickle.loads(buffer[end - size : end].tobytes())
        for size, end in zip(sizes.tolist(), ends.tolist(), strict=True)
    ]
