"""Copies of small matrices and of states of libraries in the GroupManager: they cut the log.

A vector that thousands of commands have led to would be rebuilt by all of them. Once these have
taken more than `LEAST_S`, the GroupManager fetches the vector, to send its copy after a failure.
It does the same with the state of a library.

The results of the first routine are the arguments of the second: values and matrices.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

from alchemist_ray.arrays.handle import Handle
from alchemist_ray.gang.address import GangAddress
from alchemist_ray.gang.connection import GangConnection
from alchemist_ray.runtime.commands.dispatcher import Dispatcher
from alchemist_ray.runtime.commands.handlers import Commands
from alchemist_ray.runtime.commands.matrix_records import LoggedCommand, Record
from alchemist_ray.runtime.launch.gang_cpus import in_thread
from alchemist_ray.runtime.launch.nodes import Nodes
from alchemist_ray.transfer.fetching import fetch
from mpi_workers.failures import Failure
from mpi_workers.wire.frames import Body
from mpi_workers.wire.names import LOAD_STATE, SAVE_STATE


@dataclass(frozen=True, slots=True)
class SavedState:
    """The results of a library's `save_state`.

    Attributes
    ----------
    arguments : dict
        Of `load_state`; of a matrix, its id.
    records : list of Record
        The matrices, which no process has: free them.
    """

    library: str
    arguments: Body
    records: list[Record]


async def save_state(commands: Commands, library: str) -> SavedState:
    """Have the ranks save the state of a library. Raises as `Nodes.round`."""
    nodes = commands.nodes
    try:
        done = await _call(nodes, library, SAVE_STATE, {}, commands.next_id)
    except Failure:
        await nodes.round("discard", first=commands.next_id)
        raise
    records = commands.unlisted(done.matrices)
    left = iter(records)
    values = [
        {"matrix": next(left).id} if isinstance(value, dict) else value
        for value in done.value or []
    ]
    routines = commands.libraries[library]["routines"]
    wanted = next(fields for fields in routines if fields["name"] == LOAD_STATE)
    names = [parameter[0] for parameter in wanted["parameters"]]
    return SavedState(library, dict(zip(names, values, strict=True)), records)


async def load_state(nodes: Nodes, saved: SavedState, next_id: int) -> None:
    """Load it, on ranks that have its matrices. Raises as `Nodes.round`."""
    await _call(nodes, saved.library, LOAD_STATE, saved.arguments, next_id)


async def _call(nodes: Nodes, library: str, routine: str, arguments: Body, first: int) -> Any:
    return await nodes.round(
        "call", collective=True, library=library, routine=routine, arguments=arguments, first=first
    )


POLL_INTERVAL_S = 0.1
LEAST_S = 0.1  # of commands that have led to a matrix
FACTOR = 20.0  # ... and at least this multiple of the time that the last copies took
SMALL = 1 << 20  # 1 MiB
TOGETHER = 64 << 20  # 64 MiB, of one gang; also of one state


class KeptCopies:
    """The copies of one gang.

    Parameters
    ----------
    dispatcher : Dispatcher
    address : callable() -> GangAddress or None
        How to reach it; None while it has no ranks.
    """

    def __init__(self, dispatcher: Dispatcher, address: Callable[[], GangAddress | None]) -> None:
        self._dispatcher = dispatcher
        self._address = address
        self._cost_s = 0.0  # of the last copies of matrices
        self._state_costs_s: dict[str, float] = {}  # by library, of its last copy
        self._state_tried: dict[str, LoggedCommand] = {}  # what its last copy followed
        dispatcher.commands.own["keep_copies"] = self._copy

    async def run(self) -> None:
        """Keep copies until this task is cancelled."""
        log, seen = self._dispatcher.commands.log, 0
        while True:
            await asyncio.sleep(POLL_INTERVAL_S)
            if log.count == seen:
                continue  # an idle gang costs nothing
            seen = log.count
            if self._due() or self._due_states():
                with contextlib.suppress(Failure):
                    await self._dispatcher.submit({"op": "keep_copies"}, internal=True)

    def _due(self) -> list[Record]:
        due, nbytes = [], 0
        least_s = max(LEAST_S, FACTOR * self._cost_s)
        for record in self._dispatcher.commands.matrices.values():
            if record.made_by is None or record.nbytes > SMALL:
                continue
            nbytes += record.nbytes
            if nbytes <= TOGETHER and record.made_by.cost_s > least_s:
                due.append(record)
        return due

    def _due_states(self) -> list[str]:
        """Libraries; also one with a state that could not be rebuilt, because a call has failed."""
        due = []
        for library, state in self._dispatcher.commands.libraries.states().items():
            least_s = max(LEAST_S, FACTOR * self._state_costs_s.get(library, 0.0))
            command = state.made_by
            if command is None or command is self._state_tried.get(library):
                continue
            if command.cost_s > least_s or command.obstacle():
                due.append(library)
        return due

    async def _copy(self) -> None:
        """While no other command runs: fetch the matrices and states that are due."""
        address = self._address()
        if address is not None:
            begin = time.monotonic()
            if due := self._due():
                await self._copy_matrices(address, due)
                self._cost_s = time.monotonic() - begin
            for library in self._due_states():
                await self._copy_state(address, library)

    async def _copy_matrices(self, address: GangAddress, records: list[Record]) -> None:
        arrays = await in_thread(_fetched, address, [record.described() for record in records])
        for record, array in zip(records, arrays, strict=True):
            self._dispatcher.commands.log.copied(record, array)

    async def _copy_state(self, address: GangAddress, library: str) -> None:
        commands, begin = self._dispatcher.commands, time.monotonic()
        state = commands.libraries.state(library)
        if state is not None and state.made_by is not None:
            self._state_tried[library] = state.made_by
        saved = await save_state(commands, library)
        try:
            if sum(record.nbytes for record in saved.records) <= TOGETHER:
                await self._copy_matrices(address, saved.records)
                commands.log.state_kept(commands.libraries, library, saved.arguments, saved.records)
        finally:
            self._state_costs_s[library] = time.monotonic() - begin
            commands.nodes.unreferenced += [record.id for record in saved.records]


def _fetched(address: GangAddress, records: list[Body]) -> list[NDArray[Any]]:
    connection = GangConnection(address, Handle)
    try:
        return [fetch(connection, connection.handle(record)) for record in records]
    finally:
        connection.close()
