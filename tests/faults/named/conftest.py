"""Fixtures of named gangs. This folder is collected first: no gangs of other tests exist yet."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import numpy as np
import pytest
import ray

from alchemist_ray import AlchemistSession
from alchemist_ray.cluster.driver import find_driver
from alchemist_ray.errors import SessionError
from tests.faults.conftest import assert_clean, left
from tests.faults.named.named_gangs import END_LIMIT_S, gangs, managers
from tests.support import traces


@pytest.fixture
def nothing_of_it_left(cluster: str) -> Iterator[None]:
    """After a test no process, file, reservation or manager of its gangs is left."""
    ray.get(find_driver().prewarm.remote())
    before, kept, others = left(), managers(), set(gangs())
    yield
    for name in set(gangs()) - others:
        with contextlib.suppress(SessionError):  # it has just ended
            AlchemistSession.stop_gang(name)

    def clean() -> bool:  # but for the manager that the process keeps for its next sessions
        return set(gangs()) <= others and len(managers() - kept) <= 1

    assert traces.wait_until(clean, END_LIMIT_S) is not None, managers()
    assert_clean(before)


@pytest.fixture
def climate(nothing_of_it_left: None) -> Iterator[AlchemistSession]:
    """A detached gang with a matrix and a library, and the session that has started it."""
    with AlchemistSession(2, name="climate", lifetime="detached") as session:
        session.send_matrix(np.arange(12.0).reshape(4, 3), name="A")
        session.load_library("linalg")
        yield session
