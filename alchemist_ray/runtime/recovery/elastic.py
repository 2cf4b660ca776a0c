"""Elastic gangs, ``num_workers=(min, max)``: they grow and shrink with the cluster.

A gang starts with the CPUs that are free, and is resized when more become free. On a cluster with
an autoscaler a reservation that waits has it bring nodes. When a node is being taken away, the
gang moves to the others.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import replace
from functools import partial
from typing import Any

import ray
from ray.exceptions import RayError

from alchemist_ray.errors import AlchemistError, ResourceError
from alchemist_ray.gang.address import GangAddress
from alchemist_ray.runtime.cluster.autoscaling import Growth
from alchemist_ray.runtime.launch.gang_cpus import GangCpus, in_thread
from alchemist_ray.runtime.launch.gang_request import GangRequest
from alchemist_ray.runtime.launch.nodes import Nodes

POLL_INTERVAL_S = 2.0
FREE_LIMIT_S = 5.0  # to reserve CPUs that were free a moment ago
NODE_LIMIT_S = 600.0  # for an autoscaler to bring a node; then it is asked again


class Elastic:
    """The size of one gang, if its request has bounds; otherwise nothing happens.

    Parameters
    ----------
    cpus : GangCpus
    resize : callable(workers)
    address : callable() -> GangAddress or None
        Of the gang; None while it has no ranks.
    begin : callable(coroutine) -> Task
        Runs it until the gang ends.
    """

    def __init__(
        self,
        cpus: GangCpus,
        resize: Callable[[int], Awaitable[None]],
        address: Callable[[], GangAddress | None],
        begin: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]],
    ) -> None:
        self._cpus = cpus
        self._resize = resize
        self._address = address
        self._begin = begin
        self._growing: asyncio.Task[None] | None = None

    async def started(self, request: GangRequest) -> GangRequest:
        """The request with as many ranks as there are CPUs now, which are reserved."""
        if request.bounds is None:
            return request
        least, most = request.bounds
        free = await in_thread(room, request.options.cpus)
        if (workers := min(most, free)) > least:
            try:
                await self._cpus.reserve(workers, FREE_LIMIT_S)
                return replace(request, workers=workers)
            except (ResourceError, TimeoutError):
                pass  # others were faster
        return replace(request, workers=least)

    def watch(self, request: GangRequest, nodes: Nodes) -> None:
        """Have the gang grow, and leave nodes of this incarnation that are being taken away."""
        if request.bounds is None:
            return
        least, most = request.bounds
        nodes.leave = partial(self._leave, nodes, least)
        if self._growing is None:
            self._growing = self._begin(self._grow(request.options.cpus, most))

    def stop_growing(self) -> None:
        """The user has resized the gang."""
        if self._growing is not None:
            self._growing.cancel()

    async def _grow(self, cpus: float, most: int) -> None:
        while True:
            await asyncio.sleep(POLL_INTERVAL_S)
            address = self._address()
            if address is None or address.size >= most:
                continue
            try:
                free, growth = await in_thread(room, cpus), Growth.here()
                if free > 0:
                    await self._cpus.reserve(min(most, address.size + free), FREE_LIMIT_S)
                elif growth is not None:
                    node = max(1, int(growth.cpus / cpus))
                    await self._cpus.reserve(min(most, address.size + node), NODE_LIMIT_S)
                else:
                    continue
                await self._resize(min(most, self._cpus.count))
            except (AlchemistError, RayError, TimeoutError):
                continue  # the gang goes on as it was

    def _leave(self, nodes: Nodes, least: int, error: AlchemistError) -> bool:
        """Move to the other nodes, if they have CPUs for enough ranks."""
        address = self._address()
        if address is None:
            return False
        left = self._cpus.avoid(address.node_ids[error.facts["node"]])
        if left >= least:
            self._begin(self._move_away(nodes, error, left))
        return left >= least

    async def _move_away(self, nodes: Nodes, error: AlchemistError, workers: int) -> None:
        try:
            await self._resize(workers)
        except AlchemistError:
            nodes.fail(error)


def room(cpus: float) -> int:
    """For how many more ranks CPUs are free."""
    return int(ray.available_resources().get("CPU", 0.0) / cpus + 1e-9)
