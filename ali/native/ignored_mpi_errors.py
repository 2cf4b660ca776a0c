"""Errors of MPI that native code ignores become errors of the call."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from mpi_workers.failures import Failure

if TYPE_CHECKING:
    from mpi_workers.rank.gang import Gang


@contextmanager
def ignored_errors_raised(gang: Gang, what: str) -> Iterator[None]:
    """Run native code in the block; `what` names it in messages.

    Communicators that it derives from the gang's report their errors in later blocks too.

    Raises
    ------
    Failure
        RoutineError, if an MPI function has failed on this rank and the code has returned
        without an error of its own.
    """
    gang.enter_native()
    error = None
    try:
        yield
    finally:
        error = gang.leave_native()
    if error is not None:
        raise Failure(
            "RoutineError", f"{what} on rank {gang.rank} ignored an error of MPI: {error}"
        )
