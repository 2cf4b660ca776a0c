"""The dispatcher: its table of commands; a command that fails does not hold up the next one."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

from alchemist_ray.runtime.commands import loaded_libraries
from alchemist_ray.runtime.commands.dispatcher import Dispatcher
from alchemist_ray.runtime.commands.handlers import Commands
from alchemist_ray.runtime.commands.jobs import Job, JobQueue
from alchemist_ray.runtime.commands.loaded_libraries import LoadedLibraries, stamp_of
from mpi_workers.failures import Failure
from mpi_workers.rank.commands import RankCommands
from mpi_workers.wire.commands import COMMANDS, Turn
from mpi_workers.wire.frames import Body


def test_a_command_that_meets_a_system_error_fails_alone() -> None:
    async def full() -> None:
        raise OSError(28, "No space left on device")

    async def well() -> None:
        pass

    async def both() -> None:
        dispatcher = Dispatcher(lambda _: False, lambda: None)
        with pytest.raises(Failure, match="No space left"):
            await asyncio.wait_for(dispatcher.submit({"op": "keep_copies"}, work=full), 1)
        body: Body = {"op": "resize", "matrices": {}}
        assert await asyncio.wait_for(dispatcher.submit(body, work=well), 1) == {}

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


@pytest.mark.parametrize(
    "op", ["keep_copies", "resize", *(op for op, command in COMMANDS.items() if command.internal)]
)
def test_operations_of_the_manager_are_refused_from_others(op: str) -> None:
    async def ask() -> None:
        dispatcher = Dispatcher(lambda _: False, lambda: None)
        await asyncio.wait_for(dispatcher.submit({"op": op, "matrices": [], "names": []}), 1)

    with pytest.raises(Failure, match=f"unknown command '{op}'"):
        asyncio.run(ask())


def test_matrices_that_are_made_wait_for_a_resize_which_waits_for_those_that_are_sent() -> None:
    async def well() -> None:
        """A resize."""

    sending = True
    queue = JobQueue(sending=lambda: sending)
    for job in (Job({"op": "create"}), Job({"op": "seal"}), Job({"op": "resize"}, work=well)):
        queue.add(job)
    order = [queue.next(), queue.next()]
    sending = False
    order += [queue.next(), queue.next(), queue.next()]
    assert [job and job.body["op"] for job in order] == ["seal", None, "resize", "create", None]
    assert len(queue) == 0


def test_a_resize_that_is_dropped_holds_up_no_other_matrix() -> None:
    async def well() -> None:
        """A resize."""

    queue = JobQueue(sending=lambda: True)
    resize = Job({"op": "resize"}, work=well)
    for job in (resize, Job({"op": "create"})):
        queue.add(job)
    assert queue.next() is None
    queue.remove(resize)
    assert [job.body["op"] for job in queue] == ["create"]
    assert queue.next() is not None


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
