"""Random sessions: nothing waits for ever, nothing is torn, lost or leaked, nothing grows."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from alchemist_ray.gateway.server.access import TokenFile
from tests.alchemist_ray.gateway.conftest import blocking, serving, thin_environment
from tests.faults.conftest import agent_pids, assert_clean, left, record
from tests.sessions import measure
from tests.sessions.machine import Sessions, World
from tests.support import traces
from tests.support.breakable_link import BreakableLink
from tests.support.suite import scaled

RUNS = scaled(25, 9_000)
STEPS = 12
WARM_UP = 10
LEASE_LIMIT_S = 75.0  # a lost process keeps its matrices for 60 s


@pytest.fixture
def world(cluster: str, tmp_path: Path) -> Iterator[World]:
    before = left()
    tokens = TokenFile(tmp_path / "tokens.json")
    token = tokens.create("anna", ("call", "run_code", "files"), groups=("cluster",))
    with serving(tmp_path, tokens) as gateway:
        link = BreakableLink(gateway.port)
        there = {"address": f"alchemist://127.0.0.1:{link.port}", "token": token}
        thin = thin_environment(there, HOME=str(tmp_path))
        join = f"import ray\nray.init(address={cluster!r}, log_to_driver=False)"
        programs = {"attached": (join, dict(os.environ)), "thin": (blocking(), thin)}
        made = World(tmp_path, programs, link)
        yield made
        made.end()
        link.close()
    agent_pids()  # the agent was killed and stands again
    assert_clean(before)


@pytest.mark.timeout(RUNS * 3 + 300, func_only=True)
def test_random_sessions(world: World) -> None:
    Sessions.world = world

    def run(count: int) -> None:
        try:
            run_state_machine_as_test(
                Sessions,
                settings=settings(
                    max_examples=count, stateful_step_count=STEPS, database=None,
                    phases=[Phase.generate], suppress_health_check=list(HealthCheck),
                    print_blob=False,
                ),
            )  # fmt: skip
        except Exception as error:  # of a repetition, which has no failure any more
            raise (world.failure or error) from error

    run(WARM_UP)
    report = measure.Report(measure.held())
    run(RUNS)
    report.after = measure.held()
    told = ", ".join(f"{what} {count}" for what, count in sorted(world.done.items()))
    record(f"{RUNS} random sessions", 0.0, None, told)

    left: list[int] = []

    def freed() -> bool:
        owner = world.users["owner"]
        for key in list(world.named):
            owner.begin("take", key).result(60)
            if not owner.begin("free", key).result(60):
                world.named.discard(key)
        left[:] = owner.begin("ids").result(60)
        return not left

    assert traces.wait_until(freed, LEASE_LIMIT_S, 1.0) is not None, (
        f"not freed: {left}; those of lost processes were {world.lingering}"
    )
    assert measure.excess(report) == [], measure.table(report)
