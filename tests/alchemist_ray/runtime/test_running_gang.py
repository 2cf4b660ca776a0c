"""A gang whose ranks are lost at the very end of its start: the start fails, and says why."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from alchemist_ray.errors import GroupFailedError, LaunchError
from alchemist_ray.gang.options import GangOptions
from alchemist_ray.runtime.launch.gang_request import GangRequest
from alchemist_ray.runtime.launch.incarnation import Incarnation
from alchemist_ray.runtime.running_gang import RunningGang


def test_a_loss_with_the_last_ready_rank_is_a_failed_start(
    cluster: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ranks check in and are lost in one turn of the event loop, which no real gang repeats."""

    async def start(incarnation: Incarnation, *_: Any) -> Any:
        incarnation.nodes.fail(GroupFailedError("rank 1 was killed by SIGKILL"))
        return SimpleNamespace(hosts=("here",))

    monkeypatch.setattr(Incarnation, "start", start)

    async def launch() -> None:
        request = GangRequest(GangOptions(2, max_failures=2), 2, "s0", "ben@host", {})
        gang = RunningGang("g0", "g0", 1, request, lambda: None)
        with pytest.raises(LaunchError, match="rank 1 was killed by SIGKILL"):
            await asyncio.wait_for(gang.start(), 10)
        assert gang.state != "ready"

    asyncio.run(launch())
