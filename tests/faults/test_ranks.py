"""A rank is killed or raises, idle or in MPI."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import Any

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


def leave(comm: Any) -> None:
    if comm.rank == 1:
        os.write(2, b"I cannot go on")
        os._exit(3)
    comm.Barrier()


@pytest.mark.cell("rank", "in a call", "private", "lost")
@pytest.mark.parametrize(
    ("fault", "call", "words"),
    [
        (
            "segfault in a rank",
            lambda gang: gang.lib.segfault(1),
            "rank 1|SIGSEGV|in breaking.segfault|it crashed in|segfault (breaking.py:",
        ),
        ("MPI_Abort", lambda gang: gang.lib.abort(2, 7), "rank 2|MPI_Abort(7)"),
        ("os._exit in a rank", lambda gang: gang.lib.leave(1, 3), "rank 1|code 3|I cannot go on"),
        ("os._exit in als.run", lambda gang: gang.session.run(leave), "rank 1|code 3|I cannot go"),
    ],
)
def test_a_rank_that_ends_itself_ends_the_gang(
    gang: Gang, fault: str, call: Callable[[Gang], Any], words: str
) -> None:
    start = time.monotonic()
    outcome = inject_and_retry(lambda: None, lambda: call(gang))
    assert time.monotonic() - start < ERROR_LIMIT_S
    gang.lost(fault, outcome, *words.split("|"))


@pytest.mark.cell("rank", "in a call", "private", "call fails")
@pytest.mark.parametrize(
    ("fault", "call", "rank", "words"),
    [
        (
            "exception on one rank, others wait for it",
            lambda gang: gang.session.load_library("echo").fail(rank=1),
            1,
            "on purpose|ValueError|in fail",
        ),
        (
            "exception on all ranks",
            lambda gang: gang.session.load_library("echo").fail(),
            0,
            "and on 2 more ranks",
        ),
        ("sys.exit on one rank", lambda gang: gang.lib.quit(2), 2, "SystemExit: I have had enough"),
    ],
)
def test_an_exception_fails_the_call_alone(
    gang: Gang, fault: str, call: Callable[[Gang], Any], rank: int, words: str
) -> None:
    start = time.monotonic()
    with pytest.raises(RoutineError) as caught:
        call(gang)
    seconds = time.monotonic() - start
    assert seconds < ERROR_LIMIT_S
    assert caught.value.rank == rank
    for word in words.split("|"):
        assert word in f"{caught.value}{caught.value.traceback}"
    assert gang.works()
    record(fault, seconds, None, caught.value)


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
