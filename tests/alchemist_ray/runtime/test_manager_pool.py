"""Spare GroupManagers: the next session finds one, and none stays for ever."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import pytest
import ray

from alchemist_ray import AlchemistSession
from alchemist_ray.runtime import manager_pool
from alchemist_ray.runtime.names import GROUP_PREFIX, NAMESPACE, group_name
from tests.support import traces

START_LIMIT_S = 30.0


def managers() -> set[str]:
    """The names of all GroupManagers of the cluster."""
    actors = ray.util.list_named_actors(all_namespaces=True)
    names = {actor["name"] for actor in actors if actor["namespace"] == NAMESPACE}
    return {name for name in names if name.startswith(GROUP_PREFIX)}


def without_spares() -> set[str]:
    """End the spare managers of this process; the names of those of open sessions."""
    ended = set()
    for _ in range(manager_pool.MOST_SPARES + 1):
        manager = manager_pool.take()
        ended.add(group_name(manager.gang))
        manager.kill()
    assert traces.wait_until(lambda: not ended & managers(), START_LIMIT_S, 0.1) is not None
    return managers()


@pytest.fixture
def wait_for(cluster: str) -> Iterator[Callable[[int], set[str]]]:
    """Wait until there is a number of managers that other tests have not; their names."""
    others = without_spares()

    def wait(count: int) -> set[str]:
        def there() -> bool:
            return len(managers() - others) == count

        assert traces.wait_until(there, START_LIMIT_S, 0.1) is not None, managers() - others
        return managers() - others

    yield wait
    without_spares()


def test_a_second_session_beside_an_open_one_takes_a_manager_that_is_ready(
    wait_for: Callable[[int], set[str]],
) -> None:
    with AlchemistSession(1) as first:
        there = wait_for(2)
        with AlchemistSession(1) as second:
            assert wait_for(3) > there  # both that were there, and the next spare
            assert second.list_workers()[0].pid != first.list_workers()[0].pid
        with AlchemistSession(1):
            time.sleep(1.0)
            wait_for(3)  # no other spare is started beside one that is ready


def test_an_unused_spare_manager_ends(
    wait_for: Callable[[int], set[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(manager_pool, "SPARE_KEPT_S", 3.0)
    with AlchemistSession(1) as als:
        wait_for(2)
        wait_for(1)
        assert als.list_workers(), "the manager of the session has ended instead"


def test_a_task_with_a_session_starts_no_spare_manager(
    wait_for: Callable[[int], set[str]],
) -> None:
    before = managers()

    @ray.remote(num_cpus=0)
    def work() -> int:
        with AlchemistSession(1) as als:
            als.list_workers()
            traces.wait_until(lambda: len(managers() - before) > 1, 2.0, 0.1)
            return len(managers() - before)

    assert ray.get(work.remote()) == 1
