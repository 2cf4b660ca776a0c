"""Processes and threads that share a gang: none disturbs another, none loses a result."""

from __future__ import annotations

import contextlib
import math
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray

from alchemist_ray import AlchemistSession, Handle
from alchemist_ray.attached import registry
from alchemist_ray.clients import ray_tasks
from alchemist_ray.cluster.actors import driver_name, edition
from alchemist_ray.errors import (
    GroupError,
    GroupFailedError,
    MatrixNotFoundError,
    RoutineError,
    TransferError,
)
from alchemist_ray.session import owner
from mpi_workers.wire import frames
from mpi_workers.wire.frames import MAP_LIMIT, pack
from tests.alchemist_ray.session.test_alchemist_session import free_cpus
from tests.faults.conftest import Call, variables
from tests.faults.named.named_gangs import Program
from tests.support import traces
from tests.support.build import library

THREADS = 8


@pytest.fixture(scope="module")
def als(cluster: str) -> Iterator[AlchemistSession]:
    with AlchemistSession(2) as session:
        yield session


def in_threads(count: int, work: Callable[[int], None]) -> None:
    """Run ``work(i)`` in threads that start together; raise the first error."""
    start = threading.Barrier(count)

    def run(i: int) -> None:
        start.wait(30)
        work(i)

    with ThreadPoolExecutor(count) as pool:
        list(pool.map(run, range(count)))


# --- threads ---


def test_threads_that_use_a_handle_for_the_first_time_share_a_connection(
    als: AlchemistSession,
) -> None:
    @ray.remote(num_cpus=0)
    def fetch_in_threads(handle: Handle) -> int:
        def work(i: int) -> None:
            assert handle.fetch(rows=i)[0, 0] == 3.0 * i

        in_threads(THREADS, work)
        return len({id(registry.gang_of(handle)) for _ in range(THREADS)})

    A = als.send_matrix(np.arange(30.0).reshape(10, 3))
    assert ray.get(fetch_in_threads.remote(A), timeout=60) == 1


def test_answers_reach_the_thread_that_asked(als: AlchemistSession) -> None:
    def work(i: int) -> None:
        for k in range(50):
            text = f"{i}.{k}"
            assert als.run(lambda comm, x: x, text) == text

    in_threads(4, work)


def test_a_long_call_does_not_hold_up_what_needs_no_ranks(als: AlchemistSession) -> None:
    echo = als.load_library("echo")
    call = Call(lambda: echo.sleep(60.0))
    assert traces.wait_until(lambda: bool(als.list_calls()), 10) is not None
    assert [worker.status for worker in als.list_workers()] == ["busy", "busy"]
    als.list_matrices()
    assert call.under_way
    assert als.cancel() == 1
    call.outcome(0.0, 30)


def test_two_threads_that_request_workers_get_one_gang(cluster: str) -> None:
    free = free_cpus()
    with AlchemistSession() as session:
        # Other gangs of this folder have 7 of 8 CPUs.
        calls = [Call(lambda: session.request_workers(1)) for _ in range(2)]
        errors = [call.outcome(0.0, 100).error for call in calls]  # a start may take 90 s
        assert sorted(type(error).__name__ for error in errors) == ["GroupError", "NoneType"]
        assert len(session.list_workers()) == 1
    # More, if an earlier gang was still ending.
    assert traces.wait_until(lambda: free_cpus() >= free, 20, 0.2) is not None


def test_close_does_not_wait_for_a_start_in_another_thread(
    als: AlchemistSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner, "GANG_END_S", 1.0)
    session = AlchemistSession()
    starting = Call(lambda: session.request_workers(8))  # waits for the CPUs of `als`
    time.sleep(1.0)
    with traces.within(10.0):
        session.close()
    assert type(starting.outcome(0.0, 30).error) is GroupFailedError
    assert als.run(lambda comm: comm.size) == 2


# --- one session after the other ---


@ray.remote(num_cpus=0)
class User:
    """An actor that gets handles."""

    def total(self, handle: Handle) -> float:
        return float(handle.fetch().sum())

    def kept(self) -> tuple[int, int]:
        """Its sockets and threads."""
        sockets = 0
        for fd in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):  # that of the folder
                sockets += os.readlink(f"/proc/self/fd/{fd}").startswith("socket:")
        return sockets, threading.active_count()


def test_a_process_keeps_nothing_of_gangs_that_have_ended(als: AlchemistSession) -> None:
    user: Any = User.remote()
    known, kept = len(registry._connecting), []
    for _ in range(4):
        with AlchemistSession(1) as session:
            assert ray.get(user.total.remote(session.send_matrix(np.ones((2, 2))))) == 4.0
        kept.append(ray.get(user.kept.remote()))
    time.sleep(0.5)  # threads end
    for now, first in zip(ray.get(user.kept.remote()), kept[0], strict=True):
        assert now <= first, kept
    assert len(registry._connecting) <= known


# --- malformed commands ---


@pytest.mark.parametrize(
    "body",
    [
        {"op": "create", "send": "a", "shape": [3, 3], "dtype": "float64", "layout": "NONE"},
        {"op": "create", "send": "b", "shape": [-3, 3], "dtype": "float64", "layout": "VC_STAR"},
        {"op": "create", "send": "c", "shape": [1 << 63, 0], "dtype": "i8", "layout": "VC_STAR"},
        {"op": "create", "send": "d", "shape": [math.inf], "dtype": "i8", "layout": "VC_STAR"},
        {"op": "create", "send": ["e"], "shape": [3], "dtype": "float64", "layout": "VC_STAR"},
        {"op": "seal", "send": "f", "matrix": 0},
        {"op": "redistribute", "source": 0, "layout": "NONE"},
        {"op": "redistribute", "source": 0, "layout": None},
        {"op": "run", "task": {"name": "f", "code": [None, 1.5]}, "uses": []},
        {"op": "run", "task": {"name": "f", "kind": "function", "code": {"matrix": 1}}, "uses": []},
        {"op": "keep_result", "shape": [1], "dtype": "int64", "layout": "CIRC_CIRC"},
    ],
)
def test_a_malformed_command_fails_alone(als: AlchemistSession, body: dict[str, Any]) -> None:
    A = als.send_matrix(np.ones((2, 2)))
    with contextlib.suppress(GroupError, RoutineError, MatrixNotFoundError):
        als.connection.request({**body, **({"source": A.id} if "source" in body else {})})
    assert als.run(lambda comm: comm.size) == 2
    np.testing.assert_array_equal(A.fetch(), np.ones((2, 2)))


# --- forked children ---


def test_a_forked_child_has_connections_of_its_own(als: AlchemistSession) -> None:
    A = np.arange(2e6).reshape(-1, 4)
    handle = als.send_matrix(A)
    handle.fetch()  # the parent's connections and mappings are open
    context = multiprocessing.get_context("fork")
    answers = context.Queue()

    def use() -> None:
        answers.put((handle.fetch(rows=slice(1, 3)), (2 * handle).fetch(), float(handle.sum())))

    children = [context.Process(target=use) for _ in range(3)]
    for child in children:
        child.start()
    for _ in children:
        part, doubled, total = answers.get(timeout=60)
        np.testing.assert_array_equal(part, A[1:3])
        np.testing.assert_array_equal(doubled, 2 * A)
        assert total == A.sum()
    for child in children:
        child.join(30)
        assert child.exitcode == 0
    np.testing.assert_array_equal(handle.fetch(), A)  # and the parent's gang goes on
    assert als.run(lambda comm: comm.size) == 2


def test_a_child_forked_while_a_thread_of_the_parent_fetches_can_fetch(
    als: AlchemistSession,
) -> None:
    handle = als.send_matrix(np.ones((4, 3)))
    context = multiprocessing.get_context("fork")
    answers = context.Queue()
    child = context.Process(target=lambda: answers.put(float(ray_tasks.fetch(handle).sum())))
    with registry.gang_of(handle).nodes._lock:  # as a transfer of another thread may
        child.start()
    try:
        assert answers.get(timeout=60) == 12
    finally:
        child.kill()
        child.join(30)


# --- results that must not be lost ---


def test_a_reader_that_goes_away_does_not_cost_the_result(cluster: str, tmp_path: Path) -> None:
    text = f"""
        def speak(comm):
            for i in range(2000):
                print(i, "x" * 60)
            return comm.size
        with AlchemistSession(1) as als:
            open({str(tmp_path / "found")!r}, "w").write(str(als.run(speak)))
    """
    with Program(text) as program:
        program.process.stdout.close()
        program.process.wait(60)
    assert (tmp_path / "found").read_text() == "1"


def test_a_message_that_fits_no_frame_is_an_error_of_its_call(
    als: AlchemistSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit = 4 << 20  # of what this process and the GroupManager send
    monkeypatch.setattr(frames, "MAP_LIMIT", limit)
    manager: Any = als._gangs._own
    with variables(manager.actor, frames, MAP_LIMIT=limit):
        with pytest.raises(TransferError, match="limit"):
            als.connection.request({"op": "describe", "matrix": 1, "name": "x" * limit})
        matrices = [als.send_matrix(np.ones((2, 2))) for _ in range(2)]
        for matrix in matrices:
            name = "x" * (limit * 5 // 8)
            als.connection.request({"op": "describe", "matrix": matrix.id, "name": name})
        with pytest.raises(TransferError, match="the answer to 'list_matrices' cannot be sent"):
            als.list_matrices()
        for matrix in matrices:
            als.connection.request({"op": "describe", "matrix": matrix.id, "name": ""})
        assert len(als.list_matrices()) >= 2


def test_long_messages_of_errors_on_all_ranks_fail_the_call_alone(als: AlchemistSession) -> None:
    def fail(comm: Any) -> None:
        raise ValueError("x" * (40 << 20))

    with pytest.raises(RoutineError, match=r"ValueError: xxx.* more characters"):
        als.run(fail)
    assert als.run(lambda comm: comm.rank) == 0


def test_a_reply_that_fits_the_frame_of_its_rank_alone_fails_its_call_alone(
    als: AlchemistSession, tmp_path: Path
) -> None:
    """The proxy adds the number of its node to a rank's reply."""
    text = '@routine("text")\ndef text(ctx: Context, size: int) -> str: return "x" * size'
    long = als.load_library("long", library(tmp_path / "long.py", text))
    empty = len(pack({"seq": 1 << 8, "value": ["x" * (1 << 16)]})) - (1 << 16)
    with pytest.raises(TransferError, match="limit"):
        long.text(MAP_LIMIT - empty)
    assert long.text(3) == "xxx"


def test_ctrl_c_in_the_middle_of_a_large_frame_leaves_a_usable_connection(
    als: AlchemistSession,
) -> None:
    A = als.send_matrix(np.ones((4, 3)))
    large = {"op": "describe", "matrix": A.id, "name": "n" * (48 << 20)}

    def rename_until_interrupted(delay: float) -> None:
        threading.Timer(delay, os.kill, (os.getpid(), signal.SIGINT)).start()
        while True:
            als.connection.request(large)

    for delay in (0.01, 0.03, 0.06):
        with pytest.raises(KeyboardInterrupt):
            rename_until_interrupted(delay)
        als.connection.request({"op": "describe", "matrix": A.id, "name": "again"})
        np.testing.assert_array_equal(A.fetch(), np.ones((4, 3)))


# --- jobs ---


def test_a_job_with_an_environment_of_its_own_has_its_own_driver(cluster: str) -> None:
    text = """
        import os
        from alchemist_ray.cluster.actors import driver_name, edition
        with AlchemistSession(1) as als:
            secret = als.run(lambda comm: os.environ.get("SECRET"))
            print(driver_name(edition()), secret, flush=True)
    """
    environment = {"env_vars": {"SECRET": "of this job"}}
    with Program(text, runtime_env=environment) as program:
        name, _, secret = program.said.partition(" ")
        program.process.wait(60)
    assert secret == "of this job"
    assert name.startswith(driver_name(edition()) + "-job-")
    with AlchemistSession(1) as session:
        assert session.run(lambda comm: os.environ.get("SECRET")) is None


def test_tasks_of_a_job_with_other_environments_have_their_own_agents(cluster: str) -> None:
    text = """
        import os

        @ray.remote
        def secret():
            from alchemist_ray import AlchemistSession
            with AlchemistSession(1) as als:
                return als.run(lambda comm: os.environ.get("SECRET"))

        for word in ("first", "second"):
            environment = {"env_vars": {"SECRET": word}}
            print(ray.get(secret.options(runtime_env=environment).remote()), flush=True)
    """
    with Program(text) as program:
        assert [program.said, program.line()] == ["first", "second"]
        program.process.wait(60)
