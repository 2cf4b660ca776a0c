"""Every error a user can meet, in one tree::

    AlchemistError
    ├── GroupError                the gang of ranks
    │   ├── LaunchError           did not start (in time); nothing is left of it
    │   └── GroupFailedError      lost a rank, and so was ended as a whole
    ├── LibraryError              a library or a call of it
    │   ├── LibraryNotFoundError
    │   ├── LibraryLoadError
    │   ├── NoSuchRoutineError    (also an AttributeError)
    │   ├── BadArgumentError      (also a TypeError)
    │   ├── RoutineError          raised on a rank; the gang goes on
    │   └── CancelledError        the call was ended from outside; the gang goes on
    │       └── CallTimeoutError  ... because its time was over (also a TimeoutError)
    ├── MatrixError               a matrix or its handle
    │   ├── MatrixNotFoundError   never was, or was freed
    │   ├── StaleHandleError      of a gang that is gone
    │   ├── ShapeError            (also a ValueError)
    │   ├── LayoutError           (also a ValueError)
    │   ├── DtypeError            (also a TypeError)
    │   ├── IncompleteMatrixError elements are missing or came twice
    │   └── FileError             a file that cannot be read or written as a matrix
    ├── TransferError             data did not get through
    ├── ResourceError             not enough CPUs or memory; said before any is taken
    ├── AuthError                 wrong token or protocol version
    ├── JobError                  Ray could not be had in a job of a batch system
    │   └── SiteError             no such site, or its file is wrong (also a ValueError)
    └── SessionError              the session is closed or has no workers

Every message names the thing at fault and what to do. Details are attributes:
`rank`, `traceback`, ... (None where they do not apply).
"""

from __future__ import annotations

from typing import Any

from mpi_workers.failures import Failure


class AlchemistError(Exception):
    """Base of all errors of Alchemist on Ray.

    Attributes
    ----------
    rank : int or None
        The rank at fault, where one is.
    traceback : str or None
        The rank's own traceback.
    facts : dict
        All further details.
    """

    def __init__(self, message: str, **facts: Any) -> None:
        super().__init__(message)
        self.facts = facts

    @property
    def rank(self) -> int | None:
        return self.facts.get("rank")

    @property
    def traceback(self) -> str | None:
        return self.facts.get("traceback")

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.args[0], self.facts)


class GroupError(AlchemistError):
    """Something about the gang of ranks."""


class LaunchError(GroupError):
    """The gang did not start; whatever had started is gone again."""


class GroupFailedError(GroupError):
    """A rank (or what held the gang together) died, so the whole gang was ended.

    Its matrices are gone; the session can `request_workers` again.
    """


class LibraryError(AlchemistError):
    """Something about a library."""


class LibraryNotFoundError(LibraryError):
    """No library of that name, or no file at that path."""


class LibraryLoadError(LibraryError):
    """The library was found and could not be loaded."""


class NoSuchRoutineError(LibraryError, AttributeError):
    """The library has no routine of that name."""


class BadArgumentError(LibraryError, TypeError):
    """Arguments that do not fit the routine's signature."""


class RoutineError(LibraryError):
    """A routine failed on a rank; the gang and its matrices are unharmed."""

    def __str__(self) -> str:
        message = str(self.args[0])
        if self.traceback:
            return f"{message}\n\n--- traceback of rank {self.rank} ---\n{self.traceback}"
        return message


class CancelledError(LibraryError):
    """The call was cancelled; the gang and its matrices are unharmed."""


class CallTimeoutError(CancelledError, TimeoutError):
    """The call took longer than its `timeout_s`, and was cancelled."""


class MatrixError(AlchemistError):
    """Something about a matrix or its handle."""


class MatrixNotFoundError(MatrixError):
    """No such matrix in the gang: it never was, or it was freed."""


class StaleHandleError(MatrixError):
    """The handle belongs to a gang that is gone."""


class ShapeError(MatrixError, ValueError):
    """A shape that does not fit."""


class LayoutError(MatrixError, ValueError):
    """Not one of the 14 layouts, or one that cannot be used here."""


class DtypeError(MatrixError, TypeError):
    """Not one of the six dtypes that a matrix can have."""


class IncompleteMatrixError(MatrixError):
    """A matrix whose elements have not all arrived, or some twice."""


class FileError(MatrixError):
    """A file is missing, damaged, out of reach or full: nothing was loaded, nothing replaced.

    `rank` is who met it, ``facts["path"]`` the file.
    """


class TransferError(AlchemistError):
    """Data did not get from one side to the other; what had arrived was thrown away."""


class ResourceError(AlchemistError):
    """The cluster has not the CPUs or the memory that were asked for."""


class AuthError(AlchemistError):
    """Wrong token, or another version of the protocol."""


class JobError(AlchemistError):
    """Ray could not be started or found in a job of Slurm or PBS; what had started was ended."""


class SiteError(JobError, ValueError):
    """There is no such site file, or it says what no site can have."""


class SessionError(AlchemistError):
    """The session cannot do that in its state (closed, or without workers)."""


def _rebuild(kind: type[AlchemistError], message: str, facts: dict[str, Any]) -> AlchemistError:
    return kind(message, **facts)


def _tree(kind: type[AlchemistError]) -> dict[str, type[AlchemistError]]:
    found = {kind.__name__: kind}
    for child in kind.__subclasses__():
        found.update(_tree(child))
    return found


def from_failure(failure: Failure) -> AlchemistError:
    """The user's error for a failure that came from the MPI side."""
    kind = _tree(AlchemistError).get(failure.kind, AlchemistError)
    return kind(failure.message, **failure.facts)


def to_failure(error: AlchemistError) -> Failure:
    """The failure by which an error travels over a socket."""
    return Failure(type(error).__name__, str(error.args[0]), **error.facts)
