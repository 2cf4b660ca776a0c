"""The dispatcher: its table of commands; a command that fails does not hold up the next one."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest

from alchemist_ray.background import unless
from alchemist_ray.runtime.commands import dispatcher, loaded_libraries
from alchemist_ray.runtime.commands.call_store import CallStore
from alchemist_ray.runtime.commands.dispatcher import Dispatcher
from alchemist_ray.runtime.commands.handlers import Commands
from alchemist_ray.runtime.commands.jobs import HELD_S, Job, JobQueue
from alchemist_ray.runtime.commands.loaded_libraries import LoadedLibraries, stamp_of
from alchemist_ray.runtime.commands.matrix_records import Record
from mpi_workers.failures import Failure
from mpi_workers.protocol.commands import COMMANDS, Turn
from mpi_workers.rank.commands import RankCommands
from tests.alchemist_ray.runtime.owners import Owner


def test_a_command_that_meets_a_system_error_fails_alone() -> None:
    async def full() -> None:
        raise OSError(28, "No space left on device")

    async def both() -> None:
        gang = Dispatcher(Owner())
        with pytest.raises(Failure, match="No space left"):
            await asyncio.wait_for(gang.submit({"op": "keep_copies"}, work=full), 1)
        assert await asyncio.wait_for(gang.submit({"op": "keep_copies"}, work=well), 1) == {}

    asyncio.run(both())


@pytest.mark.parametrize("op", COMMANDS)
def test_every_command_has_its_handlers(op: str) -> None:
    command = COMMANDS[op]
    if command.turn is Turn.CONNECTION:
        assert callable(getattr(Dispatcher, f"_{op}"))
    elif command.turn is Turn.STORE:
        assert callable(getattr(CallStore, op))
    elif not command.internal:
        assert callable(getattr(Commands, op))
    if command.ranks is not None:
        assert callable(getattr(RankCommands, op))


@pytest.mark.parametrize("op", [op for op, command in COMMANDS.items() if command.internal])
def test_operations_of_the_manager_are_refused_from_others(op: str) -> None:
    async def ask() -> None:
        gang = Dispatcher(Owner())
        await asyncio.wait_for(gang.submit({"op": op, "matrices": [], "names": []}), 1)

    with pytest.raises(Failure, match=f"unknown command '{op}'"):
        asyncio.run(ask())


async def well() -> None:
    """Work that succeeds."""


async def turn(gang: Dispatcher) -> None:
    """The turn of a resize that has nothing to move."""
    async with gang.resize_turn():
        pass


def ops(*jobs: Job | None) -> list[Any]:
    return [job and job.body["op"] for job in jobs]


def test_matrices_that_are_made_wait_for_a_resize_which_waits_for_those_that_are_sent() -> None:
    sending = {"ben"}
    queue = JobQueue(lambda holder: bool(sending) if holder is None else holder in sending)
    first = Job({"op": "create"}, "carl"), Job({"op": "seal"}, "ben")
    for job in (*first, Job({"op": "resize"}, work=well)):
        queue.add(job)
    assert ops(queue.next(), queue.next()) == ["seal", None]
    queue.add(Job({"op": "create"}, "ben"))  # a stream that needs another matrix goes on
    assert ops(queue.next(), queue.next()) == ["create", None]
    sending.clear()
    assert ops(queue.next(), queue.next(), queue.next()) == ["resize", "create", None]
    assert len(queue) == 0


def test_a_resize_holds_up_no_matrix_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    queue = JobQueue(lambda holder: holder is None)
    resize = Job({"op": "resize"}, work=well)
    for job in (resize, Job({"op": "create"})):
        queue.add(job)
    assert queue.next() is None
    resize.since -= HELD_S
    assert ops(queue.next()) == ["create"]
    assert list(queue) == [resize]


def test_a_resize_is_given_up_when_a_matrix_does_not_arrive(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def resize() -> None:
        gang = Dispatcher(Owner())
        matrix = Record(1, "endless", (2, 2), "float64", "VC_STAR", sealed=False)
        gang.commands.matrices[1] = matrix
        assert gang.idle_s == 0.0
        with pytest.raises(Failure, match="endless did not arrive in"):
            await asyncio.wait_for(turn(gang), 5)

    monkeypatch.setattr(dispatcher, "SENDING_LIMIT_S", 0.1)
    asyncio.run(resize())


async def in_order(*steps: str) -> list[str]:
    """Commands of a gang whose resize does `steps` in its turn, in the order of their ends."""
    gang = Dispatcher(Owner())
    found = []

    async def resize() -> None:
        async with gang.resize_turn():
            for step in steps:
                await asyncio.sleep(0.05)
                found.append(step)
                if step == "fail":
                    raise OSError("no room")

    resizing = asyncio.create_task(resize())
    await asyncio.sleep(0.02)
    command = asyncio.create_task(gang.submit({"op": "keep_copies"}, work=well))
    if "stop" in steps:
        resizing.cancel()
    await asyncio.wait_for(command, 5)
    found.append("command")
    await asyncio.wait({resizing})
    return found


@pytest.mark.parametrize(
    ("steps", "ended"),
    [
        (("move", "use"), ["move", "use", "command"]),
        (("move", "fail"), ["move", "fail", "command"]),
        (("stop",), ["command"]),
    ],
)
def test_no_command_runs_in_the_turn_of_a_resize(steps: tuple[str, ...], ended: list[str]) -> None:
    assert asyncio.run(in_order(*steps)) == ended


def test_a_cancellation_of_all_calls_reaches_a_resize_in_its_turn() -> None:
    async def cancel() -> None:
        gang = Dispatcher(Owner())
        async with gang.resize_turn() as cancelled:
            assert gang.cancel_calls() == 1
            with pytest.raises(Failure, match="the call was cancelled"):
                await unless(asyncio.sleep(5), cancelled)
        await asyncio.wait_for(gang.submit({"op": "keep_copies"}, work=well), 5)

    asyncio.run(asyncio.wait_for(cancel(), 20))


def test_a_resize_that_is_stopped_before_its_turn_is_forgotten() -> None:
    async def stop() -> None:
        gang = Dispatcher(Owner())
        running = asyncio.create_task(
            gang.submit({"op": "keep_copies"}, work=lambda: asyncio.sleep(0.2))
        )
        await asyncio.sleep(0.02)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(turn(gang), 0.05)
        assert not list(gang._queue)
        await asyncio.wait_for(running, 5)

    asyncio.run(stop())


def test_a_resize_that_waits_for_a_call_is_not_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    async def call() -> None:
        await asyncio.sleep(0.5)

    async def both() -> None:
        gang = Dispatcher(Owner())
        running = asyncio.create_task(gang.submit({"op": "keep_copies"}, work=call))
        await asyncio.sleep(0.05)
        await asyncio.wait_for(turn(gang), 5)
        await running

    monkeypatch.setattr(dispatcher, "SENDING_LIMIT_S", 0.1)
    asyncio.run(both())


def test_a_library_whose_file_cannot_be_read_in_time_has_not_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a slow file system it was loaded again, and lost its state."""
    file, digest = tmp_path / "mine.py", loaded_libraries._digest
    file.write_text("state = 1")

    def slow(path: str) -> str:
        time.sleep(0.2)
        return digest(path)

    async def load_again() -> list[bool]:
        libraries = LoadedLibraries(lambda holders: [])
        stamp = await stamp_of(str(file))
        libraries.add("mine", stamp, {"name": "mine", "routines": []}, "ben")
        monkeypatch.setattr(loaded_libraries, "_digest", slow)
        monkeypatch.setattr(loaded_libraries, "STAT_LIMIT_S", 0.05)
        found = [await stamp_of(str(file))]
        monkeypatch.setattr(loaded_libraries, "STAT_LIMIT_S", 10.0)
        file.write_text("state = 2")
        found.append(await stamp_of(str(file)))
        file.unlink()
        found.append(await stamp_of(str(file)))
        return [
            libraries.in_use("mine", stamp, "ben", replace=False) is not None for stamp in found
        ]

    assert asyncio.run(load_again()) == [True, False, False]
