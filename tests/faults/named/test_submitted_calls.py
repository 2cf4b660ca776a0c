"""Calls that outlive their program: kills of programs, ranks and the GroupManager."""

from __future__ import annotations

import concurrent.futures
import contextlib
import os
import signal
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray

from alchemist_ray import AlchemistSession
from alchemist_ray.cluster.actors import find_gang
from alchemist_ray.errors import (
    BadArgumentError,
    CallTimeoutError,
    GroupError,
    GroupFailedError,
    GroupRecoveredError,
    RoutineError,
    SessionError,
)
from alchemist_ray.functions.submitted import SubmittedCall
from alchemist_ray.observe.status import status, table
from tests.faults.conftest import pid_of
from tests.faults.named.named_gangs import Program
from tests.support import traces

QUEUED = 20
LIMIT_S = 60.0
SUBMITS = """
    import concurrent.futures

    als = AlchemistSession(2, name="shots", lifetime="detached")
    go = {go!r}

    def shot(comm, number):
        import os, time
        print("shot", number, flush=True)
        while number >= 0 and not os.path.exists(go):
            time.sleep(0.01)
        return number, comm.size

    def fails(comm):
        raise ValueError("no wind")

    over = [als.submit(shot, -1, label="over"), als.submit(fails)]
    lib = als.load_library("linalg")
    A = als.send_matrix(np.diag(np.arange(1.0, 9.0)))
    svd = als.submit(lib.truncated_svd, A, rank=2)
    concurrent.futures.wait((*over, svd))
    for number in range({queued} + 1):
        als.submit(shot, number, label=f"shot {{number}}")
    large = als.submit(lambda comm, x: x + 1, np.zeros(300_000))
    del A
    als.list_libraries()  # tells the gang that this program no longer refers to A
    print("submitted", flush=True)
    time.sleep(600)
"""


def values(futures: list[SubmittedCall]) -> list[Any]:
    return [future.result(LIMIT_S) for future in futures]


def by_label(als: AlchemistSession) -> dict[str, SubmittedCall]:
    return {future.info.label or future.info.name: future for future in als.futures()}


def waits(go: Path, count: Path | None = None) -> Any:
    """A function for ranks that waits until a file is there; it counts its runs in another one."""

    def shot(comm: Any) -> int:
        import time  # noqa: PLC0415 - on a rank

        if count is not None and comm.rank == 0:
            with open(count, "a") as file:
                file.write(".")
        while not os.path.exists(go):
            time.sleep(0.01)
        return os.getpid()

    return shot


@pytest.mark.cell("program", "in a call", "named", "goes on")
def test_a_killed_program_loses_no_submitted_call(nothing_of_it_left: None, tmp_path: Path) -> None:
    """Killed while calls are over, one runs, and others are queued."""
    go = tmp_path / "go"
    with Program(SUBMITS.format(go=str(go), queued=QUEUED)) as program:
        assert program.said == "submitted"
        program.kill()
    with AlchemistSession.attach("shots") as als:
        found = by_label(als)
        assert [found[name].info.state for name in ("over", "fails")] == ["done", "failed"]
        assert traces.wait_until(found["shot 0"].running, LIMIT_S) is not None
        info = found["shot 0"].info
        assert info.running_s is not None
        assert info.running_s <= info.age_s
        assert f"pid {program.process.pid}" in info.caller
        last = found[f"shot {QUEUED}"]
        assert (last.info.state, last.info.running_s) == ("queued", None)
        assert last.output == ""
        with pytest.raises(TimeoutError):
            last.result(0.01)
        shot = found["shot 0"]
        assert traces.wait_until(lambda: "[rank 1] shot 0" in shot.output, LIMIT_S) is not None
        user = info.caller.partition(" (pid")[0]
        shown = f"shots: calls of {user}: 1 running, {QUEUED + 1} queued, 2 done, 1 failed"
        assert shown in table(status())
        go.touch()
        shots = [found[f"shot {number}"] for number in range(QUEUED + 1)]
        done, pending = concurrent.futures.wait(shots, LIMIT_S)
        assert not pending
        assert done == set(shots)
        assert values(shots) == [(number, 2) for number in range(QUEUED + 1)]
        with pytest.raises(RoutineError, match="ValueError: no wind") as failed:
            found["fails"].result(LIMIT_S)
        assert "in fails" in str(failed.value.traceback)
        np.testing.assert_array_equal(found["<lambda>"].result(LIMIT_S), np.ones(300_000))
        results = found["linalg.truncated_svd"].result(LIMIT_S)
        np.testing.assert_allclose(results.S.fetch(), [8.0, 7.0])
        for future in found.values():
            future.forget()
        assert als.futures() == []
        np.testing.assert_allclose(results.S.fetch(), [8.0, 7.0])  # leased by this process now
        del results, found, future

        def gone() -> bool:
            return not als.connection.request({"op": "list_matrices", "names": []})["matrices"]

        assert traces.wait_until(gone, LIMIT_S) is not None


def test_results_outlive_the_program_that_has_read_them(nothing_of_it_left: None) -> None:
    with AlchemistSession(2, name="shots", lifetime="detached") as als:
        A = als.send_matrix(np.arange(6.0).reshape(2, 3))
        als.submit(als.load_library("linalg").matmul, A, A.T)
    text = """
        als = AlchemistSession.attach("shots")
        print(als.futures()[0].result(60).fetch()[1, 1], flush=True)
        time.sleep(600)
    """
    for _ in range(2):
        with Program(text) as program:
            assert program.said == "50.0"
            program.kill()


@pytest.mark.cell("rank", "in a call", "named", "renewed")
def test_a_killed_rank_costs_the_call_that_runs_unless_it_is_pure(
    climate: AlchemistSession, tmp_path: Path
) -> None:
    go, count = tmp_path / "go", tmp_path / "count"
    over = climate.submit(lambda comm: comm.size)
    assert over.result(LIMIT_S) == 2
    runs = climate.submit(waits(go, count))
    pure = climate.submit(waits(go), pure=True)
    queued = [climate.submit(lambda comm, i: i, i) for i in range(5)]
    assert traces.wait_until(lambda: count.exists() and count.read_text(), LIMIT_S) is not None
    os.kill(climate.list_workers()[1].pid, signal.SIGKILL)
    with pytest.raises(GroupRecoveredError, match="SIGKILL"):
        runs.result(LIMIT_S)
    assert traces.wait_until(pure.running, LIMIT_S) is not None
    lost = climate.list_workers()
    os.kill(lost[1].pid, signal.SIGKILL)
    go.touch()
    assert pure.result(LIMIT_S) != lost[0].pid  # it has run again
    assert values(queued) == list(range(5))
    assert over.result() == 2
    assert count.read_text() == "."  # never twice without having been told so
    np.testing.assert_array_equal(climate.matrix("A").fetch(), np.arange(12.0).reshape(4, 3))


@pytest.mark.cell("GroupManager", "in a call", "named", "lost")
def test_the_loss_of_the_group_manager_is_told(climate: AlchemistSession, tmp_path: Path) -> None:
    over, runs = climate.submit(lambda comm: 1), climate.submit(waits(tmp_path / "go"))
    queued = climate.submit(lambda comm: 2)
    assert over.result(LIMIT_S) == 1
    assert traces.wait_until(runs.running, LIMIT_S) is not None
    os.kill(pid_of(find_gang("climate").actor), signal.SIGKILL)
    for future in (runs, queued):
        with pytest.raises(GroupFailedError, match="GroupManager"):
            future.result(LIMIT_S)
    assert "GroupManager" in repr(runs)

    def told() -> bool:
        with pytest.raises((SessionError, GroupFailedError)) as failed:
            AlchemistSession.attach("climate")
        return "submitted calls and their results" in str(failed.value)

    assert traces.wait_until(told, LIMIT_S) is not None
    with AlchemistSession(1, name="climate", lifetime="detached") as als:
        assert als.futures() == []


def test_another_program_cancels_calls(climate: AlchemistSession, tmp_path: Path) -> None:
    runs, waiting = climate.submit(waits(tmp_path / "go")), climate.submit(lambda comm: 1)
    last = climate.submit(lambda comm: 2)
    assert traces.wait_until(runs.running, LIMIT_S) is not None
    text = """
        with AlchemistSession.attach("climate") as als:
            runs, waiting, last = als.futures()
            print(waiting.cancel(), runs.cancel(), last.result(60), last.cancel(), flush=True)
    """
    with Program(text) as program:
        assert program.said == "True True 2 False"
    for future in (runs, waiting):
        with pytest.raises(concurrent.futures.CancelledError):
            future.result(LIMIT_S)
        assert future.cancelled()
        assert future.info.state == "cancelled"
    assert last.result(LIMIT_S) == 2


def test_limits_of_time_and_of_use(climate: AlchemistSession, tmp_path: Path, cluster: str) -> None:
    """The time limit of a call begins with its turn. Refusals come before anything is queued."""
    slow = climate.submit(waits(tmp_path / "go"), timeout_s=0.5)
    quick = climate.submit(lambda comm: 1, timeout_s=0.5)
    with pytest.raises(CallTimeoutError):
        slow.result(LIMIT_S)
    assert slow.info.state == "failed"
    assert quick.result(LIMIT_S) == 1
    assert repr(quick).endswith(": done>")
    short = climate.submit(lambda comm: 1, keep_s=0.01, label="short")

    def forgotten() -> bool:
        with contextlib.suppress(GroupError):
            return not short.info  # which there is
        return True

    assert traces.wait_until(forgotten, LIMIT_S) is not None
    with pytest.raises(GroupError, match="no submitted call"):
        short.result(LIMIT_S)
    with pytest.raises(BadArgumentError, match="keep_s"):
        climate.submit(lambda comm: 1, keep_s=-1)
    with pytest.raises(BadArgumentError, match="pickled"):
        climate.submit(lambda comm, lock: 1, threading.Lock())
    with AlchemistSession(1) as private:
        lib = private.load_library("linalg")
        with pytest.raises(SessionError, match="lifetime='detached'"):
            private.submit(lambda comm: 1)
        with pytest.raises(BadArgumentError, match=r"linalg\.norm is loaded on gang"):
            climate.submit(lib.norm, climate.matrix("A"))
    assert len(climate.futures()) == 2


def test_futures_end_with_their_session(climate: AlchemistSession, tmp_path: Path) -> None:
    with AlchemistSession.attach("climate") as als:
        runs = als.submit(waits(tmp_path / "go"))
    text = """
        als = AlchemistSession.attach("climate")
        future = als.submit(lambda comm: time.sleep(600))
        als.detach()
        print(type(future.exception(60)).__name__, flush=True)
    """
    with Program(text) as program:
        assert program.said == "SessionError"
    assert runs.cancel()
    assert ray.is_initialized()
