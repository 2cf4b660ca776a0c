"""Files of users' functions: from the GroupManager to the folder of the gang on every node."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

from alchemist_ray.functions.node_files import Data
from alchemist_ray.runtime.ray_calls import result_of


async def stage(agents: Iterable[Any], incarnation: str, name: str, data: Data) -> None:
    """Put a file into the folder of a gang on the nodes of these agents."""
    await asyncio.gather(
        *(
            # The gang does not depend on the agent: wait for one that is being restarted.
            result_of(agent.stage.options(max_task_retries=-1).remote(incarnation, name, data))
            for agent in agents
        )
    )
