"""The dispatcher: its table of commands; a command that fails does not hold up the next one."""

from __future__ import annotations

import asyncio

import pytest

from alchemist_ray.runtime.commands.dispatcher import Dispatcher, JobQueue
from alchemist_ray.runtime.commands.handlers import Commands
from alchemist_ray.runtime.commands.jobs import Job
from mpi_workers.failures import Failure
from mpi_workers.rank.commands import RankCommands
from mpi_workers.wire.commands import COMMANDS, Turn


def test_a_command_that_meets_a_system_error_fails_alone() -> None:
    async def full() -> None:
        raise OSError(28, "No space left on device")

    async def well() -> None:
        pass

    async def both() -> None:
        dispatcher = Dispatcher(lambda _: False, lambda: None)
        dispatcher.commands.own |= {"keep_copies": full, "resize": well}
        with pytest.raises(Failure, match="No space left"):
            await asyncio.wait_for(dispatcher.submit({"op": "keep_copies"}, internal=True), 1)
        body = {"op": "resize", "matrices": {}}
        assert await asyncio.wait_for(dispatcher.submit(body, internal=True), 1) == {}

    asyncio.run(both())


@pytest.mark.parametrize("op", COMMANDS)
def test_every_command_has_its_handlers(op: str) -> None:
    command = COMMANDS[op]
    if command.turn is Turn.CONNECTION:
        assert callable(getattr(Dispatcher, f"_{op}"))
    elif not command.internal:
        assert callable(getattr(Commands, op))
    if command.ranks is not None:
        assert callable(getattr(RankCommands, op))


@pytest.mark.parametrize("op", [op for op, command in COMMANDS.items() if command.internal])
def test_operations_of_the_manager_are_refused_from_others(op: str) -> None:
    async def ask() -> None:
        dispatcher = Dispatcher(lambda _: False, lambda: None)
        await asyncio.wait_for(dispatcher.submit({"op": op, "matrices": [], "names": []}), 1)

    with pytest.raises(Failure, match=f"unknown command '{op}'"):
        asyncio.run(ask())


def test_a_resize_whose_sender_is_gone_holds_up_no_other_matrix() -> None:
    queue = JobQueue(sending=lambda: False)
    queue.add(Job({"op": "resize", "matrices": []}), "gone")
    queue.add(Job({"op": "create"}), "here")
    queue.drop("gone")
    assert len(queue) == 1
    job = queue.next()
    assert job is not None
    assert job.body == {"op": "create"}
