"""A process that a gang depends on ends: its manager, an agent, a proxy, the user's program."""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from collections.abc import Callable
from typing import Any

import pytest
import ray

from alchemist_ray import AlchemistSession
from alchemist_ray.cluster.driver import find_driver
from tests.alchemist_ray.session.test_alchemist_session import free_cpus, wait_for_cpus
from tests.faults.conftest import (
    ERROR_LIMIT_S,
    LIBRARY,
    Gang,
    agent_pids,
    assert_clean,
    inject_and_retry,
    inject_during,
    kill,
    left,
    pid_of,
    record,
)
from tests.faults.named.named_gangs import Program
from tests.support import traces

PROGRAM = """
als = AlchemistSession(2)
lib = als.load_library("breaking", {library!r})
print(*[worker.pid for worker in als.list_workers()], flush=True)
{then}
"""
EXITS = "time.sleep(1.0); print(time.monotonic(), flush=True); raise SystemExit(3)"
SAVES = "try: time.sleep(60)\nfinally: time.sleep(3.5); print(time.monotonic(), flush=True)"


# --- the manager ---


@pytest.mark.cell("GroupManager", "in a call", "private", "lost")
def test_a_call_through_ray_fails_with_a_killed_manager(gang: Gang) -> None:
    pid = pid_of(gang.manager)
    outcome = inject_during(
        lambda: kill(pid), lambda: ray.get(gang.lib.collective.remote(missing=1))
    )
    assert isinstance(outcome.error, ray.exceptions.RayActorError)
    assert outcome.seconds < ERROR_LIMIT_S
    gone_s = assert_clean(gang.before)
    record(
        "kill -9 of the GroupManager, called with .remote()", outcome.seconds, gone_s, outcome.error
    )
    gang.again()


# --- proxy, fork server, agent, Driver ---


@pytest.mark.cell("fork server", "in a call", "private", "goes on")
def test_a_gang_outlives_its_fork_server(gang: Gang) -> None:
    fork_server = agent_pids()["fork-server"]
    outcome = inject_during(lambda: kill(fork_server), lambda: gang.lib.churn(0.6))
    assert outcome.error is None
    assert gang.works()
    start = traces.clock()
    gang.session.yield_workers()
    seconds = traces.clock() - start
    assert seconds < ERROR_LIMIT_S
    gone_s = assert_clean(gang.before)
    record("kill -9 of the fork server: gang unharmed, then yielded", seconds, gone_s, "-")
    gang.start()
    assert agent_pids()["fork-server"] != fork_server


@pytest.mark.cell("fork server", "idle", "private", "lost with its proxy")
def test_nothing_is_left_when_fork_server_and_proxy_are_killed(gang: Gang) -> None:
    def cause() -> None:
        kill(agent_pids()["fork-server"])
        kill(gang.proxy)

    outcome = inject_and_retry(cause, gang.session.list_workers)
    gang.lost("kill -9 of the fork server and a proxy", outcome, "was lost")


@pytest.mark.cell("agent", "in a call", "private", "goes on")
def test_a_gang_outlives_its_agent(gang: Gang) -> None:
    old = agent_pids()
    outcome = inject_during(gang.kill_agent, lambda: gang.lib.churn(0.6))
    assert outcome.error is None
    assert gang.works()
    start = traces.clock()
    gang.session.yield_workers()
    gang.start()
    seconds = traces.clock() - start
    record("kill -9 of the agent: gang unharmed, next one ready", seconds, None, "-")
    new = agent_pids()
    assert new["agent"] != old["agent"]
    gang.session.yield_workers()
    assert_clean(gang.before)
    gang.start()


@pytest.mark.cell("agent", "idle", "private", "goes on")
def test_a_gang_started_by_a_lost_agent_leaves_nothing(gang: Gang) -> None:
    gang.kill_agent()
    outcome = inject_and_retry(lambda: kill(gang.proxy), gang.session.list_workers)
    gang.lost("kill -9 of the agent, then of a proxy", outcome, "was lost")


@pytest.mark.cell("Driver", "idle", "private", "goes on")
def test_a_gang_outlives_the_driver_actor(gang: Gang) -> None:
    reserved = {what for what in left() if what.startswith("placement group")}
    kill(pid_of(find_driver()))
    assert gang.works()
    ray.get(find_driver().prewarm.remote())  # it has started again
    assert reserved <= left(), "CPUs of gangs that live are free for others"
    gang.session.yield_workers()
    assert_clean(gang.before)
    start = traces.clock()
    gang.start()
    record(
        "kill -9 of the Driver: gang unharmed, next one ready", traces.clock() - start, None, "-"
    )


# --- the user's program ---


@pytest.fixture
def before(gang: Gang) -> set[str]:
    """Return the processes and files that existed before the program."""
    return left()


def ends(
    fault: str, ranks: list[int], cause: Callable[[], Any], before: set[str], cpus: float
) -> None:
    """Check that ranks end with their program, and that the CPUs are free again."""
    assert len(ranks) == 2
    traces.note_segments()
    start = float(cause() or time.monotonic())
    gone = traces.wait_until(lambda: not any(map(traces.alive, ranks)), ERROR_LIMIT_S)
    assert gone is not None
    error_s = time.monotonic() - start
    assert_clean(before)
    assert wait_for_cpus(cpus, ERROR_LIMIT_S)
    record(fault, error_s, time.monotonic() - start, "(ranks and CPUs gone)")


@pytest.mark.cell("program", "in a call", "private", "ends")
@pytest.mark.cell("program", "idle", "private", "ends")
@pytest.mark.parametrize(
    ("fault", "then", "cause"),
    [
        ("kill -9, gang idle", "time.sleep(60)", lambda program: program.process.kill()),
        ("kill -9, gang computing", "lib.churn(60.0)", lambda program: program.process.kill()),
        ("SIGTERM", SAVES, lambda program: program.process.terminate() or float(program.line())),
        ("sys.exit, session not closed", EXITS, lambda program: float(program.line())),
    ],
)
def test_a_program_that_ends_leaves_nothing(
    gang: Gang, before: set[str], fault: str, then: str, cause: Any
) -> None:
    cpus = free_cpus()
    with Program(PROGRAM.format(library=str(LIBRARY), then=then)) as program:
        ranks = list(map(int, program.said.split()))
        time.sleep(0.5)
        ends(f"the user's program: {fault}", ranks, lambda: cause(program), before, cpus)


@pytest.mark.cell("program", "starting", "private", "ends")
def test_a_program_killed_while_it_waits_for_cpus_leaves_nothing(before: set[str]) -> None:
    with Program('print("here", flush=True); AlchemistSession(6)') as program:
        assert program.said
        queued = traces.wait_until(lambda: any("placement" in what for what in left() - before), 20)
        assert queued is not None
        program.kill()
    gone_s = assert_clean(before)
    record("kill -9 of a program that waits for CPUs", gone_s, gone_s, "(reservation gone)")


@pytest.mark.cell("program", "idle", "private", "ends")
def test_a_killed_actor_ends_its_gang(before: set[str]) -> None:
    """A session inside a Ray actor, as in RLlib's env runners."""
    cpus = free_cpus()
    owner: Any = ray.remote(Owner).options(num_cpus=0).remote()
    ranks, pid = ray.get(owner.begin.remote()), pid_of(owner)
    ends("kill -9 of a Ray actor that has a session", ranks, lambda: kill(pid), before, cpus)


class Owner:
    """An actor with a session."""

    def begin(self) -> list[int]:
        self.session = AlchemistSession(2)
        return [worker.pid for worker in self.session.list_workers()]


def test_an_interrupted_launch_leaves_nothing(gang: Gang) -> None:
    """Ctrl-C while the session waits for CPUs."""
    before = left()
    rest = AlchemistSession(2)
    waiting = AlchemistSession()
    timer = None
    try:
        timer = subprocess.Popen(["sh", "-c", f"sleep 1; kill -INT {os.getpid()}"])
        with pytest.raises(KeyboardInterrupt):
            waiting.request_workers(3)
        rest.close()
        assert_clean(before)
        assert len(waiting.request_workers(2)) == 2
    finally:
        if timer is not None:
            with contextlib.suppress(KeyboardInterrupt):  # if another error was raised first
                timer.wait()
        rest.close()
        waiting.close()
    assert_clean(before)
