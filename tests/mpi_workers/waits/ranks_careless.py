"""Programs with wrong counts or errors, and what else has to be as without the layer.

Each outcome is compared with that of the same program under plain MPI. MPICH's nonblocking
collectives, which the layer calls, do not report that a rank sends more than another one takes, as
its blocking ones do: then nothing may be written beyond what that rank takes.
"""

from __future__ import annotations

import contextlib
import resource
import tempfile
import time
import uuid
from collections.abc import Callable
from typing import Any

import numpy as np
from mpi4py import MPI

from mpi_workers.waits import interruption
from tests.mpi_workers.waits.ranks_programs import Calls

Comm = MPI.Intracomm
GUARD = -7.0
MEMORY = 6000  # elements that a call could write into
TRUNCATED = (MPI.ERR_TRUNCATE, MPI.ERR_IN_STATUS, MPI.ERR_OTHER)
LARGE = 1 << 18  # elements


def _wrong(
    call: Callable[[Comm, Any, Any], Any], sent: int, room: int = 0, *, each: bool = False
) -> Callable[[Calls], Any]:
    """The error of a call, or the sum of what it has written, and whether beyond its room.

    That is of so many elements, from each rank or from one.
    """

    def run(comm: Comm) -> Any:
        c = comm.Dup()
        x, y = np.arange(1.0 + 1000 * c.rank, 1 + sent + 1000 * c.rank), np.full(MEMORY, GUARD)
        try:
            call(c, x, y)
        except MPI.Exception as error:
            code = error.Get_error_class()
            return "truncated" if code in TRUNCATED else MPI.Get_error_string(code)
        written = np.flatnonzero(y != GUARD)
        last = int(written[-1]) if len(written) else -1
        return {"sum": float(y[written].sum()), "beyond": last >= room * (c.size if each else 1)}

    return lambda calls: calls.call(run)


def _of(memory: Any, count: int) -> list[Any]:
    return [memory, count, MPI.DOUBLE]


COUNTS: dict[str, Callable[[Calls], Any]] = {
    **{
        f"Allgather {sent} into {got}": _wrong(
            lambda c, x, y, got=got: c.Allgather(x, _of(y, got)), sent, got, each=True
        )
        for sent, got in ((1000, 1), (8, 1), (3, 2), (2, 3), (1, 8), (5000, 1), (2000, 1990))
    },
    **{
        f"Gather {sent} into {got}": _wrong(
            lambda c, x, y, got=got: c.Gather(x, _of(y, got) if c.rank == 0 else None, 0),
            sent, got, each=True,
        )
        for sent, got in ((1000, 1), (8, 1), (1, 3), (5000, 1))
    },
    **{
        f"Scatter {sent} into {got}": _wrong(
            lambda c, x, y, sent=sent, got=got: c.Scatter(
                _of(x, sent) if c.rank == 0 else None, _of(y, got), 0
            ),
            3 * sent, got,
        )
        for sent, got in ((1000, 1), (8, 1), (1, 3), (2500, 1))
    },
    **{
        f"Alltoall {sent} into {got}": _wrong(
            lambda c, x, y, sent=sent, got=got: c.Alltoall(_of(x, sent), _of(y, got)),
            3 * sent, got, each=True,
        )
        for sent, got in ((1000, 1), (8, 1), (1, 3), (2500, 1))
    },
    **{
        f"Bcast {sent} into {got}": _wrong(
            lambda c, x, y, sent=sent, got=got: c.Bcast(
                _of(x, sent) if c.rank == 0 else _of(y, got), 0
            ),
            sent, got,
        )
        for sent, got in ((1000, 1), (8, 1), (5000, 1))
    },
    "Bcast from a rank that is not there": _wrong(lambda c, x, y: c.Bcast(x, 9), 3),
    "Recv of a shorter message": _wrong(
        lambda c, x, y: c.Send(x, 1) if c.rank == 0 else c.Recv(_of(y, 2), 0), 3
    ),
    "Recv from a rank that is not there": _wrong(lambda c, x, y: c.Recv(y, 9), 3),
    "Send with a negative tag": _wrong(lambda c, x, y: c.Send(x, 1, -5), 3),
    "Wait for a shorter message": _wrong(
        lambda c, x, y: c.Send(x, 1) if c.rank == 0 else c.Irecv(_of(y, 2), 0).Wait(), 3
    ),
}  # fmt: skip


def _sendrecv_with_error(calls: Calls) -> Any:
    """Of a Sendrecv whose receive fails the send is complete when it returns."""

    def run(comm: Comm) -> Any:
        c = comm.Dup()
        c.Barrier()
        if c.rank == 1:
            c.Send(np.ones(9), 0, 1)
            time.sleep(0.05)
            x = np.zeros(LARGE)
            c.Recv(x, 0, 2)
            return float(x.min())
        if c.rank == 0:
            x = np.ones(LARGE)
            with contextlib.suppress(MPI.Exception):
                c.Sendrecv(x, 1, 2, np.zeros(2), 1, 1)
            x[:] = 99.0
        return None

    return calls.call(run)


def _errors_leak_nothing(calls: Calls) -> Any:
    """Whether this process grows by more than 2 MiB in 10,000 calls with an error."""

    def run(comm: Comm) -> Any:
        x, y = np.zeros(1), np.zeros(1)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        for _ in range(5_000):
            with contextlib.suppress(MPI.Exception):
                comm.Sendrecv(x, comm.size, 0, y, 0, 0)
            with contextlib.suppress(MPI.Exception):
                comm.Sendrecv_replace(x, comm.size, 0, 0, 0)
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before > 2 << 10

    return calls.call(run)


def _meets(
    make: Callable[[Comm], Any], use: Callable[[Any], Any], free: Callable[[Any], Any]
) -> Any:
    """An object of all ranks is freed with the layer off; the next one has fewer ranks."""

    def program(calls: Calls) -> Any:
        def run(comm: Comm) -> Any:
            for _ in range(3):
                made = make(comm)
                use(made)
                with interruption.uninterruptible():
                    free(made)
                part = comm.Split(int(comm.rank == 0))
                made = make(part)
                if comm.rank == 0:
                    time.sleep(0.05)
                use(made)
                free(made)
                part.Free()
            return "met"

        return calls.call(run)

    return program


def _opened(comm: Comm) -> MPI.File:
    path = f"{tempfile.gettempdir()}/careless-{comm.bcast(uuid.uuid4().hex)}"
    return MPI.File.Open(comm, path, MPI.MODE_CREATE | MPI.MODE_RDWR | MPI.MODE_DELETE_ON_CLOSE)


def _errhandler(calls: Calls) -> Any:
    """A function of the program's own is called with the errors of waits."""

    def run(comm: Comm) -> Any:
        c, said = comm.Dup(), []
        handler = MPI.Comm.Create_errhandler(lambda _, code: said.append(MPI.Get_error_class(code)))
        c.Set_errhandler(handler)
        with contextlib.suppress(MPI.Exception):
            c.Recv(np.zeros(1), 99)
        with contextlib.suppress(MPI.Exception):
            c.Bcast(np.zeros(1), 99)
        return said

    return calls.call(run)


PROGRAMS = COUNTS | {
    "Sendrecv with an error": _sendrecv_with_error,
    "errors leak nothing": _errors_leak_nothing,
    "a window freed without the layer": _meets(
        lambda c: MPI.Win.Create(np.zeros(4), 8, comm=c), lambda w: w.Fence(), lambda w: w.Free()
    ),
    "a file closed without the layer": _meets(_opened, lambda f: f.Sync(), lambda f: f.Close()),
    "an error handler": _errhandler,
}
