"""Spare GroupManagers: the next session finds one, and none stays for ever."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import ray

from alchemist_ray import AlchemistSession
from alchemist_ray.runtime import manager_pool
from alchemist_ray.runtime.names import GROUP_PREFIX, NAMESPACE
from tests.support import traces

START_LIMIT_S = 30.0


def managers() -> set[str]:
    """The names of all GroupManagers of the cluster."""
    actors = ray.util.list_named_actors(all_namespaces=True)
    names = {actor["name"] for actor in actors if actor["namespace"] == NAMESPACE}
    return {name for name in names if name.startswith(GROUP_PREFIX)}


def wait_for(count: int) -> set[str]:
    """Wait until there is this number of managers, and return their names."""
    assert traces.wait_until(lambda: len(managers()) == count, START_LIMIT_S, 0.1) is not None, (
        managers()
    )
    return managers()


@pytest.fixture(autouse=True)
def no_spares(cluster: str) -> Iterator[None]:
    """Begin and end without spare managers of this process."""
    for _ in range(manager_pool.MOST_SPARES + 1):
        manager_pool.take().kill()
    wait_for(0)
    yield
    for _ in range(manager_pool.MOST_SPARES + 1):
        manager_pool.take().kill()


def test_a_second_session_beside_an_open_one_takes_a_manager_that_is_ready() -> None:
    with AlchemistSession(1) as first:
        there = wait_for(2)
        with AlchemistSession(1) as second:
            assert wait_for(3) > there  # both that were there, and the next spare
            assert second.list_workers()[0].pid != first.list_workers()[0].pid
        with AlchemistSession(1):
            assert len(managers()) == 3, "another spare was started beside one that is ready"


def test_an_unused_spare_manager_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manager_pool, "SPARE_KEPT_S", 3.0)
    with AlchemistSession(1) as als:
        wait_for(2)
        wait_for(1)
        assert als.list_workers(), "the manager of the session has ended instead"


def test_a_task_with_a_session_starts_no_spare_manager() -> None:
    @ray.remote(num_cpus=0)
    def work() -> int:
        with AlchemistSession(1) as als:
            als.list_workers()
            traces.wait_until(lambda: len(managers()) > 1, 2.0, 0.1)
            return len(managers())

    assert ray.get(work.remote()) == 1
