"""Checkpoints that a gang writes by itself, when repeating its commands would cost more."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable

from alchemist_ray.arrays.handle import Handle
from alchemist_ray.errors import GroupFailedError, GroupRecoveredError
from alchemist_ray.gang.address import GangAddress
from alchemist_ray.gang.connection import GangConnection
from alchemist_ray.io.checkpoints import write_checkpoint
from alchemist_ray.runtime.commands.handlers import Commands
from alchemist_ray.runtime.launch.gang_cpus import in_thread

POLL_INTERVAL_S = 1.0
LEAST_S = 10.0  # of commands: less is repeated
FACTOR = 2.0  # commands since the last checkpoint must have taken this multiple of its writing time
FIRST_RATE = 200e6  # bytes/s, until it has been measured


class AutomaticCheckpoints:
    """Writes checkpoints of one gang.

    A checkpoint is due when the commands since the last one have taken longer than `LEAST_S`, and
    `FACTOR` times as long as writing all matrices takes at the rate of the last checkpoint.

    Parameters
    ----------
    commands : Commands
        Its matrices and its log.
    address : callable() -> GangAddress or None
        How to reach it; None while it has no ranks.
    folder : str
    """

    def __init__(
        self, commands: Commands, address: Callable[[], GangAddress | None], folder: str
    ) -> None:
        self._commands = commands
        self._address = address
        self._folder = folder
        self._rate = FIRST_RATE
        self._not_before_s = 0.0  # of commands, after a checkpoint that failed

    async def run(self) -> None:
        """Write them until this task is cancelled."""
        while True:
            await asyncio.sleep(POLL_INTERVAL_S)
            address, spent_s = self._address(), self._commands.log.seconds
            nbytes = sum(record.nbytes for record in self._commands.matrices.values())
            due_s = max(LEAST_S, FACTOR * nbytes / self._rate, self._not_before_s)
            if address is None or spent_s < due_s:
                continue
            begin = time.monotonic()
            try:
                await in_thread(self._write, address)
            except (GroupFailedError, GroupRecoveredError):
                continue
            except Exception as error:  # such as OSError: the next one may succeed
                self._not_before_s = 2 * spent_s
                sys.stderr.write(
                    f"no checkpoint could be written to {self._folder}: {error}. The last one and "
                    "the log of commands are kept\n"
                )
                continue
            self._rate = max(1.0, nbytes / (time.monotonic() - begin))
            self._not_before_s = 0.0

    def _write(self, address: GangAddress) -> None:
        connection = GangConnection(address, Handle)
        try:
            write_checkpoint(connection, self._folder, cut_log=True)
        finally:
            connection.close()
