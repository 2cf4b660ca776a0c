"""Resizing: moves a gang with all that its ranks have to more or fewer ranks.

1. The next incarnation starts while commands run.
2. In its turn among the commands, agents move the matrices to it.
3. It takes the place of the present one, which ends.

If 1 or 2 fails, the present one goes on as it was.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from alchemist_ray.attached.address import GangAddress, next_token
from alchemist_ray.background import unless
from alchemist_ray.cluster.actors import result_of, told
from alchemist_ray.cluster.node_jobs import MoveJob
from alchemist_ray.errors import (
    AlchemistError,
    CancelledError,
    GroupError,
    GroupFailedError,
    LibraryLoadError,
    TransferError,
)
from alchemist_ray.runtime.commands.dispatcher import Dispatcher
from alchemist_ray.runtime.commands.handlers import Commands
from alchemist_ray.runtime.commands.loaded_libraries import same, stamp_of
from alchemist_ray.runtime.commands.matrix_records import Record
from alchemist_ray.runtime.commands.saved_states import SavedState, save_state
from alchemist_ray.runtime.launch.gang_cpus import GangCpus
from alchemist_ray.runtime.launch.incarnation import Incarnation
from alchemist_ray.transfer.sending import BASE_LAYOUT
from mpi_workers.data.description import DataEndpoints, TransferTarget
from mpi_workers.matrix.layout import Distribution, copies, default_grid, stored_shape


@dataclass(eq=False)
class IncarnationCopy:
    """Copies libraries and matrices; the old ranks keep theirs.

    Attributes
    ----------
    commands : Commands
        Its matrices and libraries.
    old, new : Incarnation
        Both run; no command runs during `copy`.
    source, target : GangAddress
        Their addresses; that of `new` from its start on.
    """

    commands: Commands
    old: Incarnation
    new: Incarnation
    source: GangAddress
    target: GangAddress = field(init=False)
    _created: dict[int, TransferTarget] = field(default_factory=dict)  # by the old matrix's number
    _states: list[SavedState] = field(default_factory=list)  # of libraries

    async def copy(self) -> None:
        """Copy everything. Raises `Failure`, `AlchemistError` and `RayError`."""
        commands, nodes = self.commands, self.new.nodes
        await self.check_libraries()
        for name, library in commands.libraries.items():
            await nodes.round("load", library=name, path=library.stamp[0])
        try:
            for name in commands.libraries.states():
                self._states.append(await save_state(commands, name))
            await self._copy_matrices()
            for saved in self._states:
                await saved.load(nodes, commands.next_id)
        finally:  # free them on both
            commands.dead.add(r.id for saved in self._states for r in saved.records)

    async def check_libraries(self) -> None:
        """Raise `LibraryLoadError` if the new ranks would load another library."""
        for name, library in list(self.commands.libraries.items()):
            path, _ = library.stamp
            if not same(await stamp_of(path), library.stamp):
                raise LibraryLoadError(
                    f"{path} has changed since library {name!r} was loaded: load it again first"
                )

    # --- matrices ---

    def _groups(self) -> list[list[Record]]:
        """The matrices, together those that share memory, shape, dtype and layout."""
        states = [record for saved in self._states for record in saved.records]
        found: dict[Any, list[Record]] = {}
        for record in (*self.commands.matrices.values(), *states):
            if record.sealed:
                memory = min(record.aliases, default=record.id)
                key = memory, record.shape, record.dtype, record.layout
                found.setdefault(key, []).append(record)
        return list(found.values())

    def _at(self, record: Record, ident: int, layout: str, address: GangAddress) -> TransferTarget:
        grid = default_grid(address.size)
        distribution = Distribution(layout, stored_shape(record.shape), grid)
        return TransferTarget(ident, distribution, np.dtype(record.dtype))

    async def create_matrices(self) -> None:
        """Allocate memory on the new ranks, also while commands run on the old ones.

        Raises `ResourceError` if a node does not have enough, and other errors as `copy`.
        """
        for record, *_ in self._groups():
            if record.id in self._created:
                continue
            ident, layout = record.id, record.layout
            if copies(layout, default_grid(self.target.size)) > 1:  # the ranks make the copies
                ident = -record.id
                layout = BASE_LAYOUT
            self._created[record.id] = self._at(record, ident, layout, self.target)
            shape, dtype = list(record.shape), record.dtype
            await self.new.nodes.round(
                "create", matrix=ident, shape=shape, dtype=dtype, layout=layout
            )

    async def _copy_matrices(self) -> None:
        await self.create_matrices()  # those that were made meanwhile
        nodes = self.new.nodes
        groups = self._groups()
        moves = [(record, self._created.pop(record.id)) for record, *_ in groups]
        if self._created:  # freed since then
            gone = [target.matrix for target in self._created.values()]
            await nodes.round("free", unreferenced=gone)
        await self._move(moves)
        for record, target in moves:
            await nodes.round("seal", matrix=target.matrix)
            if target.matrix != record.id:
                await self._redistribute(target.matrix, record)
                await nodes.round("free", unreferenced=[target.matrix])
        for first, *others in groups:
            for record in others:
                await self._redistribute(first.id, record)  # shares its memory

    async def _redistribute(self, source: int, record: Record) -> None:
        await self.new.nodes.round(
            "redistribute", source=source, matrix=record.id, layout=record.layout
        )

    async def _move(self, moves: list[tuple[Record, TransferTarget]]) -> None:
        matrices = tuple(
            (self._at(record, record.id, record.layout, self.source), target)
            for record, target in moves
        )
        source = DataEndpoints(self.source.token, self.source.nodes)
        target = DataEndpoints(self.target.token, self.target.nodes)
        agents = self.new.agents
        if matrices:
            jobs = [MoveJob(source, target, matrices, i, len(agents)) for i in range(len(agents))]
            asked = [agent.run.remote(job, []) for agent, job in zip(agents, jobs, strict=True)]
            await asyncio.gather(*map(result_of, asked))


@dataclass(eq=False)
class Resizing:
    """The resizes of one gang, one at a time.

    Attributes
    ----------
    dispatcher : Dispatcher
    cpus : GangCpus
    state : callable() -> context
        The gang's state while its matrices are moved.
    use : callable(new, address)
        Lets an incarnation take the place of the present one. Raises if its ranks are lost.
    next : Incarnation or None
        It is being started, or receives matrices; the resize can still be stopped.
    """

    dispatcher: Dispatcher
    cpus: GangCpus
    state: Callable[[], contextlib.AbstractContextManager[None]]
    use: Callable[[Incarnation, GangAddress], None]
    next: Incarnation | None = None
    _task: asyncio.Task[None] | None = None
    _moved: bool = False  # whether the new ranks have taken the place of the old ones
    _stopped: AlchemistError | None = None  # why

    async def run(self, old: Incarnation, new: Incarnation, address: GangAddress) -> None:
        """Move from one incarnation, at `address`, to one that is started now.

        Raises
        ------
        AlchemistError
            The gang goes on as it was.
        """
        await self.ended()  # of one whose caller was cancelled
        self._stopped = None
        self._moved = False
        self.next = new
        self._task = asyncio.get_running_loop().create_task(self._run(old, new, address))
        try:
            await asyncio.wait([self._task])
        except asyncio.CancelledError:
            self.stop(CancelledError("it was cancelled"))
            raise
        error = self._stopped if self._task.cancelled() else self._task.exception()
        if error is not None and not self._moved:  # else it came too late
            raise _unchanged(error, old.request.workers) from None

    def stop(self, why: AlchemistError) -> None:
        """End the resize that is under way, unless the new ranks have taken the place already."""
        if self._task is not None and self.next is not None and self._stopped is None:
            self._stopped = why
            self._task.cancel()

    async def ended(self) -> None:
        """Wait until no resize is under way."""
        if self._task is not None:
            await asyncio.wait([self._task])

    async def _run(self, old: Incarnation, new: Incarnation, address: GangAddress) -> None:
        try:
            copy = IncarnationCopy(self.dispatcher.commands, old, new, address)
            await copy.check_libraries()  # before ranks are started
            token = next_token(address.token)
            copy.target = await new.start(self.cpus, address.first_epoch, token)
            # Ray lets calls of an agent on a lost node wait for the node's restart.
            lost = old.nodes.ended, new.nodes.ended
            await unless(copy.create_matrices(), *lost)
            async with self.dispatcher.resize_turn() as cancelled:
                with self.state():
                    await unless(copy.copy(), cancelled, *lost)
                    self.use(new, copy.target)
                    self._moved = True
                    self.next = None
        finally:
            self.next = None  # so that `stop` does not interrupt this
            ended, left = (old, new) if self._moved else (new, old)
            await ended.shutdown()
            await ended.release()
            await self.cpus.keep(left.request.workers)


def _unchanged(error: BaseException, workers: int) -> AlchemistError:
    """The error for a user whose gang goes on as it was."""
    known = told(error)
    if not isinstance(known, AlchemistError):
        known = TransferError(f"{type(error).__name__}: {error}; call als.resize again")
    kind = GroupError if isinstance(known, GroupFailedError) else type(known)
    reason = known.facts.get("happened", known.args[0])
    return kind(
        f"the gang was not resized and goes on with its {workers} workers: {reason}", **known.facts
    )
