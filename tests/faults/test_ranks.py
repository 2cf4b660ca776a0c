"""A rank is killed or raises, idle or in MPI."""

from __future__ import annotations

import signal
import time

import pytest
import ray

from alchemist_ray.errors import GroupFailedError, RoutineError
from alchemist_ray.runtime.launch import nodes
from tests.faults.conftest import (
    ERROR_LIMIT_S,
    Gang,
    assert_clean,
    inject_and_retry,
    inject_during,
    kill,
    record,
    variables,
)

pytestmark = pytest.mark.timeout(40, func_only=True)


@pytest.mark.cell("rank", "in a call", "private", "lost")
def test_a_call_through_ray_fails_with_a_killed_rank(gang: Gang) -> None:
    outcome = inject_during(
        lambda: kill(gang.ranks[1]), lambda: ray.get(gang.lib.collective.remote(missing=1))
    )
    # Ray wraps the error of a task in a class that derives from Ray's and from ours.
    assert isinstance(outcome.error, GroupFailedError), repr(outcome.error)
    outcome.error = outcome.error.cause if hasattr(outcome.error, "cause") else outcome.error
    gang.lost("kill -9 of a rank, called with .remote()", outcome, "rank 1", "SIGKILL")


@pytest.mark.cell("rank", "in a call", "private", "lost")
def test_a_segfault_ends_the_gang_and_shows_where(gang: Gang) -> None:
    start = time.monotonic()
    outcome = inject_and_retry(lambda: None, lambda: gang.lib.segfault(1))
    assert time.monotonic() - start < ERROR_LIMIT_S
    words = ("rank 1", "SIGSEGV", "in breaking.segfault", "it crashed in", "segfault (breaking.py:")
    gang.lost("segfault in a rank", outcome, *words)


@pytest.mark.cell("rank", "in a call", "private", "lost")
def test_mpi_abort_ends_the_gang(gang: Gang) -> None:
    outcome = inject_and_retry(lambda: None, lambda: gang.lib.abort(2, 7))
    gang.lost("MPI_Abort", outcome, "rank 2", "MPI_Abort(7)")


@pytest.mark.cell("rank", "in a call", "private", "lost")
def test_an_exit_of_one_rank_ends_the_gang_and_shows_its_last_words(gang: Gang) -> None:
    outcome = inject_and_retry(lambda: None, lambda: gang.lib.leave(1, 3))
    gang.lost("os._exit in a rank", outcome, "rank 1", "code 3", "I cannot go on")


@pytest.mark.cell("rank", "in a call", "private", "call fails")
def test_an_exception_on_one_rank_fails_the_call_alone(gang: Gang) -> None:
    echo = gang.session.load_library("echo")
    start = time.monotonic()
    with pytest.raises(RoutineError, match="on purpose") as caught:
        echo.fail(rank=1)
    seconds = time.monotonic() - start
    assert seconds < ERROR_LIMIT_S
    assert caught.value.rank == 1
    assert "ValueError" in (caught.value.traceback or "")
    assert "in fail" in str(caught.value)
    assert gang.works()
    record("exception on one rank, others wait for it", seconds, None, caught.value)


def test_an_exception_on_all_ranks_fails_the_call_alone(gang: Gang) -> None:
    echo = gang.session.load_library("echo")
    start = time.monotonic()
    with pytest.raises(RoutineError, match="and on 2 more ranks") as caught:
        echo.fail()
    seconds = time.monotonic() - start
    assert seconds < ERROR_LIMIT_S
    assert caught.value.rank == 0
    assert gang.works()
    record("exception on all ranks", seconds, None, caught.value)


def test_a_sys_exit_on_one_rank_fails_the_call_alone(gang: Gang) -> None:
    with pytest.raises(RoutineError, match="SystemExit: I have had enough") as caught:
        gang.lib.quit(2)
    assert caught.value.rank == 2
    assert gang.works()


def test_a_gang_outlives_many_failing_calls(gang: Gang) -> None:
    echo = gang.session.load_library("echo")
    for turn in range(20):
        with pytest.raises(RoutineError) as caught:
            echo.fail(rank=turn % 3)
        assert caught.value.rank == turn % 3
    assert gang.works()


@pytest.mark.alone
def test_ranks_that_return_late_from_a_failed_call_keep_their_gang(gang: Gang) -> None:
    start = time.monotonic()
    with pytest.raises(RoutineError, match="before the others") as caught:
        gang.lib.late(0, 1.5)
    assert time.monotonic() - start < 1.0
    assert "have not come back from the call yet" in str(caught.value)
    assert caught.value.rank == 0
    assert gang.works()
    assert time.monotonic() - start > 1.4


@pytest.mark.cell("rank", "in a call", "private", "lost")
def test_ranks_stuck_in_native_mpi_after_a_failure_are_ended(gang: Gang) -> None:
    with variables(gang.manager, nodes, DRAIN_S=1.0):
        start = time.monotonic()
        words = r"before the barrier.* \(other ranks have"
        with pytest.raises(RoutineError, match=words) as caught:
            gang.lib.stuck(1)
        seconds = time.monotonic() - start
        assert seconds < ERROR_LIMIT_S
        assert caught.value.rank == 1
        record("exception on one rank, others stuck in native MPI", seconds, None, caught.value)
        outcome = inject_and_retry(lambda: None, gang.session.list_workers)
    gang.lost(
        "  then, DRAIN_S (30 s, here 1 s) later", outcome, "ranks 0, 2 did not return", "native"
    )


@pytest.mark.cell("rank", "in a call", "private", "lost")
def test_a_stopped_rank_delays_its_own_gang_only(gang: Gang, bystander: Gang) -> None:
    kill(gang.ranks[1], signal.SIGSTOP)
    assert bystander.works()
    outcome = inject_during(lambda: kill(gang.ranks[1]), gang.lib.total)
    gang.lost("kill -9 of a stopped rank", outcome, "rank 1", "SIGKILL")


def test_a_closed_session_leaves_nothing(cluster: str, bystander: Gang) -> None:
    gang = Gang(3)
    start = time.monotonic()
    gang.session.close()
    seconds = time.monotonic() - start
    gone_s = assert_clean(gang.before)
    assert seconds < ERROR_LIMIT_S
    record("(no fault: session closed)", seconds, gone_s, "-")
