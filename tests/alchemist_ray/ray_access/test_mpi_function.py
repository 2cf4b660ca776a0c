"""`mpi_function`: Ray-style remote functions on gangs of their own."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import ray
from ray import cloudpickle
from ray.exceptions import TaskCancelledError

import alchemist_ray
from alchemist_ray import AlchemistSession
from alchemist_ray.errors import (
    BadArgumentError,
    CallTimeoutError,
    GroupError,
    GroupRecoveredError,
    ResourceError,
    RoutineError,
)
from alchemist_ray.ray_access.mpi_function import _pool
from tests.alchemist_ray.session.test_alchemist_session import wait_for_cpus
from tests.faults.conftest import pid_of
from tests.support import traces

IDLE_S = 1.0


@pytest.fixture(autouse=True)
def _gone(cluster: str) -> Iterator[None]:
    """Gangs give their CPUs back by themselves."""
    yield
    assert wait_for_cpus(8, IDLE_S + 10)


@alchemist_ray.mpi_function(num_workers=2, idle_s=IDLE_S)
def total(comm: Any, x: Any = 0, y: Any = 0) -> Any:
    """Sum over the ranks."""
    return comm.allreduce(comm.rank) + np.sum(x) + np.sum(y)


@alchemist_ray.mpi_function(num_workers=2, idle_s=IDLE_S)
def pids(comm: Any, seconds: float = 0.0) -> Any:
    time.sleep(seconds)
    return comm.allgather(os.getpid())


@ray.remote
def seven() -> int:
    return 7


def test_a_function_becomes_a_remote_function() -> None:
    assert total.__doc__ == "Sum over the ranks."
    assert "2 workers" in repr(total)
    assert ray.get(total.remote()) == 1
    assert ray.get(total.remote(np.ones(5), y=ray.put(np.ones(200_000)))) == 200_006
    assert ray.get(total.remote([seven.remote()])) == 8  # refs anywhere, of tasks under way
    with pytest.raises(TypeError, match=r"total\.remote\(\.\.\.\)"):
        total()
    assert ray.get(cloudpickle.loads(cloudpickle.dumps(pids)).remote()) == ray.get(pids.remote())
    assert total.function.__name__ == "total"


def test_its_gang_stays_warm_and_calls_queue() -> None:
    first = ray.get(pids.remote())
    assert [ray.get(pids.remote()) for _ in range(3)] == [first] * 3
    assert not wait_for_cpus(8, 0.1)
    assert wait_for_cpus(8, IDLE_S + 10)
    assert not any(os.path.exists(f"/proc/{pid}") for pid in first)


@pytest.mark.parametrize("after_s", [0.0, 0.5])  # Ray reports a gang's CPUs as taken in 0.1 s
def test_simultaneous_calls_get_separate_gangs_while_cpus_last(after_s: float) -> None:
    four = pids.options(num_workers=4)
    calls = [four.remote(2.0)]
    time.sleep(after_s)
    calls += [four.remote(0.5) for _ in range(2)]
    assert len({tuple(ranks) for ranks in ray.get(calls)}) == 2  # of 8 CPUs


def test_options_make_another_function() -> None:
    assert len(ray.get(pids.options(num_workers=3).remote())) == 3
    with pytest.raises(TypeError, match="no option 'workers'"):
        pids.options(workers=3)
    with pytest.raises(ResourceError, match="num_workers"):
        alchemist_ray.mpi_function(num_workers=0)(lambda comm: None)
    with pytest.raises(ResourceError, match="do not fit"):
        ray.get(pids.options(num_workers=100).remote())


def test_errors_are_raised_by_ray_get() -> None:
    @alchemist_ray.mpi_function(num_workers=2, idle_s=IDLE_S)
    def broken(comm: Any, how: str) -> Any:
        if how == "raise" and comm.rank == 1:
            raise ValueError("no luck")
        if how == "matrix":
            from ali import context  # noqa: PLC0415

            return context().zeros((2, 2), "float64")
        return comm.recv()

    with pytest.raises(RoutineError, match="rank 1: ValueError: no luck"):
        ray.get(broken.remote("raise"))
    with pytest.raises(RoutineError, match="must not return a DistMatrix"):
        ray.get(broken.remote("matrix"))
    with pytest.raises(CallTimeoutError):
        ray.get(broken.options(timeout_s=0.3).remote("hang"))
    hanging = broken.remote("hang")
    time.sleep(0.5)
    ray.cancel(hanging)
    with pytest.raises(TaskCancelledError):
        ray.get(hanging, timeout=5)
    assert ray.get(total.remote(), timeout=10) == 1  # on the same gang


def test_handles_are_refused(session: AlchemistSession) -> None:
    with pytest.raises(BadArgumentError, match="a gang of its own"):
        total.remote(session.send_matrix(np.eye(2)))


def test_a_killed_rank_fails_its_call_and_the_next_gets_other_ranks() -> None:
    before = ray.get(pids.remote())
    late = pids.remote(30.0)
    time.sleep(0.5)
    os.kill(before[1], signal.SIGKILL)
    with pytest.raises(GroupRecoveredError, match="SIGKILL"):
        ray.get(late, timeout=10)
    after = ray.get(pids.remote(), timeout=30)
    assert not set(before) & set(after)


def test_the_next_call_after_the_death_of_the_manager_gets_a_fresh_gang() -> None:
    before = ray.get(pids.remote())
    ((host,),) = filter(None, _pool._hosts.values())
    os.kill(pid_of(host.own.actor), signal.SIGKILL)
    with contextlib.suppress(ray.exceptions.RayActorError):  # sent before the death was known
        ray.get(pids.remote(), timeout=30)
    after = ray.get(pids.remote(), timeout=30)
    assert not set(before) & set(after)


def test_calls_that_wait_for_a_gang_that_is_stopped_start_no_other() -> None:
    with AlchemistSession(8):
        calls = [pids.remote(), pids.remote()]
        ((host,),) = filter(None, _pool._hosts.values())

        def starting() -> bool:
            found = AlchemistSession.list()
            return any((g.name, g.state) == (host.own.gang, "starting") for g in found)

        assert traces.wait_until(starting, 20, 0.1) is not None
        AlchemistSession.stop_gang(host.own.gang)
        for call in calls:
            with pytest.raises(GroupError):
                ray.get(call, timeout=30)


def test_the_pool_is_empty_when_nothing_runs() -> None:
    assert ray.get(total.remote()) == 1
    assert traces.wait_until(lambda: not any(_pool._hosts.values()), IDLE_S + 10, 0.1) is not None
