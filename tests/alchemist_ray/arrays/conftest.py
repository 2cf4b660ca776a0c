"""One gang of three ranks for all tests of this folder; they leave it intact."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from alchemist_ray import AlchemistSession


@pytest.fixture(scope="package")
def gang(cluster: str) -> Iterator[AlchemistSession]:
    with AlchemistSession(3) as opened:
        opened.xp.ones((1, 1))  # brings the routines in
        yield opened


@pytest.fixture
def session(als: AlchemistSession) -> AlchemistSession:
    return als
