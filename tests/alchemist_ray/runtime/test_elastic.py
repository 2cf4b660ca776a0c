"""``num_workers=(min, max)``: gangs that start with what there is, grow, and leave nodes."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from alchemist_ray.errors import LibraryLoadError
from alchemist_ray.runtime import elastic as elastic_gangs
from tests.support import commands

X = np.random.default_rng(0).random((300, 40))

BEGIN = """
import contextlib, json, os, signal, sys, threading, time
import numpy as np
import ray
from alchemist_ray import AlchemistSession
from alchemist_ray.errors import ResourceError
from tests.support import traces

def late(*_):
    raise TimeoutError("the whole test")

def until(condition):
    while not condition():
        time.sleep(0.1)

def free(cpus):  # Ray reports them late
    until(lambda: ray.available_resources().get("CPU", 0) == cpus)

@contextlib.contextmanager
def nodes(*cpus):
    from ray.cluster_utils import Cluster
    head, *others = [{"num_cpus": count, "object_store_memory": 80 << 20} for count in cpus]
    cluster = Cluster(initialize_head=True, head_node_args=head)
    try:
        for node in others:
            cluster.add_node(**node)
        ray.init(address=cluster.address, log_to_driver=False)
        yield cluster
    finally:
        ray.shutdown()
        cluster.shutdown()

signal.signal(signal.SIGALRM, late)
signal.alarm(170)
store = {"object_store_memory": 80 << 20}
X = np.random.default_rng(0).random((300, 40))
"""

# A cluster of its own: gangs of other tests hold CPUs of the common one.
STARTING = (
    BEGIN
    + """
ray.init(address="local", num_cpus=8, include_dashboard=False, log_to_driver=False, **store)
sizes = []
with AlchemistSession(5):
    free(3)
    with AlchemistSession((2, 5)) as als:
        sizes.append(len(als.list_workers()))
free(8)
with AlchemistSession((2, 5)) as als:
    sizes.append(len(als.list_workers()))
free(8)
other = AlchemistSession(5)
free(3)
with AlchemistSession((2, 4)) as als:
    sizes.append(len(als.list_workers()))
    A = als.send_matrix(X, layout="MC_MR")
    other.close()
    until(lambda: len(als.list_workers()) == 4)
    sizes.append(len(als.list_workers()))
    assert np.array_equal(A.fetch(), X)
    als.resize(2)  # the user knows better
    time.sleep(6)
    sizes.append(len(als.list_workers()))
    assert np.array_equal(A.fetch(), X)
free(8)
with AlchemistSession(7):
    free(1)
    try:
        AlchemistSession((2, 5), start_timeout_s=2)
    except ResourceError as error:
        refused = str(error)
ray.shutdown()
print(json.dumps({"sizes": sizes, "refused": refused}))
"""
)

# Two nodes of 2 CPUs on this machine; one is taken away.
LEAVING = (
    BEGIN
    + """
with nodes(2, 2), AlchemistSession((2, 4)) as als:
    A = als.send_matrix(X, layout="MC_MR")
    before = als.list_workers()
    leaving = before[-1]
    os.kill(traces.parent_of(leaving.pid), signal.SIGTERM)
    until(lambda: len(als.list_workers()) == 2)
    after = als.list_workers()
    assert np.array_equal(A.fetch(), X)
    print(json.dumps({"before": len(before), "after": len(after),
                      "there": leaving.node_id in {w.node_id for w in after}}))
"""
)


def ran(program: str, *arguments: str, **environment: str) -> dict[str, Any]:
    """The JSON object on the last line that a program prints."""
    done = commands.python(program, *arguments, code=0, limit_s=185, **environment)
    told: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return told


def test_a_gang_starts_with_what_there_is_and_grows() -> None:
    told = ran(STARTING)
    assert told["sizes"] == [3, 5, 3, 4, 2]
    assert "not enough free CPUs for 2 workers" in told["refused"]


def test_a_gang_leaves_a_node_that_is_taken_away() -> None:
    told = ran(LEAVING)
    assert (told["before"], told["after"], told["there"]) == (4, 2, False)


def test_growth_that_fails_is_tried_less_and_less_often_and_told_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A library whose file had been edited started an incarnation every 3 s, without a word."""
    tries: list[float] = []

    async def resize(workers: int) -> None:
        tries.append(asyncio.get_running_loop().time())
        raise LibraryLoadError("mine.py has changed since library 'mine' was loaded")

    class Cpus:
        count = 4

        async def reserve(self, workers: int, limit_s: float) -> None:
            """They are free."""

        async def keep(self, workers: int) -> None:
            assert workers == 2

    async def grow() -> None:
        address: Any = SimpleNamespace(size=2)
        cpus: Any = Cpus()
        elastic = elastic_gangs.Elastic(cpus, resize, lambda: address, asyncio.create_task)
        growing = asyncio.create_task(elastic._grow(1.0, 4))
        await asyncio.wait([growing], timeout=2.0)
        growing.cancel()

    monkeypatch.setattr(elastic_gangs, "POLL_INTERVAL_S", 0.02)
    monkeypatch.setattr(elastic_gangs, "free_ranks", lambda each: 2)
    monkeypatch.setattr(elastic_gangs.Growth, "here", lambda: None)
    asyncio.run(grow())
    assert 2 <= len(tries) <= 7
    assert capsys.readouterr().err.count("mine.py has changed") == 1
