"""Autoscaled clusters: how large they can grow; the end of agents on idle nodes.

Ray adds nodes for a gang's reservation that waits, and removes idle nodes. A node with an agent is
not idle: where the cluster shrinks, the Driver therefore ends the agents of nodes without a gang.
"""

from __future__ import annotations

import asyncio
import os
import re
import time
from dataclasses import dataclass

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayError

from alchemist_ray.errors import ResourceError

VARIABLE = "ALCHEMIST_GROWS_TO"  # "8x4": at most 8 nodes of 4 CPUs each
POLL_INTERVAL_S = 5.0
IDLE_S = 30.0  # an agent that was requested more recently is about to be used
ANSWER_S = 5.0


@dataclass(frozen=True, slots=True)
class Growth:
    """The largest cluster that an autoscaler may make, without nodes that have no CPUs."""

    nodes: int
    cpus: float

    @classmethod
    def here(cls) -> Growth | None:
        """From the environment; None for a cluster of fixed size. Raises `ResourceError`."""
        text = os.environ.get(VARIABLE, "")
        if not text:
            return None
        found = re.fullmatch(r"(\d+)x(\d+(?:\.\d+)?)", text)
        if found is None:
            raise ResourceError(
                f"{VARIABLE}={text!r}: it must be the maximum number of nodes and the CPUs of "
                "each, as in 8x4"
            )
        return cls(int(found[1]), float(found[2]))

    def grown(self, cpus: list[float]) -> list[float]:
        """CPUs of the present nodes (without those that have none), and of future ones."""
        there = [here for here in cpus if here > 0]
        return there + [self.cpus] * max(0, self.nodes - len(there))


class Retirement:
    """Ends agents of nodes without a gang, so that the autoscaler can remove the nodes.

    Parameters
    ----------
    agents : dict of str to actor
        Standing agents by node; those that are ended are removed.
    """

    def __init__(self, agents: dict[str, ActorHandle]) -> None:
        self._agents = agents
        self._asked: dict[str, float] = {}

    def asked_for(self, node_id: str) -> None:
        """Note that this node's agent is about to be used."""
        self._asked[node_id] = time.monotonic()

    def _young(self, node_id: str) -> bool:
        return time.monotonic() - self._asked.setdefault(node_id, time.monotonic()) < IDLE_S

    async def watch(self) -> None:
        """Check periodically while the Driver lives."""
        while True:
            await asyncio.sleep(POLL_INTERVAL_S)
            for node_id, agent in list(self._agents.items()):
                if self._young(node_id):
                    continue
                if not await _idle(agent):
                    self.asked_for(node_id)
                elif not self._young(node_id):  # not requested in between
                    self._agents.pop(node_id, None)
                    self._asked.pop(node_id, None)
                    ray.kill(agent)


async def _idle(agent: ActorHandle) -> bool:
    async def answer() -> bool:
        return bool(await agent.idle.remote())

    try:
        return await asyncio.wait_for(answer(), ANSWER_S)
    except (RayError, TimeoutError):
        return False  # lost with its node, or being restarted: check again later
