"""Processes that Ray starts, but that hang before they answer their first call."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest
import ray

from alchemist_ray import AlchemistSession
from alchemist_ray.cluster import driver
from alchemist_ray.cluster.driver import find_driver
from alchemist_ray.ray_access import catalogue, ray_gangs
from tests.faults.conftest import Gang, agent_pids, left, pid_of, variables
from tests.support import commands, traces

FROZEN = """
    import os, signal, ray
    ray.init(address={address!r}, log_to_driver=False)
    from alchemist_ray import AlchemistSession
    from alchemist_ray.ray_access import ray_gangs
    ray_gangs.HANGS_S = 1.0
    with AlchemistSession() as als:
        manager = als._gangs._own.actor
        pid = ray.get(manager.__ray_call__.remote(lambda self: os.getpid()))
        os.kill(pid, signal.SIGSTOP)
        als.request_workers(2)
        print(pid, als.run(lambda comm: comm.allreduce(1)))
"""


def gone(pid: int) -> bool:
    return traces.wait_until(lambda: pid not in traces.processes(), 10.0, 0.05) is not None


@pytest.mark.cell("GroupManager", "starting", "private", "goes on")
def test_a_private_gang_gets_another_manager(cluster: str) -> None:
    done = commands.python(FROZEN.format(address=cluster))
    pid, _, ranks = done.stdout.strip().partition(" ")
    assert ranks == "2", done.stderr
    assert "does not answer: another one is started" in done.stderr
    assert gone(int(pid))


@pytest.mark.cell("GroupManager", "starting", "named", "goes on")
def test_a_named_gang_gets_another_manager(cluster: str, monkeypatch: pytest.MonkeyPatch) -> None:
    frozen: list[int] = []

    def start(lifetime: Any) -> Any:
        manager = catalogue.start_named(lifetime)
        if not frozen:
            frozen.append(pid_of(manager.actor))
            os.kill(frozen[0], signal.SIGSTOP)
        return manager

    monkeypatch.setattr(ray_gangs, "start_named", start)
    monkeypatch.setattr(ray_gangs, "HANGS_S", 1.0)
    before = left()
    with AlchemistSession(2, name="frozen") as als:
        assert als.run(lambda comm: comm.allreduce(1)) == 2
    assert gone(frozen[0])
    assert traces.wait_until(lambda: left() <= before, 10.0, 0.05) is not None


@pytest.mark.cell("agent", "starting", "private", "goes on")
def test_an_agent_that_has_never_answered_is_replaced(gang: Gang) -> None:
    with AlchemistSession(1):
        pids = agent_pids()
    agent = pids["agent"]
    gang.before.add(f"process {pids['fork-server']}")  # it stays while a gang has a proxy
    os.kill(pid_of(find_driver()), signal.SIGKILL)  # Ray starts it again: it knows no agent
    os.kill(agent, signal.SIGSTOP)
    with variables(find_driver(), driver, AGENT_TIMEOUT_S=1.0):
        assert ray.get(find_driver().prewarm.remote(), timeout=20) == 0
    assert gone(agent)
    with traces.within(30), AlchemistSession(1) as als:
        assert als.run(lambda comm: comm.size) == 1
    assert agent_pids()["agent"] != agent
