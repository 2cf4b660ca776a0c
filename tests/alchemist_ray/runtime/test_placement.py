"""Where ranks go: strategies over several nodes, clusters that grow, agents that must go."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys

import pytest
import ray

from alchemist_ray import AlchemistSession
from alchemist_ray.errors import ResourceError
from alchemist_ray.runtime.agent import Agent
from alchemist_ray.runtime.cluster import autoscaling
from alchemist_ray.runtime.cluster.autoscaling import VARIABLE, Growth, Retirement
from alchemist_ray.runtime.cluster.placement import check_capacity
from alchemist_ray.runtime.driver import start_actor

# Two nodes of 2 CPUs on this machine; the third comes when a gang waits, as with an autoscaler.
NODES = """
import json, signal, threading, time
import ray
from ray.cluster_utils import Cluster
from alchemist_ray import AlchemistSession
from alchemist_ray.errors import AlchemistError

def late(*_):
    raise TimeoutError("the whole test")

def gang(name, workers, strategy, **more):
    try:
        with AlchemistSession(workers, strategy=strategy, **more) as als:
            told[name] = [w.node_id for w in als.list_workers()]
    except AlchemistError as error:
        told[name] = f"{type(error).__name__}: {error}"

signal.signal(signal.SIGALRM, late)
signal.alarm(90)
store = {"object_store_memory": 80 << 20}
told = {}
cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, **store})
try:
    cluster.add_node(num_cpus=2, **store)
    ray.init(address=cluster.address, log_to_driver=False)
    gang("apart", 2, "STRICT_SPREAD")
    gang("together", 2, "STRICT_PACK")
    gang("too close", 3, "STRICT_PACK")
    gang("too far apart", 4, "STRICT_SPREAD")
    gang("does not come", 3, "STRICT_SPREAD", start_timeout_s=1)
    waits = threading.Thread(target=gang, args=("waits", 3, "STRICT_SPREAD"))
    waits.start()
    while not any(p["state"] == "PENDING" for p in ray.util.placement_group_table().values()):
        time.sleep(0.05)
    cluster.add_node(num_cpus=2, **store)
    waits.join()
    print(json.dumps(told))
finally:
    ray.shutdown()
    cluster.shutdown()
"""


def test_strategies_hold_on_present_and_added_nodes() -> None:
    done = subprocess.run(
        [sys.executable, "-c", NODES],
        env={**os.environ, VARIABLE: "3x2"},
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    told = json.loads(done.stdout.splitlines()[-1])
    assert len(set(told["apart"])) == 2, told["apart"]
    assert len(set(told["together"])) == 1, told["together"]
    assert len(set(told["waits"])) == 3, told["waits"]
    assert "room for 2 on one node (strategy='STRICT_PACK')" in told["too close"]
    assert "can grow to 6 CPUs on 3 nodes, room for 3, one to a node" in told["too far apart"]
    assert "may grow to 3 nodes of 2 CPUs: increase start_timeout_s" in told["does not come"]


def test_a_strategy_that_cannot_be_is_refused_at_once(cluster: str) -> None:
    with pytest.raises(ValueError, match=r"strategy must be one of PACK, SPREAD.*; got 'NEAR'"):
        AlchemistSession(strategy="NEAR")
    with pytest.raises(ValueError, match="the CPUs are reserved already"):
        AlchemistSession(strategy="SPREAD", placement="inherit")
    with (
        AlchemistSession(strategy="STRICT_SPREAD") as als,
        pytest.raises(ResourceError, match="room for 1, one to a node"),
    ):
        als.request_workers(2)


def test_an_autoscaling_cluster_counts_with_its_maximum_size(
    cluster: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, "3x8")  # the node of 8 CPUs that is there is one of the three
    check_capacity(24, 1.0)
    with pytest.raises(ResourceError, match="can grow to 24 CPUs on 3"):
        check_capacity(25, 1.0)
    monkeypatch.setenv(VARIABLE, "many")
    with pytest.raises(ResourceError, match="ALCHEMIST_GROWS_TO='many'"):
        check_capacity(1, 1.0)
    monkeypatch.delenv(VARIABLE)
    with pytest.raises(ResourceError, match="has 8 CPUs on 1"):
        check_capacity(9, 1.0)


def test_growth_counts_nodes_without_cpus_for_nothing() -> None:
    assert Growth(2, 4.0).grown([0.0]) == [4.0, 4.0]
    assert Growth(2, 4.0).grown([0.0, 4.0]) == [4.0, 4.0]
    assert Growth(1, 4.0).grown([0.0, 4.0, 2.0]) == [4.0, 2.0]


def test_an_agent_goes_when_no_gang_is_on_its_node(
    session: AlchemistSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(autoscaling, "POLL_INTERVAL_S", 0.05)
    monkeypatch.setattr(autoscaling, "IDLE_S", 0.5)
    agent = start_actor(Agent, {"num_cpus": 0})
    ray.get(agent.ready.remote())
    agents = {"here": agent}

    async def looked_at(seconds: float) -> None:
        watch = asyncio.ensure_future(retirement.watch())
        done, _ = await asyncio.wait([watch], timeout=seconds)
        watch.cancel()
        assert not done, "it must look for as long as the Driver lives"

    retirement = Retirement(agents)
    assert not ray.get(agent.idle.remote())
    asyncio.run(looked_at(1.5))
    assert agents  # a gang is here
    session.yield_workers()
    retirement.asked_for("here")
    asyncio.run(looked_at(0.3))
    assert agents  # somebody has just asked for it
    asyncio.run(looked_at(1.5))
    assert not agents
    with pytest.raises(ray.exceptions.RayActorError):
        ray.get(agent.idle.remote())
