"""Copies of matrices and states that a gang makes by itself, so that it repeats few commands.

- In the GroupManager: small matrices and states of libraries. A vector that thousands of commands
  have led to would be rebuilt by all of them. Once these have taken more than `COPY_LEAST_S`, or
  cannot be repeated, the vector is fetched, to be sent again after a failure. So is the state of a
  library.
- Beside the gang's checkpoint folder, which only its users write: all matrices, when the commands
  since the last checkpoint have taken more than `CHECKPOINT_LEAST_S`, and `CHECKPOINT_FACTOR` times
  as long as writing takes.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from collections.abc import Callable
from typing import Any

from numpy.typing import NDArray

from alchemist_ray.arrays.handle import Handle
from alchemist_ray.attached.address import GangAddress
from alchemist_ray.attached.connection import GangConnection
from alchemist_ray.attached.matrix_ref import ref_of
from alchemist_ray.background import in_pool
from alchemist_ray.runtime.commands.dispatcher import Dispatcher
from alchemist_ray.runtime.commands.matrix_records import LoggedCommand, Record
from alchemist_ray.runtime.commands.saved_states import save_state
from alchemist_ray.transfer.fetching import fetch
from mpi_workers.failures import Failure
from mpi_workers.protocol.files import AUTOMATIC
from mpi_workers.wire.frames import Body

COPY_INTERVAL_S = 0.1
COPY_LEAST_S = 0.1  # of commands that have led to a matrix
COPY_FACTOR = 20.0  # ... and at least this multiple of the time that the last copies took
COPIED_NBYTES = 1 << 20  # 1 MiB
TOGETHER = 64 << 20  # 64 MiB, of one gang; also of one state
CHECKPOINT_INTERVAL_S = 1.0
CHECKPOINT_LEAST_S = 10.0  # of commands: less is repeated
CHECKPOINT_FACTOR = 4.0
FIRST_RATE = 200e6  # bytes/s, until it has been measured


class Snapshots:
    """The copies and checkpoints of one gang.

    Parameters
    ----------
    dispatcher : Dispatcher
    address : callable() -> GangAddress or None
        How to reach it; None while it has no ranks.
    """

    def __init__(self, dispatcher: Dispatcher, address: Callable[[], GangAddress | None]) -> None:
        self._dispatcher = dispatcher
        self._commands = dispatcher.commands
        self._address = address
        self._cost_s = 0.0  # of the last copies of matrices
        self._state_costs_s: dict[str, float] = {}  # by library, of its last copy
        self._state_tried: dict[str, LoggedCommand] = {}  # what its last copy followed

    # --- copies ---

    async def keep_copies(self) -> None:
        """Keep copies until this task is cancelled."""
        log = self._commands.log
        seen = 0
        while True:
            await asyncio.sleep(COPY_INTERVAL_S)
            if log.count == seen:
                continue  # an idle gang costs nothing
            seen = log.count
            if self._due() or self._due_states():
                with contextlib.suppress(Failure):
                    await self._dispatcher.submit({"op": "keep_copies"}, work=self._copy)

    def _due(self) -> list[Record]:
        due = dict[int, Record]()
        nbytes = 0
        least_s = max(COPY_LEAST_S, COPY_FACTOR * self._cost_s)
        for record in self._commands.matrices.values():
            if (
                record.made_by is None
                or record.nbytes > COPIED_NBYTES
                or due.keys() & record.aliases
            ):
                continue
            nbytes += record.nbytes
            made_by = record.made_by
            if nbytes <= TOGETHER and (made_by.cost_s > least_s or made_by.obstacle()):
                due[record.id] = record
        return list(due.values())

    def _due_states(self) -> list[str]:
        """Libraries; also one with a state that could not be rebuilt, because a call has failed."""
        due = []
        for library, state in self._commands.libraries.states().items():
            least_s = max(COPY_LEAST_S, COPY_FACTOR * self._state_costs_s.get(library, 0.0))
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
        arrays = await in_pool(_fetched, address, [record.described() for record in records])
        found = dict(zip(records, arrays, strict=True))
        together = [r for record in records for r in (record, *self._commands.sharing(record))]
        self._commands.cut(
            together, lambda record: self._commands.log.copied(record, found[record])
        )

    async def _copy_state(self, address: GangAddress, library: str) -> None:
        commands = self._commands
        begin = time.monotonic()
        state = commands.libraries.state(library)
        if state is not None and state.made_by is not None:
            self._state_tried[library] = state.made_by
        saved = await save_state(commands, library)
        try:
            if sum(record.nbytes for record in saved.records) <= TOGETHER:
                await self._copy_matrices(address, saved.records)
                commands.keep_state(library, saved.arguments, saved.records)
        finally:
            self._state_costs_s[library] = time.monotonic() - begin
            commands.dead.add(record.id for record in saved.records)

    # --- checkpoints ---

    async def write_checkpoints(self, folder: str) -> None:
        """Write checkpoints until this task is cancelled."""
        rate, not_before_s = FIRST_RATE, 0.0  # of commands, after a checkpoint that failed
        while True:
            await asyncio.sleep(CHECKPOINT_INTERVAL_S)
            address = self._address()
            spent_s = self._commands.log.seconds
            nbytes = self._commands.nbytes
            due_s = max(CHECKPOINT_LEAST_S, CHECKPOINT_FACTOR * nbytes / rate, not_before_s)
            if address is None or spent_s < due_s:
                continue
            body = {"op": "checkpoint", "path": folder + AUTOMATIC, "cut": True}
            try:
                done = await self._dispatcher.submit(body)
            except Failure as failure:  # the next one may succeed
                not_before_s = 2 * spent_s
                if failure.kind != "GroupRecoveredError":
                    sys.stderr.write(
                        f"no checkpoint could be written to {body['path']}: {failure.message}. The "
                        "last one and the log of commands are kept\n"
                    )
                continue
            rate = max(1.0, nbytes / max(done["seconds"], 1e-3))
            not_before_s = 0.0


def _fetched(address: GangAddress, records: list[Body]) -> list[NDArray[Any]]:
    with contextlib.closing(GangConnection(address, Handle)) as connection:
        refs = [ref_of(connection.handle(record)) for record in records]
        return [fetch(connection, ref) for ref in refs if ref is not None]
