"""Errors of MPI in native code: recorded, so that a library that ignores return codes fails.

MPI calls from Python raise `MPI.Exception`. Native code gets a return code, which few libraries
check, because MPI's default is to abort. While native code runs, the error handler of the gang's
communicator (inherited by those that native code derives from it) prints and records the first
error, and the call fails with it. MPICH returns MPI_SUCCESS after such a handler: a library that
checks return codes sets MPI_ERRORS_RETURN on its communicator, as with any MPI program.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from functools import cache

from mpi4py import MPI

_recorded: list[int] = []  # error codes of the native call under way


def _record(comm: MPI.Comm, code: int) -> None:
    if not _recorded:
        _recorded.append(code)
        sys.stderr.write(f"{MPI.Get_error_string(code).strip()}\n")
        sys.stderr.flush()


@cache
def _handler() -> MPI.Errhandler:
    return MPI.Comm.Create_errhandler(_record)


def record(comms: Iterable[MPI.Comm]) -> None:
    """Record errors on these communicators from now on, and forget those recorded before."""
    _recorded.clear()
    for comm in comms:
        comm.Set_errhandler(_handler())


def stop(comms: Iterable[MPI.Comm]) -> str | None:
    """Raise errors on these communicators in Python again; the first recorded one, or None."""
    for comm in comms:
        comm.Set_errhandler(MPI.ERRORS_RETURN)
    if not _recorded:
        return None
    return MPI.Get_error_string(_recorded[0]).strip()
