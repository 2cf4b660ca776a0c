"""Rebuilds the matrices of a gang on its next incarnation, from the log of its commands.

Commands are repeated in order, and only those from which a live matrix descends. A matrix is freed
as soon as no later command takes it and no process refers to it, so that the memory needed is at
most that of the first time. A command that cannot be repeated, or fails now, makes the matrices
that descend from it stale; all others are rebuilt.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from alchemist_ray.arrays.handle import Handle
from alchemist_ray.attached.address import GangAddress
from alchemist_ray.attached.connection import GangConnection
from alchemist_ray.background import in_pool
from alchemist_ray.errors import GroupFailedError
from alchemist_ray.runtime.commands.handlers import Commands
from alchemist_ray.runtime.commands.loaded_libraries import same, stamp_of
from alchemist_ray.runtime.commands.matrix_records import FILES, LoggedCommand, Record, history
from alchemist_ray.runtime.commands.nodes import Nodes
from alchemist_ray.runtime.commands.saved_states import call_on
from alchemist_ray.transfer.sources import source_for
from mpi_workers.columns.missing import ERROR
from mpi_workers.data.description import TransferTarget
from mpi_workers.failures import Failure
from mpi_workers.matrix.layout import Distribution
from mpi_workers.matrix.sparse_rows import of_layout
from mpi_workers.wire.frames import Body

REASONS_KEPT = 1000
NAMED = 5  # matrices in a message


class Rebuilding:
    """One attempt to rebuild what a gang had.

    Parameters
    ----------
    commands : Commands
        Its matrices, libraries and log.
    nodes : Nodes
        Of the new incarnation.
    address : GangAddress
    """

    def __init__(self, commands: Commands, nodes: Nodes, address: GangAddress) -> None:
        self._commands = commands
        self._nodes = nodes
        self._address = address
        self._obstacles: dict[LoggedCommand, str] = {}
        self._there: set[int] = set()  # matrices that have been rebuilt so far
        self._kept: set[int] = set()  # matrices that ranks had from the beginning
        self._connection: GangConnection | None = None

    async def run(self) -> str:
        """Load the libraries, and rebuild the matrices; what was restored, in words.

        Raises
        ------
        GroupFailedError
            If ranks are lost meanwhile.
        """
        matrices = self._commands.matrices
        for record in [r for r in matrices.values() if not r.sealed]:
            del matrices[record.id]  # its sender sends it again
        try:
            if (settle := self._commands.unsettled) is not None:
                await settle()
                self._commands.unsettled = None
            commands = self._possible()
            await self._load_libraries(commands)
            last = {i: command for command in commands for i in (*command.made, *command.used)}
            for command in commands:
                if not self._blocked(command):
                    await self._repeat(command)
                # Also those that have been released since the loss.
                self._free(i for i in self._there - matrices.keys() if last[i] is command)
            await self._nodes.round("free")  # notices ranks that were lost just now
        finally:
            if self._connection is not None:
                await in_pool(self._connection.close)
        return self._settle()

    async def run_undefined(self) -> None:
        """Rebuild what a lost call has left undefined on ranks that have all other matrices.

        And the states of libraries, which were lost with the ranks.

        Raises
        ------
        GroupFailedError
            If ranks are lost meanwhile.
        """
        matrices = self._commands.matrices
        self._kept = {ident for ident, record in matrices.items() if not record.undefined}
        try:
            for record in list(matrices.values()):
                known = {record.id, *record.aliases} & matrices.keys()
                for command in self._way_to([matrices[ident] for ident in known]):
                    if "library" in command.body:
                        await self._commands.bring(command.body["library"])
                    await self._repeat(command)
                if known <= self._there:
                    for ident in known:
                        matrices[ident].undefined = ""
                self._free(self._there - matrices.keys())
            for library, state in list(self._commands.libraries.states().items()):
                if state.made_by is not None and state.made_by.body["op"] != "load":
                    await self._rebuild_state(library, state.made_by)
                self._free(self._there - matrices.keys())
        finally:
            if self._connection is not None:
                await in_pool(self._connection.close)

    async def _rebuild_state(self, library: str, last: LoggedCommand) -> None:
        """Repeat what led to the state of a library; if that cannot be, it must be loaded again."""
        commands, reason = self._way_to_state(library, last)
        self._nodes.absent.add(library)  # what has rebuilt a matrix may have changed its state
        for command in commands:
            try:
                await self._commands.bring(command.body.get("library", ""))
            except Failure as failure:
                reason = failure.message
            if not reason and command.body["op"] != "load":
                await self._repeat(command)
                reason = self._obstacles.get(command, "")
            if reason:
                words = f"library {library!r} must be loaded again: its state could not be rebuilt"
                self._commands.libraries.remove(library, f"{words}: {reason}")
                return

    # --- what can be rebuilt ---

    def _way_to_state(self, library: str, last: LoggedCommand) -> tuple[list[LoggedCommand], str]:
        """The commands that rebuild a state from the matrices that are there; why they cannot."""
        matrices = self._commands.matrices
        found = set[LoggedCommand]()
        left = [last]
        reason = ""
        while left:
            command = left.pop()
            there = [matrices[i] for i in (*command.made, *command.changed) if i in matrices]
            as_left = there and all(r.made_by is command and not r.undefined for r in there)
            if command in found or (as_left and command.body.get("library") != library):
                continue
            found.add(command)
            left += command.parents
            used = [matrices[i] for i in command.used if i in matrices]
            again = [r for r in there if r.id in command.changed or "library" not in command.body]
            since = [r for r in used if r.undefined or r.made_by not in command.parents]
            reason = reason or command.obstacle()
            for record in (*again, *since):
                reason = reason or f"{record.name}, which {command.name} had, has changed since"
        return sorted(found, key=lambda command: command.number), reason

    def _way_to(self, records: Sequence[Record]) -> list[LoggedCommand]:
        """The commands that rebuild undefined matrices from those that are there.

        None where that would change a defined one: those are never put at risk.
        """
        matrices = self._commands.matrices
        found, left = set[LoggedCommand](), [record.made_by for record in records]
        if not all(record.undefined for record in records) or None in left:
            return []
        while left:
            command = left.pop()
            if command is None or command in found:
                continue
            its = [matrices.get(ident) for ident in (*command.made, *command.changed)]
            if all(r is not None and r.made_by is command and not r.undefined for r in its):
                continue  # it is there as that command left it
            if command.obstacle() or any(r is not None and not r.undefined for r in its):
                return []
            found.add(command)
            left += command.parents
        return sorted(found, key=lambda command: command.number)

    def _possible(self) -> list[LoggedCommand]:
        """The commands to repeat: those without an obstacle on the way from the sources."""
        states = self._commands.libraries.states()
        records = [*self._commands.matrices.values(), *states.values()]
        for command in history(records):
            self._blocked(command)
        return history([record for record in records if record.made_by not in self._obstacles])

    def _blocked(self, command: LoggedCommand) -> bool:
        """Whether a command cannot be repeated, because of itself or of one before it."""
        if command not in self._obstacles:
            reason = command.obstacle()
            for parent in command.parents:  # earlier commands have been looked at
                reason = reason or self._obstacles.get(parent, "")
            if not reason:
                return False
            self._obstacles[command] = reason
        return True

    def _free(self, idents: Iterable[int]) -> None:
        unused = set(idents)
        self._there -= unused
        self._commands.dead.add(unused)

    def _settle(self) -> str:
        """Note which matrices are stale; the result in words."""
        matrices = self._commands.matrices
        self._free(self._there - matrices.keys())  # released after the last command that took them
        lost: list[Record] = []
        for record in list(matrices.values()):
            reason = self._obstacles.get(record.made_by) if record.made_by else "it was not logged"
            if reason is not None or record.id not in self._there:
                del matrices[record.id]
                lost.append(record)
                note_stale(self._commands, record, reason or "it was not made again")
        libraries = self._commands.libraries
        without = ""
        for name, state in libraries.states().items():
            if state.made_by is not None and (reason := self._obstacles.get(state.made_by)):
                words = f"library {name!r} must be loaded again: its state could not be rebuilt"
                libraries.remove(name, f"{words}: {reason}")
                without += f"; {words}"
        if not lost:
            return f"The gang was started again with all its matrices ({len(matrices)}){without}"
        names = ", ".join(record.name for record in lost[:NAMED]) + ", ..." * (len(lost) > NAMED)
        of = f"{len(matrices)} of {len(matrices) + len(lost)} matrices"
        return f"The gang was started again with {of}; not with {names}{without}"

    # --- how ---

    async def _load_libraries(self, commands: Sequence[LoggedCommand]) -> None:
        """All libraries, but for those that one of the commands loads."""
        libraries = self._commands.libraries
        later = {command.body["library"] for command in commands if command.body["op"] == "load"}
        for name, library in list(libraries.items()):  # some are removed
            path, _ = library.stamp
            if not same(await stamp_of(path), library.stamp):
                libraries.remove(name)
            elif name not in later:
                try:
                    await self._nodes.round("load", library=name, path=path)
                except Failure:
                    libraries.remove(name)  # calls of it are told that it is not loaded

    async def _repeat(self, command: LoggedCommand) -> None:
        try:
            await self._run(command)
        except Exception as error:  # whatever it is, other matrices can be rebuilt
            if (lost := self._nodes.failure or self._nodes.lost) is not None:
                command.losses += 1
                raise lost.with_traceback(None) from None
            if isinstance(error, GroupFailedError):
                raise
            self._obstacles[command] = f"{command.name} could not be repeated: {error}"
            self._free((*command.made, *command.changed))
            return
        self._there |= set(command.made)

    async def _run(self, command: LoggedCommand) -> None:
        op, fields = command.body["op"], {k: v for k, v in command.body.items() if k != "op"}
        if op == "create":
            await self._send(command.made[0], command.source, fields)
        elif op == "redistribute":
            await self._nodes.round(op, matrix=command.made[0], **fields)
        else:
            await self._check_sources(command)
            there = not self._kept.isdisjoint(command.made)
            if op != "load":
                new = not command.made or there
                fields["first"] = self._commands.next_id if new else command.made[0]
            done = await self._nodes.round(op, **fields)
            if there:  # it was repeated for the state of its library
                self._commands.dead.add_results(self._commands.next_id)
            else:
                self._check_made(command, done.matrices or [])

    def _check_made(self, command: LoggedCommand, matrices: Sequence[Any]) -> None:
        """Whether a command has made matrices like those of the first time."""
        made = {ident: (tuple(shape), *its[:2]) for ident, shape, *its in matrices}
        for ident in command.made:
            record = self._commands.matrices.get(ident)
            if record is not None and _same_sparse(made.get(ident), record):
                record.shape, record.dtype, record.layout = made[ident]
            if ident not in made or (
                record is not None and made[ident] != (record.shape, record.dtype, record.layout)
            ):
                raise Failure(
                    "RoutineError",
                    "its results have another shape, dtype or layout than the first time",
                )

    async def _check_sources(self, command: LoggedCommand) -> None:
        """Whether the file that a command reads, and its library, are those of the first time."""
        library = command.body.get("library", "")
        if self._commands.libraries.stamp(library) != command.code:
            raise Failure(
                "LibraryLoadError",
                f"the file of library {library!r} has changed, so its results cannot be made "
                "again: load the library and repeat the calls",
            )
        if not command.stamp:
            return
        path = command.body["arguments"]["path"]
        first = self._commands.next_id
        done = await call_on(self._nodes, first, FILES, "stamp", {"path": path})
        if done.value[0] != command.stamp:
            raise Failure(
                "FileError",
                f"{path} has changed since it was loaded, so the matrix cannot be rebuilt: load it "
                "again",
            )

    async def _send(self, ident: int, data: Any, fields: Body) -> None:
        await self._nodes.round("create", matrix=ident, **fields)
        await in_pool(self._send_again, ident, data, fields)
        await self._nodes.round("seal", matrix=ident)

    def _send_again(self, ident: int, data: Any, fields: Body) -> None:
        """In a thread: the data come from their nodes, as at the first time."""
        if self._connection is None:
            self._connection = GangConnection(self._address, Handle)
        connection = self._connection
        source = source_for(data, fields["dtype"], ERROR, connection)
        distribution = Distribution(fields["layout"], source.shape, connection.grid)
        source.send(connection, TransferTarget(ident, distribution, source.dtype), None)


def note_stale(commands: Commands, record: Record, reason: str) -> None:
    """Note why a matrix is lost, for those that use it."""
    commands.stale[record.id] = (
        f"{record.name} (matrix {record.id}) was lost with ranks of its gang and could not be "
        f"rebuilt: {reason}"
    )
    for ident in list(commands.stale)[:-REASONS_KEPT]:
        del commands.stale[ident]


def _same_sparse(made: Any, record: Record) -> bool:
    """Whether a command has made the same sparse matrix again, perhaps cut for other ranks."""
    now, before = (of_layout(layout) for layout in (made[2] if made else "", record.layout))
    if now is None or before is None:
        return False
    return (now.shape, now.dtype, now.nnz) == (before.shape, before.dtype, before.nnz)
