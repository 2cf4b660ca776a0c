"""The Driver: the actor that knows every node's agent and the CPUs of every gang of a cluster."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from functools import cache
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import ActorUnavailableError, RayActorError, RayError, RayTaskError
from ray.util.placement_group import PlacementGroup, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from alchemist_ray.background import in_task, in_time
from alchemist_ray.cluster.actors import (
    NAMESPACE,
    actors_named,
    agent_name,
    driver_name,
    edition,
    find_gang,
    gang_and_run,
    job_environment,
    reservation_name,
    result_of,
)
from alchemist_ray.cluster.agent import Agent
from alchemist_ray.cluster.placement import Bundles, Growth, ask_for
from alchemist_ray.cluster.user_limits import ClusterLimits
from alchemist_ray.errors import LaunchError

HEAD = "node:__internal_head__"  # Ray's resource of the head node
AGENT_TIMEOUT_S = 60.0
UNAVAILABLE_S = 0.5  # between calls of a manager that is unreachable but not dead
DYING_S = 1.0  # Ray may report an actor's death before its process has ended
RETIRE_INTERVAL_S = 5.0
ANSWER_S = 5.0
LOST_GANGS = 1000  # that are remembered
PREWARM_NODES = 64  # agents of larger clusters start with the first gang on their node


def start_actor(kind: type, *args: Any, **options: Any) -> ActorHandle:
    """An actor of this class that takes no CPU; with `get_if_exists`, the one of that name."""
    made = _actor_class(kind).options(namespace=NAMESPACE, num_cpus=0, **options)
    handle: ActorHandle = made.remote(*args)
    return handle


@cache
def _actor_class(kind: type) -> Any:
    """Ray keeps 15 KB for every actor class that is made, so each is made once."""
    return ray.remote(kind)


async def _idle(agent: ActorHandle) -> bool:
    try:
        return bool(await in_time(result_of(agent.idle.remote()), ANSWER_S))
    except (RayError, TimeoutError):
        return False  # lost with its node, or being restarted: check again later


class Driver:
    """Actor: see the module.

    Parameters
    ----------
    edition : str
        See `cluster/actors`; of the Driver and its agents.
    lifetime : str or None
        ``"detached"``, or None: agents and reservations end with the job.
    for_one_gang : bool
        Whether it ends, with its agents, when the GroupManager of its gang does.
    """

    def __init__(self, edition: str, lifetime: str | None, for_one_gang: bool = False) -> None:
        self._edition = edition
        self._for_one_gang = for_one_gang
        self._lifetime = lifetime
        self._agents: dict[str, ActorHandle] = {}
        self._answered: set[str] = set()  # nodes whose agent has answered once
        self._requests: Counter[str] = Counter()  # of each node's agent
        self._reservations: dict[str, PlacementGroup] = {}
        self._limits = ClusterLimits()
        self._lost: dict[str, float] = {}  # gangs whose manager has died, and when
        self._watches: set[asyncio.Task[None]] = set()
        self._recovered = False

    # --- reservations ---

    async def reserve(
        self,
        gang: str,
        run: str,
        bundles: Bundles,
        node_id: str,
        user: str = "",
        instead: bool = False,
    ) -> PlacementGroup:
        """Queue CPUs for a gang (its incarnation `run`), and watch its manager from then on.

        The GroupManager is on node `node_id`. `user`, `instead`: see `ClusterLimits`.

        The reservation is detached: it outlives this actor's restarts and the manager's death, so
        it is given back here.
        """
        self._recover()
        self._lost.pop(gang, None)
        if run not in self._reservations:
            self._limits.add(user, gang, run, sum(bundles.ranks), instead=instead)
            name = reservation_name(gang, run)
            group = ask_for(bundles, name, self._lifetime)
            self._guard(gang, run, group, node_id)
        return self._reservations[run]

    def _guard(
        self, gang: str, run: str, group: PlacementGroup, node_id: str | None = None
    ) -> None:
        self._reservations[run] = group
        in_task(self._watch(gang, run, group, node_id), self._watches)

    async def _watch(self, gang: str, run: str, group: PlacementGroup, node_id: str | None) -> None:
        """Give a gang's CPUs back, and clear up if its manager dies without having done so."""
        while True:
            try:
                await result_of(find_gang(gang).holding(run))
                died = False
                break
            except ActorUnavailableError:
                pass
            except (ValueError, RayActorError):
                died = True
                break
            except RayError:  # the manager lives, and its gang
                pass
            await asyncio.sleep(UNAVAILABLE_S)
        remove_placement_group(group)  # the manager may have given up before it was there
        if died and self._for_one_gang:
            await asyncio.sleep(DYING_S)  # no later gang sweeps its folder away
        if died and node_id in self._agents:
            with contextlib.suppress(RayError, TimeoutError):  # the node may be lost, too
                await in_time(result_of(self._agents[node_id].sweep.remote()), ANSWER_S)
        del self._reservations[run]
        self._limits.remove(run)
        if died:
            self._lost[gang] = time.time()
            for oldest in list(self._lost)[:-LOST_GANGS]:
                del self._lost[oldest]
        if died and self._for_one_gang:
            await self.close()

    def _recover(self) -> None:
        """At the first call, and so after a restart: watch over what is there."""
        if self._recovered:
            return
        self._recovered = True
        if Growth.here() is not None:
            for node_id in actors_named(agent_name(self._edition, "")):
                name = agent_name(self._edition, node_id)
                self._agents[node_id] = ray.get_actor(name, namespace=NAMESPACE)
            in_task(self._retire(), self._watches)
        table: dict[str, Any] = ray.util.placement_group_table()
        for ident, about in table.items():
            found = gang_and_run(about["name"])
            if found is not None and about["state"] != "REMOVED":
                self._guard(*found, PlacementGroup(ray.PlacementGroupID(bytes.fromhex(ident))))

    async def lost(self, gang: str) -> float | None:
        """When the GroupManager of a gang was lost, with the gang; None: not that is known."""
        return self._lost.get(gang)

    async def share_of_bytes(self, user: str, gang: str, nbytes: int) -> int | None:
        """See `ClusterLimits.share`."""
        return self._limits.share(user, gang, nbytes)

    # --- agents ---

    async def agents(self, node_ids: list[str]) -> list[tuple[ActorHandle, dict[str, Any]]]:
        """The agents of these nodes, ready to fork, each with facts about its node.

        Raises
        ------
        LaunchError
            If an agent does not start in time.
        """
        self._recover()
        return list(await asyncio.gather(*(self._agent(node_id) for node_id in node_ids)))

    async def _agent(self, node_id: str) -> tuple[ActorHandle, dict[str, Any]]:
        self._requests[node_id] += 1
        for attempt in (1, 2):
            agent = self._agents.get(node_id) or self._start_agent(node_id)
            try:
                # Waits for an agent that is being restarted.
                ready: Any = agent.ready.options(max_task_retries=-1)
                facts = await in_time(result_of(ready.remote()), AGENT_TIMEOUT_S)
                self._answered.add(node_id)
                return agent, facts
            except RayTaskError:
                raise  # the agent runs and reports what is wrong on its node
            except (RayError, TimeoutError) as error:
                self._agents.pop(node_id, None)
                if attempt == 2:
                    if node_id not in self._answered:  # it hangs: Ray starts another one
                        ray.kill(agent, no_restart=False)
                    raise LaunchError(
                        f"the agent of node {node_id[:12]} did not start within "
                        f"{AGENT_TIMEOUT_S:.0f} s: {type(error).__name__}. Is the node alive, and "
                        "is alchemist-on-ray installed on it?"
                    ) from error
        raise AssertionError("unreachable")

    def _start_agent(self, node_id: str) -> ActorHandle:
        agent = self._agents[node_id] = start_actor(
            Agent,
            name=agent_name(self._edition, node_id),
            lifetime=self._lifetime,
            get_if_exists=True,
            max_restarts=-1,
            max_concurrency=64,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False),
        )
        return agent

    async def _retire(self) -> None:
        """End idle agents, so that an autoscaler can remove their nodes."""
        while True:
            await asyncio.sleep(RETIRE_INTERVAL_S)
            for node_id, agent in list(self._agents.items()):
                requests = self._requests[node_id]
                if await _idle(agent) and self._requests[node_id] == requests:  # not in between
                    self._agents.pop(node_id, None)
                    ray.kill(agent)

    async def close(self) -> None:
        """End the agents and this actor."""
        for agent in self._agents.values():
            ray.kill(agent)
        ray.kill(ray.get_actor(driver_name(self._edition), namespace=NAMESPACE))

    async def prewarm(self) -> int:
        """Start the agents of all nodes of a small cluster; how many are warm."""
        nodes = [node["NodeID"] for node in ray.nodes() if node["Alive"]]
        if len(nodes) > PREWARM_NODES or Growth.here() is not None:  # or nodes stay
            return 0
        with contextlib.suppress(LaunchError, RayTaskError):
            return len(await self.agents(nodes))
        return 0


def find_driver(gang: str = "") -> ActorHandle:
    """The cluster's Driver for this job, or for a detached gang; started if it is not there."""
    own = bool(job_environment())
    lifetime = None if own and not gang else "detached"
    return start_actor(
        Driver,
        edition(gang),
        lifetime,
        bool(own and gang),
        name=driver_name(edition(gang)),
        lifetime=lifetime,
        get_if_exists=True,
        max_restarts=-1,
        # On the head: the cluster does not survive the loss of the head anyway.
        resources={HEAD: 0.001},
        # Not in the placement group of the first caller (a trial of Ray Tune): it ends earlier.
        scheduling_strategy="DEFAULT",
        max_task_retries=3,  # each call may be repeated: a restart is no error
    )


def end_own_driver(gang: str) -> None:
    """End the Driver and agents that a detached gang has for itself, if it has any."""
    if job_environment():
        with contextlib.suppress(ValueError):
            driver = ray.get_actor(driver_name(edition(gang)), namespace=NAMESPACE)
            driver.close.remote()
