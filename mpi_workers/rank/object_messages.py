"""Messages of pickled objects on a gang's communicator: ``bcast``, ``allreduce``, ``send``, ..."""

from __future__ import annotations

import functools
import pickle
from typing import Any, Literal

import numpy as np
from mpi4py import MPI

from mpi_workers.rank.requests import wait
from mpi_workers.rank.waits import until


class ObjectMessages(MPI.Intracomm):
    """The lower-case methods of a communicator, by the interruptible upper-case ones.

    A subclass provides those.
    """

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
        message = until(lambda: self.improbe(source, tag, status))
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
