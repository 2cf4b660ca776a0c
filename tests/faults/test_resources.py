"""Requests exceed the CPUs or the memory, or a gang does not start."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import ray

from alchemist_ray import AlchemistSession
from alchemist_ray.errors import LaunchError, ResourceError
from alchemist_ray.runtime.cluster.actors import NAMESPACE, agent_name, edition
from mpi_workers.matrix.available_memory import ROOM_S, available_bytes
from tests.faults.conftest import (
    ERROR_LIMIT_S,
    Call,
    Gang,
    agent_pids,
    assert_clean,
    inject_during,
    kill,
    left,
    record,
)
from tests.support import traces

pytestmark = pytest.mark.timeout(60, func_only=True)


# --- CPUs ---


@pytest.mark.alone
def test_more_workers_than_the_cluster_has_are_refused_at_once(gang: Gang) -> None:
    before = left()
    with AlchemistSession() as session:
        start = time.monotonic()
        with pytest.raises(ResourceError, match=r"1000 workers .* room for 8") as caught:
            session.request_workers(1000)
        seconds = time.monotonic() - start
        assert seconds < 1.0
        assert len(session.request_workers(1)) == 1
    gone_s = assert_clean(before)
    record("more workers than the cluster has CPUs", seconds, gone_s, caught.value)


def test_cpus_in_use_are_waited_for_and_then_refused(gang: Gang) -> None:
    before = left()
    with opened(start_timeout_s=1.5) as session:
        start = time.monotonic()
        with pytest.raises(
            ResourceError,
            match=r"not enough free CPUs for 6 workers .* free now.* In use: gang g\w+ \d",
        ) as caught:
            session.request_workers(6)
        seconds = time.monotonic() - start
        assert 1.0 < seconds < 1.5 + ERROR_LIMIT_S
        gone_s = assert_clean(before)
        record("CPUs in use (start_timeout_s=1.5)", seconds, gone_s, caught.value)
        assert len(session.request_workers(1)) == 1
    assert_clean(before)


def test_cpus_that_become_free_in_time_are_taken(gang: Gang) -> None:
    with AlchemistSession(3) as first, AlchemistSession() as second:
        closing = Call(lambda: (time.sleep(0.5), first.close()))
        assert len(second.request_workers(3)) == 3
        closing.outcome(0.0)


# --- memory ---


@pytest.mark.alone
@pytest.mark.parametrize("larger_than", ["the machine", "what is free"])
def test_a_matrix_larger_than_memory_is_refused_before_any_is_taken(
    gang: Gang, larger_than: str
) -> None:
    matrices, free = len(gang.session.list_matrices()), available_bytes()
    total, least_s = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), 0.0
    nbytes = 8 * 10**12
    if larger_than == "what is free":  # with what other ranks may return, there would be room
        nbytes, least_s = gang.workers * (free + total) // 2, ROOM_S
    huge = np.broadcast_to(np.float64(0), (nbytes // 8000, 1000))  # of one element
    start = time.monotonic()
    with pytest.raises(ResourceError, match=r"needs .*B for .* node .* has .* left") as caught:
        gang.session.send_matrix(huge)
    seconds = time.monotonic() - start
    assert least_s <= seconds < least_s + 1.0
    assert free - available_bytes() < 1 << 30  # other processes use memory, too
    assert len(gang.session.list_matrices()) == matrices
    assert gang.works()
    record(f"matrix larger than {larger_than}", seconds, None, caught.value)


def test_a_routine_that_asks_for_more_than_memory_fails_alone(gang: Gang) -> None:
    start = time.monotonic()
    with pytest.raises(ResourceError, match=r"needs .* TB .* node .* has .* left") as caught:
        gang.lib.greedy(10**6, 10**6)
    seconds = time.monotonic() - start
    assert caught.value.rank is not None
    assert gang.works()
    record("routine asks for more than memory", seconds, None, caught.value)


# --- start-up ---


@pytest.fixture
def hanging_ranks(gang: Gang) -> Iterator[None]:
    """Make all new ranks hang in MPI_Init, as if they waited for a debugger."""
    agent = ray.get_actor(
        agent_name(edition(), ray.get_runtime_context().get_node_id()), namespace=NAMESPACE
    )

    def set_hold(self: Any, hold: bool) -> None:
        os.environ["MPIR_CVAR_DEBUG_HOLD"] = "1" if hold else "0"

    def switch(hold: bool) -> None:
        ray.get(agent.__ray_call__.remote(set_hold, hold))
        fork_server = agent_pids()["fork-server"]
        gang.before.add(f"process {fork_server}")  # it stays while it has gangs
        kill(fork_server)  # the next one has the environment

    switch(True)
    yield
    switch(False)


def test_ranks_that_hang_when_they_start_are_ended(gang: Gang, hanging_ranks: None) -> None:
    before = left()
    with opened(start_timeout_s=3.0) as session:
        start = time.monotonic()
        with pytest.raises(LaunchError, match=r"2 workers .* 3 s\. .* initialising MPI") as caught:
            session.request_workers(2)
        seconds = time.monotonic() - start
        assert 2.5 < seconds < 3.0 + ERROR_LIMIT_S
        gone_s = assert_clean(before)
        record("ranks hang in MPI_Init (start_timeout_s=3)", seconds, gone_s, caught.value)


@pytest.mark.cell("rank", "starting", "private", "LaunchError")
def test_a_hanging_rank_killed_while_the_gang_starts_ends_the_launch(
    gang: Gang, hanging_ranks: None
) -> None:
    before = left()
    with opened(start_timeout_s=20.0) as session:
        launching = Call(lambda: session.request_workers(2))
        ranks: list[int] = []

        def forked() -> bool:
            ranks[:] = [int(name.split()[1]) for name in left() - before if "process" in name]
            return len(ranks) == 4  # the proxy, its data endpoint and two ranks

        assert traces.wait_until(forked, 15) is not None
        start = time.monotonic()
        kill(max(ranks))
        outcome = launching.outcome(start)
        assert isinstance(outcome.error, LaunchError), repr(outcome.error)
        assert "SIGKILL" in str(outcome.error)
        assert "while the gang was starting" in str(outcome.error)
        assert outcome.seconds < ERROR_LIMIT_S
        gone_s = assert_clean(before)
        record("kill -9 of a rank while the gang starts", outcome.seconds, gone_s, outcome.error)


@pytest.mark.cell("fork server", "starting", "private", "LaunchError")
def test_a_fork_server_that_hangs_is_given_up(gang: Gang) -> None:
    before = left()
    fork_server = agent_pids()["fork-server"]
    kill(fork_server, signal.SIGSTOP)
    try:
        with opened(start_timeout_s=2.0) as session:
            start = time.monotonic()
            with pytest.raises(LaunchError, match="starting processes") as caught:
                session.request_workers(2)
            seconds = time.monotonic() - start
            assert seconds < 2.0 + ERROR_LIMIT_S
            record("a fork server hangs (start_timeout_s=2)", seconds, None, caught.value)
    finally:
        kill(fork_server, signal.SIGCONT)
    assert_clean(before)
    assert gang.works()


@pytest.mark.cell("fork server", "starting", "private", "LaunchError")
def test_a_fork_server_killed_before_it_forks_ends_the_launch(gang: Gang) -> None:
    before = left()
    fork_server = agent_pids()["fork-server"]
    gang.before.add(f"process {fork_server}")
    with opened(start_timeout_s=20.0) as session:
        kill(fork_server, signal.SIGSTOP)
        outcome = inject_during(
            lambda: kill(fork_server), lambda: session.request_workers(2), after_s=1.0
        )
        assert type(outcome.error) is LaunchError, repr(outcome.error)
        assert f"the fork server on {os.uname().nodename} ended" in str(outcome.error)
        assert outcome.seconds < ERROR_LIMIT_S
        record("kill -9 of a fork server that is to fork", outcome.seconds, None, outcome.error)
        assert len(session.request_workers(2)) == 2
    assert_clean(before)


def test_an_mpiexec_that_hangs_is_ended(gang: Gang) -> None:
    before = left()
    with opened(launcher="mpiexec", start_timeout_s=2.0) as session:
        launch_with(session, "sh -c 'sleep 60'")
        start = time.monotonic()
        with pytest.raises(LaunchError, match="initialising MPI") as caught:
            session.request_workers(2)
        seconds = time.monotonic() - start
        gone_s = assert_clean(before)
        record("mpiexec hangs (start_timeout_s=2)", seconds, gone_s, caught.value)
        launch_with(session, "")


def test_ranks_of_mpiexec_that_hang_when_they_start_are_ended(
    gang: Gang, hanging_ranks: None
) -> None:
    before = left()
    with opened(launcher="mpiexec", start_timeout_s=8.0) as session:
        launching = Call(lambda: session.request_workers(2))

        def hanging() -> bool:
            return sum("mpi_workers rank" in line for line in traces.processes().values()) > 2

        assert traces.wait_until(hanging, 7.5) is not None  # mpiexec and its ranks
        start = time.monotonic()
        outcome = launching.outcome(start)
        assert isinstance(outcome.error, LaunchError), repr(outcome.error)
        gone_s = assert_clean(before)
        record("mpiexec's ranks hang in MPI_Init (8 s)", outcome.seconds, gone_s, outcome.error)


def test_an_mpiexec_that_fails_is_reported(gang: Gang) -> None:
    before = left()
    with opened(launcher="mpiexec", start_timeout_s=20.0) as session:
        launch_with(session, "sh -c 'echo no; exit 5'")
        start = time.monotonic()
        with pytest.raises(LaunchError, match=r"all of sh ended with 5(.|\n)*no") as caught:
            session.request_workers(2)
        seconds = time.monotonic() - start
        assert seconds < ERROR_LIMIT_S
        gone_s = assert_clean(before)
        record("mpiexec fails at once", seconds, gone_s, caught.value)
        launch_with(session, "")


def opened(**options: Any) -> AlchemistSession:
    """A session whose GroupManager already runs, so that its start is not measured."""
    session = AlchemistSession(**options)
    ray.get(session._gangs._live_manager().actor.__ray_ready__.remote())
    return session


def launch_with(session: AlchemistSession, mpiexec: str) -> None:
    """Have a session's gang started by this command: its manager reads it from there.

    An empty command removes the setting: the manager may serve the next session.
    """

    def set_command(self: Any, command: str) -> None:
        os.environ["ALCHEMIST_MPIEXEC"] = command

    ray.get(session._gangs._live_manager().actor.__ray_call__.remote(set_command, mpiexec))
