"""The Driver gives the CPUs of gangs back."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import ActorUnavailableError, RayActorError, RaySystemError

from alchemist_ray.cluster import driver
from alchemist_ray.cluster.driver import Driver


@pytest.mark.parametrize("end", [None, RayActorError(), ValueError("no such actor")])
def test_a_reservation_is_removed_at_the_end_whatever_calls_raise_before(
    monkeypatch: pytest.MonkeyPatch, end: Exception | None
) -> None:
    events: list[Any] = []
    answers = [RaySystemError("client"), ActorUnavailableError("soon", None), end]

    async def holding() -> None:
        events.append("asked")
        if (error := answers.pop(0)) is not None:
            raise error

    gang = SimpleNamespace(holding=lambda run: holding())
    monkeypatch.setattr(driver, "find_gang", lambda name: gang)
    monkeypatch.setattr(driver, "remove_placement_group", events.append)
    monkeypatch.setattr(driver, "UNAVAILABLE_S", 0.01)

    async def watch() -> Driver:
        watching = Driver("edition", None)
        watching._guard("g", "g.1", "CPUs")  # type: ignore[arg-type]
        await asyncio.wait_for(asyncio.gather(*watching._watches), 5)
        return watching

    assert not asyncio.run(watch())._reservations
    assert events == ["asked"] * 3 + ["CPUs"]
