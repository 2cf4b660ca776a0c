"""The dispatcher: a command that fails does not hold up the next one."""

from __future__ import annotations

import asyncio

import pytest

from alchemist_ray.runtime.dispatcher import Dispatcher
from mpi_workers.failures import Failure


def test_a_command_that_meets_a_system_error_fails_alone() -> None:
    async def full() -> None:
        raise OSError(28, "No space left on device")

    async def well() -> None:
        pass

    async def both() -> None:
        dispatcher = Dispatcher(lambda _: False, lambda: None)
        dispatcher.commands.own |= {"keep_copies": full, "resize": well}
        with pytest.raises(Failure, match="No space left"):
            await asyncio.wait_for(dispatcher.submit({"op": "keep_copies"}), 1)
        body = {"op": "resize", "matrices": {}}
        assert await asyncio.wait_for(dispatcher.submit(body), 1) == {}

    asyncio.run(both())
