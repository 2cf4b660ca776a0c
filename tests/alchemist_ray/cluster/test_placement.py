"""Where ranks go: strategies over several nodes, clusters that grow, agents that must go."""

from __future__ import annotations

import asyncio

import pytest
import ray

from alchemist_ray import AlchemistSession
from alchemist_ray.attached.options import RankResources
from alchemist_ray.cluster import agent as agent_module
from alchemist_ray.cluster import driver
from alchemist_ray.cluster.agent import Agent
from alchemist_ray.cluster.driver import Driver, start_actor
from alchemist_ray.cluster.placement import VARIABLE, Growth, check_capacity
from alchemist_ray.errors import ResourceError
from tests.alchemist_ray.runtime.test_elastic import BEGIN, ran

# Two nodes of 2 CPUs on this machine; the third comes when a gang waits, as with an autoscaler.
NODES = (
    BEGIN
    + """
from alchemist_ray.errors import AlchemistError

def gang(name, workers, strategy, **more):
    try:
        with AlchemistSession(workers, strategy=strategy, **more) as als:
            told[name] = [w.node_id for w in als.list_workers()]
    except AlchemistError as error:
        told[name] = f"{type(error).__name__}: {error}"

told = {}
with nodes(2, 2) as cluster:
    gang("apart", 2, "STRICT_SPREAD")
    gang("together", 2, "STRICT_PACK")
    gang("too close", 3, "STRICT_PACK")
    gang("too far apart", 4, "STRICT_SPREAD")
    gang("does not come", 3, "STRICT_SPREAD", start_timeout_s=1)
    waits = threading.Thread(target=gang, args=("waits", 3, "STRICT_SPREAD"))
    waits.start()
    groups = lambda: ray.util.placement_group_table().values()
    until(lambda: any(group["state"] == "PENDING" for group in groups()))
    cluster.add_node(num_cpus=2, **store)
    waits.join()
    print(json.dumps(told))
"""
)


def test_strategies_hold_on_present_and_added_nodes() -> None:
    told = ran(NODES, **{VARIABLE: "3x2"})
    assert len(set(told["apart"])) == 2, told["apart"]
    assert len(set(told["together"])) == 1, told["together"]
    assert len(set(told["waits"])) == 3, told["waits"]
    assert "room for 2 on one node (strategy='STRICT_PACK')" in told["too close"]
    assert "can grow to 6 CPUs on 3 nodes, room for 3, one to a node" in told["too far apart"]
    assert "may grow to 3 nodes of 2 CPUs: increase start_timeout_s" in told["does not come"]


def test_a_strategy_that_cannot_be_is_refused_at_once(cluster: str) -> None:
    with (
        AlchemistSession(strategy="STRICT_SPREAD") as als,
        pytest.raises(ResourceError, match="room for 1, one to a node"),
    ):
        als.request_workers(2)


def test_an_autoscaling_cluster_counts_with_its_maximum_size(
    cluster: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, "3x8")  # the node of 8 CPUs that is there is one of the three
    check_capacity(24, RankResources(1.0))
    with pytest.raises(ResourceError, match="can grow to 24 CPUs on 3"):
        check_capacity(25, RankResources(1.0))
    monkeypatch.setenv(VARIABLE, "many")
    with pytest.raises(ResourceError, match="ALCHEMIST_GROWS_TO='many'"):
        check_capacity(1, RankResources(1.0))
    monkeypatch.delenv(VARIABLE)
    with pytest.raises(ResourceError, match="has 8 CPUs on 1"):
        check_capacity(9, RankResources(1.0))


def test_growth_counts_nodes_without_cpus_for_nothing() -> None:
    none, two, four = {}, {"CPU": 2.0}, {"CPU": 4.0}
    future = {"CPU": 4.0, "GPU": 1.0}
    assert Growth(2, 4.0, 1.0).grown([none]) == [future, future]
    assert Growth(2, 4.0, 1.0).grown([none, four]) == [four, future]
    assert Growth(1, 4.0).grown([none, four, two]) == [four, two]


def test_an_agent_goes_when_no_gang_is_on_its_node(
    session: AlchemistSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver, "RETIRE_INTERVAL_S", 0.05)
    agent = start_actor(Agent)
    ray.get(agent.ready.remote())
    ray.get(agent.__ray_call__.remote(lambda _: setattr(agent_module, "IDLE_S", 0.5)))

    async def retire(seconds: float) -> bool:
        """Whether the agent stays; the Driver must look for as long as it lives."""
        known = Driver("edition", None)
        known._agents["here"] = agent
        watch = asyncio.ensure_future(known._retire())
        done, _ = await asyncio.wait([watch], timeout=seconds)
        watch.cancel()
        assert not done
        return bool(known._agents)

    assert asyncio.run(retire(1.5)), "a gang is here"
    session.yield_workers()
    ray.get(agent.ready.remote())
    assert asyncio.run(retire(0.3)), "a gang is about to start"
    assert not asyncio.run(retire(1.5))
    with pytest.raises(ray.exceptions.RayActorError):
        ray.get(agent.idle.remote())
