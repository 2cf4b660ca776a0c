"""GangComm: a communicator whose waits end when the call fails on another rank.

Its requests and its messages of pickled objects (``bcast``, ``allreduce``, ...) do so too.

The blocking calls are built from the non-blocking ones and from waits that read the node's
interrupt word (`interruption`): when a rank of the gang fails, the others leave their wait with
`Interrupted`, the communicator is abandoned, and the gang continues on a fresh duplicate.

Collectives and point-to-point calls are covered, with buffers (``Allreduce``) and with pickled
objects (``allreduce``). ``Irecv``, ``isend`` and the like return a `GangRequest`, whose waits can
be interrupted as well. Not covered are ``MPI.Request.Waitall`` and its variants
(`GangRequest.Waitall` is covered and replaces it in scripts), files, windows, the constructors of
communicators (although ``Split``, ``Create`` and ``Dup`` return a `GangComm`), and MPI calls from
native code.
"""

from __future__ import annotations

import functools
import pickle
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, TypeVar

import cloudpickle
import numpy as np
from mpi4py import MPI

from mpi_workers.failures import Interrupted
from mpi_workers.waits.interruption import until

T = TypeVar("T")
ABANDONED_LIMIT = 64  # abandoned requests: then the finished ones are released

_abandoned: deque[GangRequest] = deque()  # MPI may still write into their buffers
_limit = ABANDONED_LIMIT


def wait(request: MPI.Request, status: MPI.Status | None = None) -> None:
    """Wait for a request. Raises `Interrupted` if the call ends first."""
    until(lambda: request.Test(status))


def release_finished() -> None:
    """Release the buffers of abandoned operations that have finished since."""
    global _limit
    for _ in range(len(_abandoned)):  # other threads may append meanwhile
        request = _abandoned.popleft()
        if not request.Test():
            _abandoned.append(request)
    _limit = max(ABANDONED_LIMIT, 2 * len(_abandoned))


def abandoned() -> int:
    """How many operations are under way whose requests were dropped."""
    return len(_abandoned)


def _outcome(test: Callable[[], tuple[bool, T]]) -> T:
    """The value of a test of requests once they are done. Raises `Interrupted`."""
    found: list[T] = []

    def done() -> bool:
        is_done, value = test()
        if is_done:
            found.append(value)
        return is_done

    until(done)
    return found[0]


class GangRequest(MPI.Request):
    """An `mpi4py.MPI.Request` with waits that can be interrupted.

    An operation that is under way when its request is dropped keeps its buffers, so a call may be
    interrupted while other ranks still write into this rank's memory.
    """

    _buffers: Any  # mpi4py 4.1 releases those of Iallgatherv and of all reductions too early

    @classmethod
    def of(cls, request: MPI.Request, *buffers: Any) -> GangRequest:
        """The request, and the buffers that its operation reads and writes."""
        if len(_abandoned) >= _limit:  # not in __del__, which any thread may run
            release_finished()
        own = cls(request)
        own._buffers = buffers
        return own

    def __del__(self) -> None:
        if self:  # not done
            _abandoned.append(self)

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
        return _outcome(lambda: cls.Testany(requests, status)[::-1])  # done, index


def pickled(obj: Any, protocol: int | None = None) -> bytes:
    """An object as a pickle: by reference where the ranks can import its class, else by value.

    Classes of a session's program exist on the ranks only as values that came with a function.
    """
    try:
        return pickle.dumps(obj, protocol)
    except Interrupted:
        raise
    except Exception:  # any class may raise any error
        by_value: bytes = cloudpickle.dumps(obj, protocol)
        return by_value


# For mpi4py's own communicators, and `isend` and `recv` of ours.
MPI.pickle.__init__(pickled, pickle.loads)  # type: ignore[misc]
FLAT_SIZE = 16  # ranks up to which a reduction of objects gathers them


def named_as(method: Any, name: str) -> Callable[..., Any]:
    """Give a method the name and the docs of mpi4py's, also in tracebacks."""
    method.__code__ = method.__code__.replace(co_name=name, co_qualname=name)
    named: Callable[..., Any] = functools.wraps(getattr(MPI.Intracomm, name))(method)
    return named


def polling(name: str) -> Callable[..., Any]:
    """A probe of messages that calls its non-blocking form until that finds one."""
    test = getattr(MPI.Intracomm, "I" + name.lower() if name[0].isupper() else "i" + name)

    def method(self: MPI.Intracomm, *args: Any, **kwargs: Any) -> Any:
        return until(lambda: test(self, *args, **kwargs))

    return named_as(method, name)


class ObjectMessages(MPI.Intracomm):
    """The lower-case methods of a communicator, by the interruptible upper-case ones.

    A subclass provides those. Reductions on up to `FLAT_SIZE` ranks gather the objects on one rank.
    On more ranks they use a tree, and a rank's memory does not grow with the number of ranks. Scans
    gather the objects on every rank.
    """

    _tree: ObjectMessages | None = None

    def barrier(self) -> None:
        self.Barrier()

    def bcast(self, obj: Any, root: int = 0) -> Any:
        data = np.frombuffer(pickled(obj), np.uint8) if self.rank == root else None
        size = np.array([0 if data is None else data.size], np.int64)
        self.Bcast(size, root)
        buffer = np.empty(int(size[0]), np.uint8) if data is None else data.copy()
        self.Bcast(buffer, root)
        return obj if self.rank == root else pickle.loads(buffer.tobytes())

    def gather(self, sendobj: Any, root: int = 0) -> list[Any] | None:
        data = np.frombuffer(pickled(sendobj), np.uint8)
        sizes = np.empty(self.size, np.int64)
        self.Gather(np.array([data.size], np.int64), sizes, root)
        if self.rank != root:
            self.Gatherv(data, None, root)
            return None
        buffer = np.empty(int(sizes.sum()), np.uint8)
        self.Gatherv(data, [buffer, sizes.tolist()], root)
        return _unpickled(buffer, sizes)

    def allgather(self, sendobj: Any) -> list[Any]:
        data = np.frombuffer(pickled(sendobj), np.uint8)
        sizes = np.empty(self.size, np.int64)
        self.Allgather(np.array([data.size], np.int64), sizes)
        buffer = np.empty(int(sizes.sum()), np.uint8)
        self.Allgatherv(data, [buffer, sizes.tolist()])
        return _unpickled(buffer, sizes)

    def scatter(self, sendobj: Any, root: int = 0) -> Any:
        sizes = everything = None
        if self.rank == root:
            data, sizes = self._packed("scatter", sendobj)
            everything = [data, sizes.tolist()]
        size = np.empty(1, np.int64)
        self.Scatter(sizes, size, root)
        mine = np.empty(int(size[0]), np.uint8)
        self.Scatterv(everything, mine, root)
        return pickle.loads(mine.tobytes())

    def alltoall(self, sendobj: Any) -> list[Any]:
        data, counts = self._packed("alltoall", sendobj)
        sizes = np.empty(self.size, np.int64)
        self.Alltoall(counts, sizes)
        buffer = np.empty(int(sizes.sum()), np.uint8)
        self.Alltoallv([data, counts.tolist()], [buffer, sizes.tolist()])
        return _unpickled(buffer, sizes)

    def _packed(
        self, name: str, objects: Iterable[Any]
    ) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        """An object for each rank, pickled; their sizes."""
        parts = [pickled(item) for item in objects]
        if len(parts) != self.size:
            raise ValueError(
                f"{name} needs {self.size} objects, one for each rank; got {len(parts)}"
            )
        return np.frombuffer(b"".join(parts), np.uint8), np.array([*map(len, parts)], np.int64)

    def reduce(self, sendobj: Any, op: Any = MPI.SUM, root: int = 0) -> Any:
        if self.size <= FLAT_SIZE:
            objects = self.gather(sendobj, root)
            return None if objects is None else functools.reduce(op, objects)
        tree = self._tree_comm()
        found = self._reduce_to_first(tree, sendobj, op)
        if root == 0 or self.rank not in (0, root):
            return found if self.rank == root else None
        if self.rank == 0:
            tree.send(found, root)
            return None
        return tree.recv(source=0)

    def allreduce(self, sendobj: Any, op: Any = MPI.SUM) -> Any:
        return self.bcast(self.reduce(sendobj, op))

    def scan(self, sendobj: Any, op: Any = MPI.SUM) -> Any:
        return functools.reduce(op, self.allgather(sendobj)[: self.rank + 1])

    def exscan(self, sendobj: Any, op: Any = MPI.SUM) -> Any:
        before = self.allgather(sendobj)[: self.rank]
        return functools.reduce(op, before) if before else None

    def _tree_comm(self) -> ObjectMessages:
        """A duplicate for messages of collectives: the user's receives must not match them.

        Collective; the first call makes it.
        """
        if self._tree is None:
            duplicate, request = self.Idup()
            wait(GangRequest.of(request, duplicate))
            self._tree = duplicate
        return self._tree

    def Free(self) -> None:
        tree, self._tree = self._tree, None
        if tree is not None:
            tree.Free()
        super().Free()

    def _reduce_to_first(self, tree: ObjectMessages, value: Any, op: Any) -> Any:
        """Reduce in rank order along a binomial tree; the result on rank 0."""
        distance = 1
        while distance < self.size:
            if self.rank & distance:
                tree.send(value, self.rank - distance)
                return None
            if self.rank + distance < self.size:
                value = op(value, tree.recv(source=self.rank + distance))
            distance *= 2
        return value

    def send(self, obj: Any, dest: int, tag: int = 0) -> None:
        wait(self.isend(obj, dest, tag))

    def ssend(self, obj: Any, dest: int, tag: int = 0) -> None:
        wait(self.issend(obj, dest, tag))

    probe = polling("probe")
    mprobe = polling("mprobe")

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


# fmt: off
BLOCKING = (
    "Barrier", "Bcast", "Gather", "Gatherv", "Scatter", "Scatterv", "Allgather", "Allgatherv",
    "Alltoall", "Alltoallv", "Alltoallw", "Reduce", "Allreduce", "Reduce_scatter",
    "Reduce_scatter_block", "Scan", "Exscan", "Send", "Ssend", "Rsend", "Sendrecv_replace",
)
STARTING = (
    "Isend", "Issend", "Irsend", "Ibsend", "Irecv", "isend", "issend", "ibsend", "irecv",
    "Isendrecv", "Isendrecv_replace", "Ibarrier", "Ibcast", "Igather", "Igatherv", "Iscatter",
    "Iscatterv", "Iallgather", "Iallgatherv", "Ialltoall", "Ialltoallv", "Ialltoallw",
    "Ireduce", "Iallreduce", "Ireduce_scatter", "Ireduce_scatter_block", "Iscan", "Iexscan",
)
# fmt: on


def _starting(name: str) -> Callable[..., GangRequest]:
    start = getattr(MPI.Intracomm, name)

    def method(self: MPI.Intracomm, *args: Any, **kwargs: Any) -> GangRequest:
        return GangRequest.of(start(self, *args, **kwargs), args, kwargs)

    return named_as(method, name)


def _blocking(name: str) -> Callable[..., None]:
    start = getattr(MPI.Intracomm, "I" + name.lower())

    def method(self: MPI.Intracomm, *args: Any, **kwargs: Any) -> None:
        wait(GangRequest.of(start(self, *args, **kwargs), args, kwargs))

    return named_as(method, name)


class GangComm(ObjectMessages):
    """An `mpi4py.MPI.Intracomm` with waits that can be interrupted."""

    Request = GangRequest  # the type that its non-blocking calls return
    kept = False  # by the gang, for later calls
    Probe = polling("Probe")
    Mprobe = polling("Mprobe")

    def Free(self) -> None:
        self._check_own()
        super().Free()

    def Disconnect(self) -> None:
        self._check_own()
        super().Disconnect()

    def _check_own(self) -> None:
        if self.kept:
            raise RuntimeError(
                "this is the gang's own communicator, which later calls need: free only "
                "communicators that you have made (comm.Dup(), comm.Split())"
            )

    def Split(self, color: int = 0, key: int = 0) -> GangComm:
        return GangComm(super().Split(color, key))

    def Split_type(self, split_type: int, key: int = 0, info: MPI.Info = MPI.INFO_NULL) -> GangComm:
        return GangComm(super().Split_type(split_type, key, info))

    def Create(self, group: MPI.Group) -> GangComm:
        return GangComm(super().Create(group))

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


for _name in BLOCKING:
    setattr(GangComm, _name, _blocking(_name))
for _name in STARTING:
    setattr(GangComm, _name, _starting(_name))
