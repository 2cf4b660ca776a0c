"""Errors of MPI in native code: recorded, so that a library that ignores return codes fails.

MPI calls from Python raise `MPI.Exception`. Native code gets a return code, which few libraries
check, because MPI's default is to abort. The error handler of a gang's communicators (and of those
that native code derives from them) records the first error; the call then fails with it. A library
that handles errors itself sets MPI_ERRORS_RETURN on its own communicator, as MPI requires.
"""

from __future__ import annotations

from functools import cache

from mpi4py import MPI

_recorded: list[int] = []  # error codes of the call under way


def _record(comm: MPI.Comm, code: int) -> None:
    if not _recorded:
        _recorded.append(code)


@cache
def _handler() -> MPI.Errhandler:
    return MPI.Comm.Create_errhandler(_record)


def watch(comm: MPI.Comm) -> None:
    """Record errors of MPI calls on a communicator, and on those derived from it in native code."""
    comm.Set_errhandler(_handler())


def clear() -> None:
    """Forget the errors that were recorded."""
    _recorded.clear()


def take() -> str | None:
    """The text of the first recorded error, or None; it is forgotten."""
    if not _recorded:
        return None
    code = _recorded[0]
    _recorded.clear()
    return MPI.Get_error_string(code).strip()
