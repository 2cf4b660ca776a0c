"""Copies of small matrices in the GroupManager: they cut the log of an iteration.

A vector that thousands of commands have led to would be rebuilt by all of them. Once these have
taken more than `LEAST_S`, the GroupManager fetches the vector, to send its copy after a failure.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any

from numpy.typing import NDArray

from alchemist_ray.arrays.handle import Handle
from alchemist_ray.gang.address import GangAddress
from alchemist_ray.gang.connection import GangConnection
from alchemist_ray.runtime.dispatcher import Dispatcher
from alchemist_ray.runtime.gang_cpus import in_thread
from alchemist_ray.runtime.matrix_records import Record
from alchemist_ray.transfer.fetching import fetch
from mpi_workers.failures import Failure
from mpi_workers.wire.frames import Body

POLL_INTERVAL_S = 0.5
LEAST_S = 0.5  # of commands that have led to a matrix
SMALL = 1 << 20  # 1 MiB
TOGETHER = 64 << 20  # 64 MiB, of one gang


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
        dispatcher.commands.own["keep_copies"] = self._copy

    async def run(self) -> None:
        """Keep copies until this task is cancelled."""
        while True:
            await asyncio.sleep(POLL_INTERVAL_S)
            if self._due():
                with contextlib.suppress(Failure):
                    await self._dispatcher.submit({"op": "keep_copies"})

    def _due(self) -> list[Record]:
        due, nbytes = [], 0
        for record in self._dispatcher.commands.matrices.values():
            if record.made_by is None or record.nbytes > SMALL:
                continue
            nbytes += record.nbytes
            if nbytes <= TOGETHER and record.made_by.cost_s > LEAST_S:
                due.append(record)
        return due

    async def _copy(self) -> None:
        """While no other command runs: fetch the matrices that are due."""
        address = self._address()
        if address is not None:
            due = self._due()
            arrays = await in_thread(_fetched, address, [record.described() for record in due])
            for record, array in zip(due, arrays, strict=True):
                self._dispatcher.commands.log.copied(record, array)


def _fetched(address: GangAddress, records: list[Body]) -> list[NDArray[Any]]:
    connection = GangConnection(address, Handle)
    try:
        return [fetch(connection, connection.handle(record)) for record in records]
    finally:
        connection.close()
