"""The commands that a rank executes; `mpi_workers.protocol.commands` declares them.

The GroupManager sends them through the node's proxy; fields of a reply are those that a handler
returns. `exit` is handled by the loop. A library is loaded on all ranks of the gang, or on none.
"""

from __future__ import annotations

import contextlib
import math
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from mpi4py import MPI

from mpi_workers.data.loans import RankMemory
from mpi_workers.failures import Failure, Interrupted
from mpi_workers.matrix.dist_matrix import REPLY_NBYTES, DistMatrix, read_only
from mpi_workers.matrix.layout import Distribution, stored_shape
from mpi_workers.matrix.sizes import check_room
from mpi_workers.matrix.sparse_matrix import SparseMatrix
from mpi_workers.matrix.sparse_rows import of_layout
from mpi_workers.matrix.storage import Storage
from mpi_workers.protocol.commands import COMMANDS, command_name, matrices_of
from mpi_workers.protocol.packing import places
from mpi_workers.rank.cells import run_cell
from mpi_workers.rank.channels import Channels
from mpi_workers.rank.foreign_code import called, isolated
from mpi_workers.rank.gang_view import GangView
from mpi_workers.waits import interruption
from mpi_workers.waits.interruption import Of
from mpi_workers.wire.frames import Body

IMPURE = "The call is declared pure=True, and changes a matrix: leave out pure=True."


class Library(Protocol):
    """A loaded library: `ali.python_library.PythonLibrary` or `ali.native.library.NativeLibrary`.

    `ali.registry.load` makes it; `mpi_workers.entry_points` passes that function in.
    """

    def describe(self) -> Body:
        """Name, documentation and signatures, as a map."""

    def call(self, gang: GangView, routine: str, arguments: Mapping[str, Any]) -> Sequence[Any]:
        """Run a routine; one value per declared result."""

    def close(self) -> None:
        """Release the library's resources."""


Loader = Callable[[str, str | None], Library]


class Libraries:
    """The libraries of one rank, by name.

    Parameters
    ----------
    loader : Loader
        Loads a library on this rank.
    """

    def __init__(self, loader: Loader) -> None:
        self._loader = loader
        self._by_name: dict[str, Library] = {}
        self._replaced: tuple[str, Library | None] | None = None  # by the last load

    def __getitem__(self, name: str) -> Library:
        library = self._by_name.get(name)
        if library is None:
            raise Failure("LibraryNotFoundError", f"library {name!r} is not loaded")
        return library

    def load(self, gang: GangView, name: str, path: str | None) -> Library:
        """Load a library, and use it when it has loaded on every rank. Collective.

        The library that it replaces is kept until `settle`.

        Raises
        ------
        BaseException
            The loader's error, on the ranks on which it failed.
        Interrupted
            On the other ranks.
        """
        library, error = None, None
        try:
            library = called(self._loader, name, path)
        except BaseException as caught:  # a module may call sys.exit
            error = caught
        try:
            everywhere = gang.comm.allreduce(library is not None, MPI.LAND)
        except BaseException:
            _close(library)
            raise
        if error is not None:
            raise error
        if library is None or not everywhere:
            _close(library)
            raise Interrupted
        self._replaced = (name, self._by_name.get(name))
        self._by_name[name] = library
        return library

    def settle(self, *, failed: bool) -> None:
        """Close the library that the last load has replaced.

        `failed`: the load was cancelled when some ranks had finished it. They go back to the
        library that was replaced.
        """
        if self._replaced is None:
            return
        (name, old), self._replaced = self._replaced, None
        if not failed:
            _close(old)
            return
        _close(self._by_name.pop(name))
        if old is not None:
            self._by_name[name] = old

    def close(self) -> None:
        """Close all libraries; their errors are ignored."""
        self.settle(failed=False)
        for library in self._by_name.values():
            with contextlib.suppress(Exception):
                library.close()


def _close(library: Library | None) -> None:
    """Close a library that is not used any more; an error goes to the rank's output."""
    if library is not None:
        try:
            library.close()
        except Exception:
            traceback.print_exc()


class Runner(Protocol):
    """Runs code that a user has sent: a function or a script. `ali` provides it."""

    def run(
        self, gang: GangView, task: Body, matrix: Callable[[Any], DistMatrix]
    ) -> tuple[Sequence[DistMatrix], Any]:
        """Run it on this rank: the matrices that it made, and its result as a message field.

        `matrix` finds matrices by id.
        """


class RankCommands:
    """The state that commands of one rank share, and their handlers.

    Parameters
    ----------
    gang, storage : GangView, Storage
    loader, runner : Loader, Runner
        How libraries are loaded and users' own code is run.
    memory : RankMemory, optional
        Has the matrices of the rank's process before this one.

    Attributes
    ----------
    number : int
        Of the collective command under way, or of the last one.
    """

    def __init__(
        self,
        gang: GangView,
        storage: Storage,
        loader: Loader,
        runner: Runner,
        memory: RankMemory | None = None,
    ) -> None:
        self.gang = gang
        self._channels = gang.channels = Channels(gang)
        self._memory = memory
        self.number = 0
        self._storage = storage
        self._runner = runner
        self._libraries = Libraries(loader)
        self._last_call = ""
        # Of the last command.
        self.may_have_sent = False
        self.sequence = 0  # of collectives on communicators which outlive it
        self._result: list[memoryview] = []  # of a function, if it is too large for a reply

    def execute(self, body: Body) -> Body:
        """Execute one command; the fields of its reply."""
        command = COMMANDS.get(body["op"])
        fields = None if command is None else command.ranks
        if fields is None or not set(fields.split()) <= body.keys():
            raise Failure("AlchemistError", f"rank {self.gang.rank} got a bad command: {body!r}")
        for matrix_id in body.get("unreferenced", ()):
            self._storage.free(matrix_id)
        if "discard" in body:  # results of a call that has failed on other ranks
            self._storage.free_from(body["discard"])
        handler: Callable[[Body], Body | None] = getattr(self, body["op"])
        succeeded = False
        try:
            with interruption.EndedWaits():
                if command is not None and command.collective:
                    self._enter(body)
                reply = handler(body) or {}
                self._channels.finish()
            succeeded = True
        finally:
            self._channels.close(sys.exception())
            self.may_have_sent = interruption.has_used_communicators(but=Of.PRODUCT)
            kept = interruption.has_used_communicators(but=Of.GANG)
            self.sequence = interruption.sequence() if kept else 0
            self.gang.end_call(succeeded=succeeded)
            self._tell_leftovers(command_name(body))
        return reply

    def _tell_leftovers(self, call: str) -> None:
        if left := interruption.leftovers():
            sys.stderr.write(
                f"{call} has left {left}: it was dropped, because a call ends with its call. "
                "Receive each message and complete each request in the call that began it\n"
            )

    def close(self) -> None:
        """Close all libraries; their errors are ignored."""
        self._libraries.close()

    # --- matrices ---

    def adopt(self, body: Body) -> Body:
        """After the start of another process of this rank: have the matrices of the last one."""
        assert self._memory is not None
        return {"gone": self._memory.adopt(body["matrices"])}

    def create(self, body: Body) -> None:
        self._storage.put(body["matrix"], self._new(body), sealed=False)

    def _new(self, body: Body) -> DistMatrix:
        distribution = Distribution(body["layout"], stored_shape(body["shape"]), self.gang.grid)
        return self._storage.new(distribution, np.dtype(body["dtype"]), tuple(body["shape"]))

    def seal(self, body: Body) -> None:
        self._storage.seal(body["matrix"])
        matrix = self._storage.sealed(body["matrix"])
        if of_layout(matrix.layout) and (fault := SparseMatrix(matrix).fault()):
            raise Failure("ShapeError", f"the sparse matrix cannot be used: {fault}")

    def free(self, body: Body) -> None:
        """Free what `execute` has freed before."""

    def redistribute(self, body: Body) -> None:
        source = self._storage.sealed(body["source"])
        result = self.gang.to_layout(source, body["layout"])
        self._storage.put(body["matrix"], result, sealed=True)

    # --- code ---

    def load(self, body: Body) -> Body:
        library = self._libraries.load(self.gang, body["library"], body.get("path"))
        return {"value": library.describe()} if self.gang.rank == 0 else {}

    def call(self, body: Body) -> Body:
        library = self._libraries[body["library"]]
        arguments = {
            name: self._storage.sealed(value["matrix"]) if isinstance(value, dict) else value
            for name, value in body["arguments"].items()
        }
        with self._changing(body):
            results = called(isolated, library.call, self.gang, body["routine"], arguments)
        used = {v["matrix"]: arguments[k] for k, v in body["arguments"].items() if type(v) is dict}
        found = [result for result in results if isinstance(result, DistMatrix)]
        reply = self._keep(found, body["first"], used)
        if self.gang.floating:
            reply["floating"] = self.gang.floating
        if self.gang.rank == 0:
            made = iter(reply.get("matrices", ()))
            reply["value"] = [
                {"matrix": next(made), **_elements(result)}
                if isinstance(result, DistMatrix)
                else result
                for result in results
            ]
        return reply

    def run(self, body: Body) -> Body:
        self.gang.check()
        used: dict[int, DistMatrix] = {}

        def matrix(matrix_id: Any) -> DistMatrix:
            if matrix_id not in used:
                used[matrix_id] = found = self._storage.sealed(matrix_id)
                if body.get("pure"):
                    unchanged.enter_context(read_only([found], IMPURE))
            return used[matrix_id]

        self._result = []
        with self._changing(body), contextlib.ExitStack() as unchanged:
            results, value = called(isolated, self._runner.run, self.gang, body, matrix)
        reply = self._keep(results, body["first"], used)
        if self.gang.rank == 0:
            reply["value"] = value
            sizes = [len(part) for part in value.get("parts", ())]
            if sum(sizes) > body.get("inline", math.inf):
                self._result = value.pop("parts")
                value["sizes"] = sizes
        return reply

    @contextlib.contextmanager
    def _changing(self, body: Body) -> Iterator[None]:
        """For a call: the matrices that it may change have no copies on a GPU that are kept."""
        changes = body.get("changes", matrices_of(body))
        blocks = [self._storage.sealed(ident).block for ident in changes]
        for block in blocks:
            block.steady, block.copy = False, None
        try:
            yield
        finally:
            for block in blocks:
                block.steady = True

    def keep_result(self, body: Body) -> None:
        """Make a matrix of the result of the last function, which is too large for a reply."""
        matrix = self._new(body)
        if self.gang.rank == 0:
            raw = matrix.stored[:, 0].view(np.uint8)
            for part, place in zip(self._result, places(list(map(len, self._result))), strict=True):
                raw[place] = part
            self._result = []
        self._storage.put(body["matrix"], matrix, sealed=True)

    def _keep(
        self, results: Sequence[DistMatrix], first: int, used: Mapping[int, DistMatrix]
    ) -> Body:
        """Store a call's matrices under ids from `first`; a reply with their descriptions.

        A result that has the memory of an argument is described with the argument's id.
        """
        # By their memory, which a result may share with an argument or another result.
        new = {id(one.block): one.nbytes for one in results}
        for argument in used.values():
            new.pop(id(argument.block), None)
        check_room(sum(new.values()), self.gang.room)
        described = []
        for matrix_id, result in enumerate(results, first):
            self._storage.put(matrix_id, result, sealed=True)
            aliases = [ident for ident, its in used.items() if its.block is result.block]
            described.append(
                [matrix_id, list(result.array_shape), result.dtype.name, result.layout, *aliases]
            )
        return {"matrices": described} if described else {}

    def _enter(self, body: Body) -> None:
        """Begin a collective command: waits belong to it, on a communicator without messages."""
        self.number = body["seq"]
        interruption.begin(self.number)
        self._channels.begin(self.number, body.get("channels", {}))
        if body.get("settle"):
            self.gang.settle()
        self._tell_leftovers(self._last_call)
        self._last_call = command_name(body)
        failed = bool(body.get("renew"))
        self._libraries.settle(failed=failed)
        self.gang.room = body.get("room")
        if failed:
            self.gang.renew()
        else:
            self.gang.enter()


def _elements(matrix: DistMatrix) -> Body:
    """The elements of a small result that this rank holds whole: no client has to fetch it."""
    if matrix.stored.shape != matrix.shape or matrix.nbytes > REPLY_NBYTES:
        return {}
    kind = matrix.dtype.newbyteorder("<")
    return {"elements": matrix.local.astype(kind, copy=False).tobytes()}


# Only code below these functions may be interrupted by a signal.
INTERRUPTIBLE = frozenset({isolated.__code__, run_cell.__code__})
