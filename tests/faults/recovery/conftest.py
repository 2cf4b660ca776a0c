"""A gang that is started again when its node is lost, and what tests need to kill its parts."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray

from alchemist_ray import AlchemistSession, Handle
from alchemist_ray.cluster.driver import find_driver
from mpi_workers.node.processes import descendants
from tests.alchemist_ray.session.test_alchemist_session import free_cpus
from tests.faults.conftest import assert_clean, left
from tests.support import traces

LIBRARY = Path(__file__).with_name("counting.py")
X = np.random.default_rng(0).random((300, 40))  # more than a handle remembers
LARGE = np.random.default_rng(3).random((1000, 200))  # more than is kept without being asked for
UNDER_WAY_S = 10.0  # until the new ranks load a library, on a loaded machine
BACK_LIMIT_S = 10.0  # from the loss of a rank of a small gang until it answers, on a loaded machine


class Recovering:
    """A session whose gang is started again."""

    def __init__(self, workers: int = 2, max_failures: int = 5, **options: Any) -> None:
        self.als = AlchemistSession(workers, max_failures=max_failures, **options)
        self._first = self.als.connection.address.epoch

    @property
    def manager(self) -> Any:
        """The actor of its GroupManager, which later sessions of this process use too."""
        return self.als._gangs._own.actor

    @property
    def counting(self) -> Any:
        """The library `counting`, loaded."""
        return self.als.load_library("counting", LIBRARY)

    @property
    def ranks(self) -> list[int]:
        """Process ids of the ranks, once the gang is there."""
        return [worker.pid for worker in self.als.list_workers()]

    @property
    def proxy(self) -> int:
        return traces.parent_of(self.ranks[0])

    @property
    def endpoint(self) -> int:
        (found,) = descendants([self.proxy]) - set(self.ranks)
        return found

    @property
    def losses(self) -> int:
        """How often it was started again, as far as this process knows."""
        return self.als.connection.address.epoch - self._first

    def kill(self, *pids: int, number: int = signal.SIGKILL) -> None:
        """Kill processes of the gang and wait until they are gone: its proxy, if none is named.

        That is the loss of a node: the memory of the matrices is lost.
        """
        pids = pids or (self.proxy,)
        for pid in pids:
            os.kill(pid, number)
        for pid in pids:
            traces.wait_until(lambda pid=pid: not os.path.exists(f"/proc/{pid}"), 5)

    def back_s(self, loss: Callable[[], Any]) -> float:
        """Seconds from a loss until all ranks are there again."""
        before = self.losses
        begin = traces.clock()
        loss()
        while self.losses == before:
            self.als.list_workers()
            assert traces.clock() - begin < BACK_LIMIT_S
            time.sleep(0.005)
        return time.monotonic() - begin


@pytest.fixture
def clean(cluster: str) -> Iterator[None]:
    """After the test nothing of its gangs is left."""
    ray.get(find_driver().prewarm.remote())
    with AlchemistSession():  # the manager that the process keeps
        before = left()
    yield
    assert_clean(before)


@pytest.fixture
def gang(clean: None) -> Iterator[Recovering]:
    """Two ranks whose node may be lost five times."""
    gang = Recovering()
    yield gang
    gang.als.close()


@pytest.fixture
def plain(clean: None) -> Iterator[Recovering]:
    """Two ranks that are not started again."""
    gang = Recovering(max_failures=0)
    yield gang
    gang.als.close()


# --- what resizes leave ---


def cpus() -> float:
    """The free CPUs, when Ray has reported those of gangs that have just ended."""
    seen: list[float] = []

    def steady() -> bool:
        seen.append(free_cpus())
        return seen[-10:] == 10 * seen[-1:]

    assert traces.wait_until(steady, 10, 0.1) is not None, seen
    return seen[-1]


def used_by_a_task(A: Handle, meanwhile: Callable[[], Any]) -> None:
    """A task that has a handle of `X` goes on when its ranks are others; so does the next one."""

    @ray.remote(num_cpus=0, max_calls=1)
    def total(handle: Handle) -> float:
        first = float(handle.fetch().sum())
        time.sleep(3)  # meanwhile
        assert float(handle.fetch().sum()) == first
        assert handle.to_layout("MC_MR").fetch().sum() == pytest.approx(first)
        return first

    ref = total.remote(A)
    time.sleep(2)
    meanwhile()
    for task in (ref, total.remote(A)):
        assert ray.get(task, timeout=60) == X.sum()


def same_numbers(handles: dict[Any, Handle], wanted: np.ndarray[Any, Any] = X) -> None:
    for what, handle in handles.items():
        np.testing.assert_array_equal(handle.fetch(), wanted, err_msg=str(what))
