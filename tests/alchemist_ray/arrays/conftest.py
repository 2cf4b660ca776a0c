"""One gang of three ranks for all tests of this folder; they leave it intact."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from alchemist_ray import AlchemistSession
from alchemist_ray.attached.connection import GangConnection


@pytest.fixture(scope="package")
def gang(cluster: str) -> Iterator[AlchemistSession]:
    with AlchemistSession(3) as opened:
        opened.xp.ones((1, 1))  # brings the routines in
        yield opened


@pytest.fixture
def session(als: AlchemistSession) -> AlchemistSession:
    return als


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The routines of all calls."""
    found: list[str] = []
    request = GangConnection.request

    def counted(self: GangConnection, body: Any, *args: Any, **kwargs: Any) -> Any:
        found.append(body.get("routine", body["op"]))
        return request(self, body, *args, **kwargs)

    monkeypatch.setattr(GangConnection, "request", counted)
    return found
