"""GangComm: a communicator whose waits end when the call fails on another rank.

The blocking calls are built from the non-blocking ones and from waits that read the node's
interrupt word (`waits.py`): when a rank of the gang fails, the others leave their wait with
`Interrupted`, the communicator is abandoned, and the gang continues on a fresh duplicate.

Collectives and point-to-point calls are covered, with buffers (``Allreduce``) and with pickled
objects (``allreduce``). ``Irecv``, ``isend`` and the like return a `GangRequest`, whose waits can
be interrupted as well. Not covered are ``MPI.Request.Waitall`` and its variants
(`GangRequest.Waitall` is covered and replaces it in scripts), files, windows, the constructors of
communicators (although ``Split``, ``Create`` and ``Dup`` return a `GangComm`), and MPI calls from
native code.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mpi4py import MPI

from mpi_workers.rank.object_messages import ObjectMessages, named_as, polling
from mpi_workers.rank.requests import GangRequest, wait

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
    Probe = polling("Probe")
    Mprobe = polling("Mprobe")

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
