"""The states of a gang."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import RayError

from alchemist_ray.attached.options import GangOptions
from alchemist_ray.attached.states import GangState
from alchemist_ray.errors import GroupError, GroupFailedError, LaunchError, SessionError
from alchemist_ray.runtime import gang as gang_module
from alchemist_ray.runtime.commands.dispatcher import Dispatcher
from alchemist_ray.runtime.gang_slot import GangSlot
from alchemist_ray.runtime.group_manager import GroupManager
from alchemist_ray.runtime.launch.gang_request import GangRequest
from alchemist_ray.runtime.launch.incarnation import POLL_INTERVAL_S, Incarnation
from mpi_workers.node.specs import GangPlan, NodePlan
from tests.alchemist_ray.runtime.owners import Owner


def request(**options: Any) -> GangRequest:
    return GangRequest(GangOptions(2, **options), 2, "s0", "ben@host", {})


def test_a_loss_with_the_last_ready_rank_is_a_failed_start(
    cluster: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ranks check in and are lost in one turn of the event loop, which no real gang repeats."""

    async def start(incarnation: Incarnation, *_: Any) -> Any:
        incarnation.nodes.fail(GroupFailedError("rank 1 was killed by SIGKILL"))
        return SimpleNamespace(hosts=("here",))

    monkeypatch.setattr(Incarnation, "start", start)

    async def launch() -> None:
        slot = GangSlot("g0", "g0")
        with pytest.raises(LaunchError, match="rank 1 was killed by SIGKILL"):
            await asyncio.wait_for(slot.launch(request(max_failures=2)), 10)
        assert slot.gang is None

    asyncio.run(launch())


def test_a_launch_without_a_driver_leaves_no_gang(
    cluster: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The gang stayed in STARTING, and whatever waited for its end waited for ever."""

    def lost(gang: str) -> Any:
        raise RayError("the head is gone")

    monkeypatch.setattr(gang_module, "find_driver", lost)

    async def launch() -> None:
        manager = GroupManager()
        with pytest.raises(RayError, match="the head is gone"):
            await asyncio.wait_for(manager.ask("g0", "launch", request()), 10)
        assert await asyncio.wait_for(manager.gangs(), 5) == []
        await asyncio.wait_for(manager.ask("g0", "kill", "it hangs"), 5)
        await asyncio.wait_for(manager.forget("g0"), 5)

    asyncio.run(launch())


def test_the_end_of_a_gang_does_not_need_its_caller(
    cluster: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cancelled call left the gang in ENDING."""

    async def start(incarnation: Incarnation, *_: Any) -> Any:
        return SimpleNamespace(hosts=("here",), size=2, addresses=())

    async def shutdown(incarnation: Incarnation) -> None:
        await asyncio.sleep(0.3)

    monkeypatch.setattr(Incarnation, "start", start)
    monkeypatch.setattr(Incarnation, "shutdown", shutdown)

    async def end() -> None:
        slot = GangSlot("g0", "g0")
        await asyncio.wait_for(slot.launch(request()), 10)
        gang = slot.gang
        assert gang is not None
        ending = asyncio.create_task(gang.end())
        await asyncio.sleep(0.05)
        assert gang.state is GangState.ENDING
        ending.cancel()
        await asyncio.wait_for(gang._life.leaves(GangState.ENDING), 5)
        assert slot.gang is None

    asyncio.run(end())


def test_a_slot_starts_a_gang_of_a_later_epoch_where_one_has_ended(
    cluster: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def start(incarnation: Incarnation, *_: Any) -> Any:
        return SimpleNamespace(hosts=("here",), size=2, addresses=(), epoch=incarnation.epoch)

    monkeypatch.setattr(Incarnation, "start", start)

    async def gangs() -> None:
        manager = GroupManager()
        first = await manager.ask("g0", "launch", request())
        with pytest.raises(GroupError, match="gang g0 has workers"):
            await manager.ask("g0", "launch", request())
        await manager.ask("g0", "end")
        with pytest.raises(SessionError, match="gang g0 has no workers"):
            await manager.ask("g0", "gang_address")
        assert await manager.ask("g0", "cancel") == 0
        second = await manager.ask("g0", "launch", request())
        assert (first.epoch, second.epoch) == (1, 2)
        with pytest.raises(GroupFailedError, match="has started another one"):
            await manager.ask("g0", "command", first.epoch, {"op": "ping"})
        await manager.forget("g0")

    asyncio.run(asyncio.wait_for(gangs(), 30))


def test_a_start_does_not_wait_for_an_agent_that_does_not_answer() -> None:
    """It was asked once whether a slow proxy lives, and had all the time of the start to answer."""

    async def start() -> float:
        dispatcher = Dispatcher(Owner())
        incarnation = Incarnation("g0", "g0.1", 1, request(), dispatcher, None)
        incarnation.nodes = nodes = dispatcher.new_nodes(1, 1)
        loop = asyncio.get_running_loop()
        hung = SimpleNamespace(remote=lambda gang: loop.create_future())
        incarnation.agents = [SimpleNamespace(why_ended=hung)]
        plan = GangPlan("g0.1", (NodePlan("10.0.0.1", 1),), "token", (), 0)
        loop.call_later(POLL_INTERVAL_S + 0.2, nodes.ready.set_result, None)
        begun = loop.time()
        await asyncio.wait_for(incarnation._checked_in(plan), 20)
        assert incarnation.stage.endswith("ranks on 10.0.0.1 have not checked in")
        return loop.time() - begun

    assert asyncio.run(start()) < 2 * POLL_INTERVAL_S + 1


def test_a_watch_that_fails_is_reported(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail() -> None:
        raise OSError("no room")

    async def watch() -> None:
        gang = gang_module.Gang("g0", "g0", request(), 1, print)
        await asyncio.wait([gang._watch(fail())])

    monkeypatch.setattr(gang_module, "find_driver", lambda gang: None)
    asyncio.run(watch())
    assert "no room" in caplog.text
