"""Elastic gangs, ``num_workers=(min, max)``: their number of ranks follows the cluster.

Such a gang starts with the CPUs that are free, and grows when more become free. On a cluster with
an autoscaler a reservation that waits has it bring nodes. When a node is being taken away, the gang
moves to the others. All of this only reserves CPUs and resizes the gang, as users do.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, replace
from typing import Any

import ray
from ray.exceptions import RayError

from alchemist_ray.attached.address import GangAddress
from alchemist_ray.attached.options import RankResources
from alchemist_ray.background import in_pool
from alchemist_ray.cluster.placement import Growth
from alchemist_ray.errors import AlchemistError, ResourceError
from alchemist_ray.runtime.commands.nodes import Nodes
from alchemist_ray.runtime.launch.gang_cpus import GangCpus
from alchemist_ray.runtime.launch.gang_request import GangRequest

POLL_INTERVAL_S = 2.0  # between looks at the free CPUs
MOST_PAUSE_S = 300.0  # between attempts to grow that fail
FREE_LIMIT_S = 5.0  # to reserve CPUs that were free a moment ago
NODE_LIMIT_S = 600.0  # for an autoscaler to bring a node; then it is asked again


@dataclass(eq=False)
class Elastic:
    """The size of one gang, if its request has bounds; otherwise nothing happens.

    Attributes
    ----------
    cpus : GangCpus
    resize : callable(workers)
    address : callable() -> GangAddress or None
        Of the gang; None while it has no ranks.
    begin : callable(coroutine) -> Task
        Runs it until the gang ends.
    """

    cpus: GangCpus
    resize: Callable[[int], Awaitable[None]]
    address: Callable[[], GangAddress | None]
    begin: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]]
    _growing: asyncio.Task[None] | None = None

    async def started(self, request: GangRequest) -> GangRequest:
        """The request with as many ranks as there are CPUs now, which are reserved."""
        if request.bounds is None:
            return request
        least, most = request.bounds
        free = await in_pool(free_ranks, request.options.each)
        if (workers := min(most, free)) > least:
            try:
                await self.cpus.reserve(workers, FREE_LIMIT_S)
                return replace(request, workers=workers)
            except (ResourceError, TimeoutError):
                pass  # others were faster
        return replace(request, workers=least)

    def watch(self, request: GangRequest) -> None:
        """Have the gang grow."""
        if request.bounds is None:
            return
        _, most = request.bounds
        if self._growing is None:
            self._growing = self.begin(self._grow(request.options.each, most))

    def stop_growing(self) -> None:
        """The user has resized the gang."""
        if self._growing is not None:
            self._growing.cancel()

    async def _grow(self, each: RankResources, most: int) -> None:
        pause_s, said = POLL_INTERVAL_S, ""
        while True:
            await asyncio.sleep(pause_s)
            address = self.address()
            if address is None or address.size >= most:
                continue
            try:
                free = await in_pool(free_ranks, each)
                growth = Growth.here()
                if free > 0:
                    await self.cpus.reserve(min(most, address.size + free), FREE_LIMIT_S)
                elif growth is not None:
                    node = max(1, each.room(growth.node))
                    await self.cpus.reserve(min(most, address.size + node), NODE_LIMIT_S)
                else:
                    continue
                await self.resize(min(most, self.cpus.count))
                pause_s = POLL_INTERVAL_S
            except (ResourceError, TimeoutError):
                continue  # others were faster
            except (AlchemistError, RayError) as error:  # it may come again: less and less often
                pause_s = min(2 * pause_s, MOST_PAUSE_S)
                await self.cpus.keep(address.size)
                if said != (said := str(error)):
                    sys.stderr.write(f"the gang does not grow; it is tried again later: {error}\n")

    def leave(self, request: GangRequest, nodes: Nodes, error: AlchemistError) -> bool:
        """Move to the other nodes, if they have CPUs for enough ranks."""
        address = self.address()
        if address is None or request.bounds is None:
            return False
        least, _ = request.bounds
        left = self.cpus.avoid(address.node_ids[error.facts["node"]])
        if left >= least:
            self.begin(self._move_away(nodes, error, left))
        return left >= least

    async def _move_away(self, nodes: Nodes, error: AlchemistError, workers: int) -> None:
        try:
            await self.resize(workers)
        except AlchemistError:
            nodes.fail(error)


def free_ranks(each: RankResources) -> int:
    """For how many more ranks CPUs, and GPUs if they need some, are free."""
    return each.room(ray.available_resources())
