"""A gang of 3 that the tests of a file share; they leave it intact."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from alchemist_ray import AlchemistSession


@pytest.fixture(scope="module")
def gang(cluster: str) -> Iterator[AlchemistSession]:
    """One session for all tests of a file."""
    with AlchemistSession(3) as opened:
        yield opened


@pytest.fixture
def als(gang: AlchemistSession) -> Iterator[AlchemistSession]:
    """The same gang without matrices; after the test it must still work."""
    yield gang
    for handle in gang.list_matrices():
        handle.free()
    assert gang.run(lambda comm: comm.allreduce(1)) == len(gang.list_workers())
