"""The errors that users see, in one tree::

    AlchemistError
    ├── GroupError                the gang of ranks
    │   ├── LaunchError           the gang did not start in time; nothing is left of it
    │   ├── GroupFailedError      a node or the GroupManager was lost, and the gang with it
    │   └── GroupRecoveredError   a rank was lost with the call; the ranks were started again
    ├── LibraryError              a library or a call of one of its routines
    │   ├── LibraryNotFoundError
    │   ├── LibraryLoadError
    │   ├── NoSuchRoutineError    (also an AttributeError)
    │   ├── BadArgumentError      (also a TypeError)
    │   ├── RoutineError          an exception on a rank; the gang continues
    │   │   └── LinAlgError       singular, not definite, NaN, no convergence (also NumPy's)
    │   └── CancelledError        the call was cancelled; the gang continues
    │       └── CallTimeoutError  it exceeded its time limit (also a TimeoutError)
    ├── MatrixError               a matrix or its handle
    │   ├── MatrixNotFoundError   it never existed, or was freed
    │   ├── StaleHandleError      its gang has ended, or could not rebuild it
    │   ├── ShapeError            (also a ValueError)
    │   │   └── BadIndexError     a subscript (also an IndexError)
    │   ├── LayoutError           (also a ValueError)
    │   ├── DtypeError            (also a TypeError)
    │   ├── IncompleteMatrixError elements are missing or duplicate
    │   └── FileError             a file that cannot be read or written as a matrix
    ├── TransferError             data did not arrive
    ├── ChannelError              the call at the other end of a channel has ended
    ├── ResourceError             not enough CPUs or memory; nothing was allocated
    ├── AuthError                 wrong token, missing scope, or another protocol version
    ├── JobError                  Ray did not start, or was not found, in a batch job
    │   └── SiteError             unknown site, or an invalid site file (also a ValueError)
    └── SessionError              the session is closed or has no workers

Every message names the thing at fault and what to do about it. Details are attributes: `rank` and
`traceback` (None where they do not apply), and `facts`.
"""

from __future__ import annotations

import copy
from typing import Any

import numpy as np

from alchemist_ray.tracebacks import callers_traceback
from mpi_workers.failures import Failure

# In messages about the end of a session's gang.
NEXT_GANG = "request_workers(num_workers) starts a new one"


class AlchemistError(Exception):
    """Base of all errors of Alchemist on Ray.

    Attributes
    ----------
    rank : int or None
        The rank at fault, if there is one.
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

    def again(self) -> AlchemistError:
        """A copy to raise: an error that is kept must not keep the frames that it went through."""
        return copy.copy(self)

    def _render_traceback_(self) -> list[str]:
        """The lines that IPython shows, without the frames of this package."""
        return callers_traceback(self, self.again())

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.args[0], self.facts)


class GroupError(AlchemistError):
    """An error of the gang."""


class LaunchError(GroupError):
    """The gang did not start. Everything that had started was ended."""


class GroupFailedError(GroupError):
    """A node, its proxy or the GroupManager was lost, so the whole gang was ended.

    Its matrices are lost. The session can call `request_workers` again.
    """


class GroupRecoveredError(GroupError):
    """The call was lost with a rank; the ranks were started again, and have their matrices.

    The message says what ended the rank, and what is lost. Matrices that the call may have changed
    are undefined: to use them raises a MatrixError. After the loss of a node, with
    ``max_failures``, matrices were made again: they are as they were before the call.
    """


class LibraryError(AlchemistError):
    """An error of a library or of a call of a routine."""


class LibraryNotFoundError(LibraryError):
    """No library has this name, no file is at this path, or the library's state was lost."""


class LibraryLoadError(LibraryError):
    """The library was found but could not be loaded."""


class NoSuchRoutineError(LibraryError, AttributeError):
    """The library has no routine of this name."""


class BadArgumentError(LibraryError, TypeError):
    """The arguments do not fit the routine's signature."""


class RoutineError(LibraryError):
    """A routine raised on a rank. The gang and its matrices stay; arguments may have changed."""

    def __str__(self) -> str:
        message = str(self.args[0])
        if self.traceback:
            return f"{message}\n\n--- traceback of rank {self.rank} ---\n{self.traceback}"
        if output := self.facts.get("output"):  # of a program or script
            return f"{message}\n--- last output of rank {self.rank} ---\n{output}"
        return message


class LinAlgError(RoutineError, np.linalg.LinAlgError):
    """A matrix for which a routine has no result: singular, not positive definite, NaN."""


class CancelledError(LibraryError):
    """The call was cancelled. The gang and its matrices stay; arguments may have changed."""


class CallTimeoutError(CancelledError, TimeoutError):
    """The call exceeded its `timeout_s` and was cancelled."""


class MatrixError(AlchemistError):
    """An error of a matrix or its handle."""


class MatrixNotFoundError(MatrixError):
    """The gang has no such matrix: it never existed, or was freed."""


class StaleHandleError(MatrixError):
    """The handle's gang has ended, or could not rebuild the matrix."""


class ShapeError(MatrixError, ValueError):
    """The shape does not fit."""


class BadIndexError(ShapeError, IndexError):
    """A subscript that selects nothing: out of range, or not an index."""


class LayoutError(MatrixError, ValueError):
    """An unknown layout, or one that cannot be used here."""


class DtypeError(MatrixError, TypeError):
    """A dtype that a matrix cannot have, or values that it cannot represent."""


class IncompleteMatrixError(MatrixError):
    """Elements of a matrix are missing, or were sent twice."""


class FileError(MatrixError):
    """A file cannot be read or written as a matrix. Nothing was loaded, nothing was replaced.

    `rank` is the rank that found it, ``facts["path"]`` the file.
    """


class TransferError(AlchemistError):
    """Data could not be transferred. The part that had arrived was freed."""


class ChannelError(AlchemistError):
    """The call at the other end of a channel has ended, its gang was lost, or there is no channel.

    The message names the other gang, and what ended its call.
    """


class ResourceError(AlchemistError):
    """The cluster does not have the requested CPUs or memory."""


class AuthError(AlchemistError):
    """A wrong token, a missing scope, or another version of the protocol."""


class JobError(AlchemistError):
    """Ray did not start, or was not found, in a job of Slurm or PBS; nothing is left of it."""


class SiteError(JobError, ValueError):
    """The site file does not exist or is invalid."""


class SessionError(AlchemistError):
    """The session is closed or has no workers."""


def advising(error: AlchemistError, advice: str) -> AlchemistError:
    """The error with other advice than `NEXT_GANG`, for callers without `request_workers`."""
    return _rebuild(type(error), str(error.args[0]).replace(NEXT_GANG, advice), error.facts)


def _rebuild(kind: type[AlchemistError], message: str, facts: dict[str, Any]) -> AlchemistError:
    return kind(message, **facts)


def _tree(kind: type[AlchemistError]) -> dict[str, type[AlchemistError]]:
    found = {kind.__name__: kind}
    for child in kind.__subclasses__():
        found.update(_tree(child))
    return found


def from_failure(failure: Failure) -> AlchemistError:
    """The user's error for a failure from the MPI side."""
    kind = _tree(AlchemistError).get(failure.kind, AlchemistError)
    return kind(failure.message, **failure.facts)


def to_failure(error: AlchemistError) -> Failure:
    """The failure that carries an error over a socket."""
    return Failure(type(error).__name__, str(error.args[0]), **error.facts)


def failure_of(error: BaseException, doing: str) -> Failure:
    """The answer to a process that waits, for any exception; `doing` names what has failed."""
    match error:
        case Failure():
            return error
        case AlchemistError():
            return to_failure(error)
        case ArithmeticError() | AttributeError() | LookupError() | TypeError() | ValueError():
            return Failure("GroupError", f"malformed {doing}: {error!r}")
        case _:
            return Failure("GroupError", f"{doing} failed: {error!r}")
