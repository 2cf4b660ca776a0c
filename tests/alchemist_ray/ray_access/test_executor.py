"""`Executor`: calls on MPI ranks as futures of `concurrent.futures`."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import CancelledError, as_completed, wait
from typing import Any

import numpy as np
import pytest
import ray

from alchemist_ray import Executor
from alchemist_ray.errors import (
    BadArgumentError,
    CallTimeoutError,
    GroupRecoveredError,
    ResourceError,
    RoutineError,
)
from tests.alchemist_ray.session.test_alchemist_session import wait_for_cpus
from tests.support.traces import wait_until


@pytest.fixture(scope="module")
def executor(cluster: str) -> Iterator[Executor]:
    with Executor(num_workers=2, max_gangs=2) as opened:
        yield opened
    assert wait_for_cpus(8, 20)


def total(comm: Any, x: Any, y: Any = 0) -> Any:
    return comm.allreduce(comm.rank) + np.sum(x) + y


def pids(comm: Any, seconds: float = 0.0) -> Any:
    time.sleep(seconds)
    return comm.allgather(os.getpid())


def test_it_is_an_executor_of_the_standard_library(executor: Executor) -> None:
    assert executor.submit(total, np.ones(3), y=2).result() == 6
    assert list(executor.map(total, range(5), [10] * 5)) == [11, 12, 13, 14, 15]
    futures = {executor.submit(total, x): x for x in range(6)}
    assert {futures[done]: done.result() for done in as_completed(futures, timeout=60)} == {
        x: x + 1 for x in range(6)
    }

    async def several() -> list[Any]:
        loop = asyncio.get_running_loop()
        calls = (loop.run_in_executor(executor, total, x) for x in (1, 2))
        return await asyncio.gather(*calls)

    assert asyncio.run(several()) == [2, 3]


def test_a_call_may_have_other_ranks(executor: Executor) -> None:
    assert len(executor.submit(pids, resources={"num_workers": 3}).result()) == 3
    with pytest.raises(BadArgumentError, match=r"no 'cores'; it has num_workers"):
        executor.submit(pids, resources={"cores": 3})
    with pytest.raises(ResourceError, match="do not fit"):
        executor.submit(pids, resources={"num_workers": 100}).result()
    with pytest.raises(TypeError, match="no option 'workers'"):
        Executor(workers=2)
    with pytest.raises((ResourceError, ValueError), match="max_gangs"):
        Executor(max_gangs=0)


def test_gangs_stay_warm_and_are_not_more_than_allowed(executor: Executor) -> None:
    found = {tuple(ranks) for ranks in executor.map(pids, [0.05] * 12)}
    assert 1 <= len(found) <= 2
    time.sleep(1.0)
    again = {tuple(ranks) for ranks in executor.map(pids, [0.0] * 4)}
    assert again & found  # a second gang may start only now
    assert len(again | found) <= 2


def test_idle_gangs_make_room_for_calls_with_other_ranks(executor: Executor) -> None:
    executor.submit(pids).result()
    needed = {"num_workers": 7, "start_timeout_s": 60}
    assert len(executor.submit(pids, resources=needed).result()) == 7


def test_gangs_make_room_when_they_become_idle(executor: Executor) -> None:
    """A call with other ranks, submitted while its CPUs are in use, does not wait for `idle_s`."""
    executor.submit(pids, resources={"num_workers": 5}).result()
    busy = executor.submit(pids, 3.0, resources={"num_workers": 5})
    waits = executor.submit(pids, resources={"num_workers": 6, "start_timeout_s": 60})
    assert not busy.done()
    assert len(waits.result(timeout=70)) == 6


def test_a_call_with_other_ranks_has_its_turn_beside_many_calls(executor: Executor) -> None:
    many = [executor.submit(pids, 1.0, resources={"num_workers": 4}) for _ in range(26)]
    wait_until(lambda: many[1].running(), 30)
    other = executor.submit(pids, resources={"num_workers": 6})
    assert len(other.result(timeout=50)) == 6
    assert not many[-1].done()
    assert len(many[-1].result(timeout=100)) == 4


def test_errors_are_those_of_run(executor: Executor) -> None:
    def broken(comm: Any) -> None:
        if comm.rank == 1:
            raise ValueError("no luck")

    with pytest.raises(RoutineError, match="rank 1: ValueError: no luck"):
        executor.submit(broken).result()
    assert isinstance(executor.submit(broken).exception(), RoutineError)
    with pytest.raises(CallTimeoutError):
        executor.submit(pids, 60.0, resources={"timeout_s": 0.3}).result()

    def dies(comm: Any) -> None:
        if comm.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        comm.barrier()

    with pytest.raises(GroupRecoveredError, match="SIGKILL"):
        executor.submit(dies).result(timeout=60)
    assert executor.submit(total, 1).result(timeout=60) == 2


def test_calls_are_cancelled_before_and_while_they_run(executor: Executor) -> None:
    calls = [executor.submit(pids, 60.0) for _ in range(8)]
    deadline = time.monotonic() + 30
    while not calls[0].running():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert all(call.cancel() for call in calls)
    assert all(call.cancelled() and call.cancel() for call in calls)
    done, left = wait(calls, timeout=5)
    assert (len(done), left) == (8, set())
    with pytest.raises(CancelledError):
        calls[0].result()
    finished = executor.submit(total, 1)
    assert finished.result(timeout=30) == 2  # the gangs go on
    assert not finished.cancel()


def test_futures_that_are_done_keep_no_arguments(executor: Executor) -> None:
    given = np.ones(10**6)
    calls = [executor.submit(total, given) for _ in range(6)]
    calls[-1].cancel()
    assert not wait(calls, timeout=60).not_done
    assert not any(call.task or call.refs for call in calls)
    assert executor.submit(total, ray.put(given)).result(timeout=60) == 10**6 + 1


def test_a_call_waits_at_its_gang_without_a_share_in_what_happens_there(cluster: str) -> None:
    def dies(comm: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    with Executor(num_workers=1, max_gangs=1) as other:
        other.submit(pids, 0.3)
        lost, waits = other.submit(dies), other.submit(total, 1)
        with pytest.raises(GroupRecoveredError, match="SIGKILL"):
            lost.result(timeout=60)
        assert waits.result(timeout=60) == 1  # by the next gang
        limited = [other.submit(pids, 0.6, resources={"timeout_s": 1.0}) for _ in range(3)]
        assert all(call.exception(timeout=30) is None for call in limited)


def test_shutdown_ends_the_gangs(cluster: str) -> None:
    other = Executor(num_workers=1, max_gangs=1)
    ranks = other.submit(pids).result()
    calls = [other.submit(pids, 0.2) for _ in range(3)]
    other.shutdown()
    assert all(call.done() and not call.exception() for call in calls)
    with pytest.raises(RuntimeError, match="after shutdown"):
        other.submit(pids)
    deadline = time.monotonic() + 20
    while any(os.path.exists(f"/proc/{pid}") for pid in ranks):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    another = Executor(num_workers=1, max_gangs=1)
    calls = [another.submit(pids, 0.5) for _ in range(6)]
    assert wait_until(calls[0].running, 30) is not None  # else it would be cancelled, too
    another.shutdown(wait=False, cancel_futures=True)
    wait(calls, timeout=30)
    assert [call.cancelled() for call in calls] == [False] + 5 * [True]  # also the one sent ahead


def test_calls_wait_for_no_gang_that_is_gone(cluster: str) -> None:
    """No room for a second gang was found a moment ago, and the only one is lost for good."""
    with Executor(num_workers=5, max_gangs=2) as other:
        calls = [other.submit(pids, 1.0) for _ in range(4)]
        assert wait_until(lambda: calls[0].running() and bool(other._full), 40) is not None
        (gangs,) = other._gangs.values()
        ray.kill(gangs[0].host.own.actor)
        assert not wait(calls, timeout=60).not_done
        assert calls[-1].exception() is None
