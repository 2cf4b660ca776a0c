"""Files of users' functions: from the GroupManager to the folder of the gang on every node."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from typing import Any

from ray.exceptions import ActorUnschedulableError, RayActorError, RayError

from alchemist_ray.errors import TransferError
from alchemist_ray.functions.node_files import Data
from alchemist_ray.runtime.cluster.ray_calls import result_of
from alchemist_ray.runtime.launch.nodes import Nodes

CHECK_INTERVAL_S = 5.0  # how often an agent that has not answered is looked for
AGENT_RESTART_S = 15.0  # for Ray to start an agent again


async def stage(
    nodes: Nodes, agents: Iterable[Any], incarnation: str, name: str, data: Data
) -> None:
    """Put a file into the folder of a gang on its nodes.

    Raises
    ------
    GroupFailedError
        What ended the gang meanwhile.
    TransferError
        If the gang's ranks run on a node where Ray does not.
    """
    await nodes.unless_ended(
        asyncio.gather(
            *(
                _stage_on(nodes.host(node), agent, incarnation, name, data)
                for node, agent in enumerate(agents)
            )
        )
    )


async def _stage_on(host: str, agent: Any, incarnation: str, name: str, data: Data) -> None:
    # The gang does not depend on the agent: wait for one that is being restarted.
    call = agent.stage.options(max_task_retries=-1).remote(incarnation, name, data)
    staging = asyncio.ensure_future(result_of(call))
    deadline = time.monotonic() + AGENT_RESTART_S
    while not (await asyncio.wait([staging], timeout=CHECK_INTERVAL_S))[0]:
        try:
            await asyncio.wait_for(result_of(agent.ready.remote()), CHECK_INTERVAL_S)
            deadline = time.monotonic() + AGENT_RESTART_S
        except (RayError, TimeoutError):
            if time.monotonic() >= deadline:
                staging.cancel()
                raise _not_there(host) from None
    try:
        staging.result()
    except (RayActorError, ActorUnschedulableError) as error:
        raise _not_there(host) from error


def _not_there(host: str) -> TransferError:
    return TransferError(
        f"the function was not sent to node {host}, because the agent there does not answer: has "
        "Ray ended on that node? Routines of loaded libraries still run; request_workers() starts "
        "a gang on the nodes that Ray has"
    )
