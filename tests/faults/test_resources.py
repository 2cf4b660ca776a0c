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
from alchemist_ray.cluster.actors import NAMESPACE, agent_name, edition
from alchemist_ray.errors import LaunchError, ResourceError
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
    refused,
)
from tests.support import traces

# --- CPUs ---


def test_more_workers_than_the_cluster_has_are_refused_at_once(gang: Gang) -> None:
    before, fault = left(), "more workers than the cluster has CPUs"
    with AlchemistSession() as session:
        with refused(fault, ResourceError, r"1000 workers .* room for 8", most_s=1.0):
            session.request_workers(1000)
        assert len(session.request_workers(1)) == 1
    assert_clean(before)


def test_cpus_in_use_are_waited_for_and_then_refused(gang: Gang) -> None:
    before, fault = left(), "CPUs in use (start_timeout_s=6)"
    words = r"not enough free CPUs for 6 workers .* free now.* In use: gang g\w+ \d"
    with opened(start_timeout_s=6) as session:
        with refused(fault, ResourceError, words, 5.0, 6.0 + ERROR_LIMIT_S, before):
            session.request_workers(6)
        assert len(session.request_workers(1)) == 1
    assert_clean(before)


def test_cpus_that_become_free_in_time_are_taken(gang: Gang) -> None:
    with AlchemistSession(3) as first, AlchemistSession() as second:
        closing = Call(lambda: (time.sleep(0.5), first.close()))
        assert len(second.request_workers(3)) == 3
        closing.outcome(0.0)


# --- memory ---


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
    fault, words = f"matrix larger than {larger_than}", r"needs .*B for .* node .* has .* left"
    with refused(fault, ResourceError, words, least_s, least_s + 1.0):
        gang.session.send_matrix(huge)
    assert free - available_bytes() < 1 << 30  # other processes use memory, too
    assert len(gang.session.list_matrices()) == matrices
    assert gang.works()


def test_a_routine_that_asks_for_more_than_memory_fails_alone(gang: Gang) -> None:
    words = r"needs .* TB .* node .* has .* left"
    with refused("routine asks for more than memory", ResourceError, words) as caught:
        gang.lib.greedy(10**6, 10**6)
    assert caught.value.rank is not None
    assert gang.works()


# --- start-up ---


@pytest.fixture
def hanging_ranks(gang: Gang) -> Iterator[None]:
    """Make all new ranks hang in MPI_Init, as if they waited for a debugger."""
    agent = ray.get_actor(
        agent_name(edition(), ray.get_runtime_context().get_node_id()), namespace=NAMESPACE
    )

    def switch(hold: bool) -> None:
        set_variable(agent, "MPIR_CVAR_DEBUG_HOLD", str(int(hold)))
        fork_server = agent_pids()["fork-server"]
        gang.before.add(f"process {fork_server}")  # it stays while it has gangs
        kill(fork_server)  # the next one has the environment
        # Until it is dead, the agent takes it for one that can fork.
        assert traces.wait_until(lambda: not traces.alive(fork_server), 10) is not None
        agent_pids()  # starts it: its start is not measured

    switch(True)
    yield
    switch(False)


def test_ranks_that_hang_when_they_start_are_ended(gang: Gang, hanging_ranks: None) -> None:
    before, fault = left(), "ranks hang in MPI_Init (start_timeout_s=6)"
    words = r"2 workers .* 6 s\. .* initialising MPI"
    with (
        # Also a busy machine starts ranks in this time.
        opened(start_timeout_s=6.0) as session,
        refused(fault, LaunchError, words, 5.5, 6.0 + ERROR_LIMIT_S, before),
    ):
        session.request_workers(2)


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
        start = traces.clock()
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
        fault = "a fork server hangs (start_timeout_s=2)"
        with (
            opened(start_timeout_s=2.0) as session,
            refused(fault, LaunchError, "starting processes", most_s=2.0 + ERROR_LIMIT_S),
        ):
            session.request_workers(2)
    finally:
        kill(fork_server, signal.SIGCONT)
    assert_clean(before)
    assert gang.works()


@pytest.mark.cell("fork server", "starting", "private", "goes on")
def test_a_fork_server_killed_before_it_forks_is_replaced(gang: Gang) -> None:
    before = left()
    fork_server = agent_pids()["fork-server"]
    gang.before.add(f"process {fork_server}")
    with opened(start_timeout_s=60.0) as session:
        kill(fork_server, signal.SIGSTOP)
        outcome = inject_during(
            lambda: kill(fork_server), lambda: session.request_workers(2), after_s=1.0
        )
        assert outcome.error is None, repr(outcome.error)
        assert len(session.list_workers()) == 2
        record("kill -9 of a fork server that is to fork", outcome.seconds, None, "-")
    assert_clean(before)


def test_an_mpiexec_that_hangs_is_ended(gang: Gang) -> None:
    before = left()
    with opened(launcher="mpiexec", start_timeout_s=6.0) as session:
        launch_with(session, "sh -c 'sleep 600'")
        fault = "mpiexec hangs (start_timeout_s=6)"
        with refused(fault, LaunchError, "initialising MPI", 6.0, 60.0, before):
            session.request_workers(2)
        launch_with(session, "")


def test_ranks_of_mpiexec_that_hang_when_they_start_are_ended(
    gang: Gang, hanging_ranks: None
) -> None:
    before = left()
    with opened(launcher="mpiexec", start_timeout_s=15.0) as session:
        launching = Call(lambda: session.request_workers(2))

        def hanging() -> bool:
            return sum("mpi_workers rank" in line for line in traces.processes().values()) > 2

        assert traces.wait_until(hanging, 14.5) is not None  # mpiexec and its ranks
        start = traces.clock()
        outcome = launching.outcome(start)
        assert isinstance(outcome.error, LaunchError), repr(outcome.error)
        gone_s = assert_clean(before)
        record("mpiexec's ranks hang in MPI_Init (15 s)", outcome.seconds, gone_s, outcome.error)


def test_an_mpiexec_that_fails_is_reported(gang: Gang) -> None:
    before = left()
    with opened(launcher="mpiexec", start_timeout_s=20.0) as session:
        launch_with(session, "sh -c 'echo no; exit 5'")
        words = r"all of sh ended with 5(.|\n)*no"
        with refused("mpiexec fails at once", LaunchError, words, before=before):
            session.request_workers(2)
        launch_with(session, "")


def opened(**options: Any) -> AlchemistSession:
    """A session whose GroupManager and fork server run: their starts are not measured."""
    agent_pids()
    session = AlchemistSession(**options)
    ray.get(session._gangs._live_gang().actor.__ray_ready__.remote())
    return session


def launch_with(session: AlchemistSession, mpiexec: str) -> None:
    """Have a session's gang started by this command: its manager reads it from there.

    An empty command removes the setting: the manager may serve the next session.
    """
    set_variable(session._gangs._live_gang().actor, "ALCHEMIST_MPIEXEC", mpiexec)


def set_variable(actor: Any, name: str, value: str) -> None:
    """Set a variable of the environment in an actor's process."""
    ray.get(actor.__ray_call__.remote(lambda self: os.environ.update({name: value})))
