"""GangView: the communicator, memory and progress reports that a routine uses."""

from __future__ import annotations

import contextlib
import math
import os
import pickle
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
from mpi4py import MPI

from mpi_workers.failures import Failure, Interrupted, describe_status
from mpi_workers.matrix.dist_matrix import DistMatrix
from mpi_workers.matrix.dtypes import check_dtype
from mpi_workers.matrix.layout import Distribution, Grid, default_grid, stored_shape
from mpi_workers.matrix.redistribution import redistribute
from mpi_workers.matrix.sizes import check_room
from mpi_workers.matrix.sparse_rows import of_layout
from mpi_workers.matrix.storage import Storage
from mpi_workers.node.cleanup import forget_segments, learn_segments, note_segments
from mpi_workers.node.processes import OomWatch, descendants
from mpi_workers.rank.history import Span
from mpi_workers.waits import interruption
from mpi_workers.waits.interruption import Of

PROGRESS_S = 0.1  # between two reports of progress
FLUSH_S = 0.2  # for the messages of a buffer that a call has left attached
CALLS, OWN = 1, 2  # communicators: of calls, of this product
_errors: list[int] = []  # codes of MPI's errors in the native call under way


def _record(comm: MPI.Comm, code: int) -> None:
    if not _errors:
        _errors.append(code)
        sys.stderr.write(f"{MPI.Get_error_string(code).strip()}\n")
        sys.stderr.flush()


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


MPI.pickle.__init__(pickled, pickle.loads)  # type: ignore[misc]


def _detach_buffer() -> None:
    request = MPI.Iflush_buffer()
    deadline = time.monotonic() + FLUSH_S
    while not request.Test():
        if time.monotonic() > deadline:
            interruption.mark_unsafe("messages of an attached buffer were not received")
            return
        time.sleep(0)
    MPI.Detach_buffer()


@cache
def _recorder() -> MPI.Errhandler:
    return MPI.Comm.Create_errhandler(_record)


@dataclass(eq=False)
class GangView:
    """A gang as a routine on one of its ranks sees it.

    Attributes
    ----------
    world : MPI.Intracomm
        All ranks of the gang; used by no other code, because a call may leave a wait on its
        communicators.
    comm : MPI.Intracomm
        That of the call's code: a user's function, script or library. It changes after a call
        that failed.
    own_comm : MPI.Intracomm
        That of this product's own messages, which users' code never sees: of redistribution and
        of shipped libraries. It changes as `comm` does.
    storage : Storage
        This rank's matrices.
    report : callable(fraction, text)
        Sends a report of progress to the user.
    folder : Path
        The gang's folder on this node.
    floating : int
        NumPy's flags of the floating-point errors of the call under way, for its caller.
    room : int or None
        Bytes that the results of the call under way may have by its user's quota. None: no limit.
    channels : mpi_workers.rank.channels.Channels or None
        To calls of other gangs. None: these ranks are a part of a gang.
    """

    world: MPI.Intracomm
    storage: Storage
    report: Callable[[float, str], None]
    folder: Path
    floating: int = 0
    room: int | None = None
    channels: Any = None
    _used: int = 0  # which of the two communicators the call has used, as bits
    _reported: float = 0.0

    def __post_init__(self) -> None:
        self.rank: int = self.world.rank
        self.size: int = self.world.size
        self.grid: Grid = default_grid(self.world.size)
        interruption.own(MPI._handleof(self.world), Of.GANG | Of.PRODUCT | Of.ALL_CALLS)
        self._oom = OomWatch()
        self._replace(CALLS | OWN)

    def _replace(self, which: int) -> None:
        """Make new communicators in place of those of `which`. Collective."""
        if which & CALLS:
            self._comm = self._duplicate(self.world, Of.GANG | Of.ALL_CALLS)
            self._own_reductions(self._comm, Of.GANG)
        if which & OWN:
            self._own = self._duplicate(self.world, Of.GANG | Of.PRODUCT | Of.ALL_CALLS)
            self._own_reductions(self._own, Of.GANG | Of.PRODUCT)

    @staticmethod
    def _own_reductions(comm: MPI.Intracomm, about: Of) -> None:
        """mpi4py reduces objects on a duplicate, which it keeps. Collective."""
        duplicate, _ = MPI._commctx_intra(comm)
        interruption.own(MPI._handleof(duplicate), about)

    @property
    def comm(self) -> MPI.Intracomm:
        self._used |= CALLS
        return self._comm

    @property
    def own_comm(self) -> MPI.Intracomm:
        self._used |= OWN
        return self._own

    def enter(self) -> None:
        """Begin a call after calls that left no messages under way."""
        self._used = 0
        self.floating = 0

    def note_floating(self, error: str, flags: int) -> None:
        """Called by NumPy for floating-point errors; see `Context.floating_errors`."""
        self.floating |= flags

    def renew(self) -> None:
        """Duplicate the communicators that the call that failed has used. Collective.

        Messages on the old ones may never complete, so they are not freed. MPI has 2048 of them.

        Raises
        ------
        Failure
            ResourceError, if MPI has no communicator left.
        """
        with interruption.uninterruptible():
            self._replace(self.world.allreduce(self._used, MPI.BOR))
        self._used = 0

    def end_call(self, *, succeeded: bool) -> None:
        """End what the call has left in MPI: operations, messages, error handlers, its buffer."""
        for comm in (self._comm, MPI.COMM_WORLD, MPI.COMM_SELF):
            comm.Set_errhandler(MPI.ERRORS_RETURN)
        if not interruption.used():
            return
        if interruption.buffer_is_attached():
            _detach_buffer()
        interruption.end(succeeded=succeeded)

    def settle(self) -> None:
        """Drop the messages that arrived at ranks which had left the call. Collective.

        After a call in which a rank has used MPI. A rank that is late must not drop what others
        send in the new call: hence the second barrier.
        """
        with interruption.uninterruptible():
            self.world.Barrier()
            interruption.drop_messages()
            self.world.Barrier()

    def require_communicators(self, count: int) -> None:
        """For native code that ends the ranks when it gets none. Collective; raises as `renew`."""
        spare: list[MPI.Comm] = []
        try:
            while len(spare) < count:
                spare.append(self.duplicate())
        finally:
            for comm in spare:
                comm.Free()

    def duplicate(self) -> MPI.Intracomm:
        """A further communicator of the call. Collective. Raises as `renew`."""
        return self._duplicate(self.own_comm, Of.GANG | Of.PRODUCT)

    def _duplicate(self, comm: MPI.Intracomm, about: Of) -> MPI.Intracomm:
        try:
            made = MPI.Intracomm(comm.Dup())
        except MPI.Exception as error:
            if interruption.left_in():
                raise
            raise Failure(
                "ResourceError",
                "MPI has no communicator left for this gang: every call that fails while its "
                "ranks exchange messages uses one up, and there are about 2000. Fetch "
                f"the results that you need, and open another session ({error})",
            ) from None
        interruption.own(MPI._handleof(made), about)
        return made

    def part(self, colour: int) -> GangView:
        """The ranks that pass the same colour, as a gang of their own. Collective."""
        world = MPI.Intracomm(self.own_comm.Split(colour, self.rank))
        storage = Storage(world.rank, self.storage.pool, self.storage.allocations)
        return GangView(world, storage, self.report, self.folder, room=self.room)

    def new(
        self, shape: Sequence[int], dtype: Any, layout: str, *, zero: bool = True
    ) -> DistMatrix:
        """Memory for a matrix or vector distributed over the gang (no communication)."""
        kind = check_dtype(dtype)
        check_room(math.prod(shape) * kind.itemsize, self.room)
        matrix = self._allocated(shape, kind, layout)
        if zero:
            matrix.local[...] = 0
        return matrix

    def _allocated(self, shape: Sequence[int], dtype: np.dtype[Any], layout: str) -> DistMatrix:
        distribution = Distribution(layout, stored_shape(shape), self.grid)
        return self.storage.new(distribution, dtype, tuple(shape))

    def to_layout(self, matrix: DistMatrix, layout: str) -> DistMatrix:
        """The matrix in another layout, or itself if it has that layout. Collective."""
        if matrix.layout == layout:
            return matrix
        if of_layout(layout) or of_layout(matrix.layout):
            raise Failure(
                "LayoutError",
                "a sparse matrix has one layout, ROWS, and no dense matrix has it: fetch() it, and "
                "send it as a dense array",
            )
        result = self._allocated(matrix.array_shape, matrix.dtype, layout)  # perhaps no result
        redistribute(matrix, result, self.own_comm)
        return result

    @contextlib.contextmanager
    def segments(self, names: Sequence[str]) -> Iterator[None]:
        """Remove these names from /dev/shm at the end of the block, also if the rank is killed.

        Begin before the process starts that uses them: the gang's folder has a record of them.
        """
        note_segments(self.folder, names)
        try:
            yield
        finally:
            forget_segments(self.folder, names)

    def note_programs(self) -> None:
        """Let the gang's end remove the names in /dev/shm of processes that this rank has started.

        For programs of another launcher, such as ``mpiexec``, which leave them when they fail.
        """
        learn_segments(self.folder, descendants([os.getpid()]))

    def program_variables(self) -> dict[str, str]:
        """For an MPI program that this rank starts: it shows in which call of MPI it is."""
        return interruption.program_variables()

    def program_waits_in(self) -> str:
        """The MPI call in which that program is, or has ended: ``MPI_Recv``; or empty."""
        return interruption.program_waits_in()

    def end_of_program(self, status: int) -> str:
        """How that program has ended, by the status of waitpid."""
        return self._oom.explained(status, describe_status(status))

    def forget_program(self) -> None:
        """That program has ended."""
        interruption.forget_program()

    @property
    def coupled(self) -> Any:
        """The channels of the call. Raises `Failure`, if these ranks are a part of a gang."""
        if self.channels is None:
            raise Failure("ChannelError", "only a call of a whole gang has channels")
        return self.channels

    def check(self) -> None:
        """Raise `Interrupted` if the call has failed on another rank or was cancelled."""
        if interruption.interrupted():
            interruption.leave()
            raise Interrupted

    def enter_native(self) -> None:
        """Native code is called next: record the errors that MPI returns to it.

        MPI calls from Python raise `MPI.Exception`. Native code gets a return code, which few
        libraries check, because MPI's default is to abort. While native code runs, the error
        handler of the gang's communicator (inherited by those that native code derives from it)
        prints and records the first error, and the call fails with it. MPICH returns MPI_SUCCESS
        after such a handler: a library that checks return codes sets MPI_ERRORS_RETURN on its
        communicator, as with any MPI program.
        """
        _errors.clear()
        for comm in self._reporting():
            comm.Set_errhandler(_recorder())

    def leave_native(self) -> str | None:
        """Native code has returned: the first error that MPI has returned to it, or None."""
        for comm in self._reporting():
            comm.Set_errhandler(MPI.ERRORS_RETURN)
        return MPI.Get_error_string(_errors[0]).strip() if _errors else None

    def _reporting(self) -> tuple[MPI.Comm, ...]:
        # MPICH uses the handler of COMM_SELF for communicators that MPI_Comm_create has made.
        return self._comm, MPI.COMM_WORLD, MPI.COMM_SELF

    def keeps_memory(self, request: MPI.Request) -> None:
        """Ranks go on after a collective that the call leaves: its memory is kept for ever."""
        interruption.keeps_memory(request.handle)

    def left_in(self) -> str:
        """The MPI call that this call has left because it is over: ``Allreduce``; or empty."""
        return interruption.left_in()

    def note_wait(self, seconds: float) -> None:
        """Count time that native code has waited for other ranks, for traces."""
        interruption.note_wait(seconds)

    def span(self, name: str) -> Span:
        """A part of a routine that `AlchemistSession.trace` shows."""
        return Span(name)

    def progress(self, fraction: float, text: str) -> None:
        """Report a routine's progress to the user (rank 0, at most ten times a second)."""
        now = time.monotonic()
        if self.rank == 0 and now - self._reported > PROGRESS_S:
            self._reported = now
            self.report(fraction, text)
