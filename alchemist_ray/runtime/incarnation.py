"""Incarnation: the ranks of a gang, their CPUs and sockets, from their start to their end."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import secrets
import time
from collections.abc import Callable
from typing import Any, TypeVar

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayError

from alchemist_ray.errors import AlchemistError, LaunchError
from alchemist_ray.gang.address import GangAddress
from alchemist_ray.launchers import LAUNCHERS, GangPlan, NodePlan
from alchemist_ray.plural import counted
from alchemist_ray.runtime.dispatcher import Dispatcher
from alchemist_ray.runtime.driver import find_driver
from alchemist_ray.runtime.gang_request import GangRequest
from alchemist_ray.runtime.placement import Reservation, check_capacity, reserved
from alchemist_ray.runtime.ray_calls import result_of
from mpi_workers.node.cleanup import PrivateFolder

T = TypeVar("T")
END_TIMEOUT_S = 5.0
LOST_NODE_TIMEOUT_S = 1.0  # the same for a node that was lost
POLL_INTERVAL_S = 1.0  # between checks of proxies that have not connected yet
KEEP_SHARE = 4  # a quarter of a node's free memory may be kept warm, for some seconds


class Incarnation:
    """One incarnation of a gang.

    Parameters
    ----------
    gang : str
    run : str
        Names the processes, folders and reservation of this incarnation.
    epoch : int
    request : GangRequest
    on_failure : callable(error)
        Called once when the gang is lost.
    on_orphaned : callable()
        Called when the owner's process is gone without a goodbye.

    Attributes
    ----------
    stage : str
        The step at which the start is, for messages.
    address : GangAddress or None
        When the ranks are ready, until they are released.
    dispatcher : Dispatcher or None
    agents : list of actor
        One per node.
    released : Event
        Set when the CPUs have been given back.
    """

    def __init__(
        self,
        gang: str,
        run: str,
        epoch: int,
        request: GangRequest,
        on_failure: Callable[[AlchemistError], None],
        on_orphaned: Callable[[], None],
    ) -> None:
        self._gang = gang
        self.run = run
        self._epoch = epoch
        self.request = request
        self._on_failure = on_failure
        self._on_orphaned = on_orphaned
        self.stage = ""
        self.address: GangAddress | None = None
        self.dispatcher: Dispatcher | None = None
        self.agents: list[ActorHandle] = []
        self.released = asyncio.Event()
        self._driver = find_driver(gang if request.lifetime.detached else "")
        self._reservation: Reservation | None = None
        self._folder: PrivateFolder | None = None

    async def start(self) -> GangAddress:
        """Start the ranks and wait until all have checked in.

        Raises
        ------
        ResourceError, LaunchError
            In time; nothing of the gang is left then.
        """
        request = self.request
        deadline = time.monotonic() + request.start_timeout_s
        try:
            return await self._start(request, deadline)
        except AlchemistError as error:
            await self.release(error)
            raise
        except TimeoutError:
            stage = self.stage
            await self.release(LaunchError("the gang did not start"))
            raise LaunchError(
                f"the gang of {counted(request.workers, 'worker')} did not start within "
                f"{request.start_timeout_s:.0f} s. Last stage: {stage}. All its processes were "
                "ended. If the nodes are slow, increase start_timeout_s"
            ) from None
        except (RayError, OSError) as error:
            await self.release(LaunchError("the gang did not start"))
            raise LaunchError(f"the gang did not start: {error}") from error

    async def _start(self, request: GangRequest, deadline: float) -> GangAddress:
        def left() -> float:
            return max(0.1, deadline - time.monotonic())

        self.stage = "waiting for CPUs"
        reservation = request.inherited or await self._reserve(request, left())
        self._reservation = reservation
        self.stage = "waiting for the nodes' agents"
        nodes = reservation.nodes
        found = await asyncio.wait_for(
            result_of(self._driver.agents.remote([node for node, _ in nodes])), left()
        )
        launcher = LAUNCHERS[request.launcher](os.environ | request.settings)
        order = launcher.order([about["name"] for _, about in found])
        nodes, found = tuple(nodes[i] for i in order), [found[i] for i in order]
        self.agents = [agent for agent, _ in found]
        facts = [about for _, about in found]
        token = secrets.token_hex(32)
        dispatcher = Dispatcher(
            len(nodes),
            request.workers,
            token,
            self._on_failure,
            self._on_orphaned,
            lease_grace_s=request.lifetime.lease_grace_s,
        )
        self.dispatcher = dispatcher
        self._folder = PrivateFolder(f"manager-{self.run}")
        await dispatcher.listen(ray.util.get_node_ip_address(), self._folder.socket("manager"))
        plan = GangPlan(
            gang=self.run,
            nodes=tuple(
                NodePlan(node, about["ip"], ranks, about["name"])
                for (node, ranks), about in zip(nodes, facts, strict=True)
            ),
            threads=request.threads,
            token=token,
            manager=tuple(dispatcher.addresses),
            keep_bytes=min(about["memory"] for about in facts) // KEEP_SHARE,
            start_timeout_s=request.start_timeout_s,
        )
        self.stage = "starting processes"
        specs = launcher.specs(plan)
        starting = [
            result_of(agent.launch.remote(spec))
            for agent, spec in zip(self.agents, specs, strict=True)
        ]
        await asyncio.wait_for(asyncio.gather(*starting), left())
        await self._checked_in(dispatcher, plan, deadline)
        node_ids = [node for node, _ in nodes]
        self.address = GangAddress(
            gang=self._gang,
            session=request.session,
            epoch=self._epoch,
            token=token,
            addresses=tuple(dispatcher.addresses),
            nodes=tuple(about for _, about in sorted(dispatcher.nodes.data.items())),
            workers=tuple(
                {**about, "node_id": node_ids[about["node"]], "ip": plan.nodes[about["node"]].ip}
                for _, about in sorted(dispatcher.nodes.ranks.items())
            ),
            incarnation=self.run,
            shared=request.lifetime.name is not None,
            lease_grace_s=request.lifetime.lease_grace_s,
            idle_timeout_s=request.lifetime.idle_timeout_s,
        )
        return self.address

    async def _reserve(self, request: GangRequest, limit_s: float) -> Reservation:
        await in_thread(check_capacity, request.workers, request.cpus, request.strategy)
        asked: Any = self._driver.reserve.remote(
            self._gang,
            self.run,
            request.workers,
            request.cpus,
            ray.get_runtime_context().get_node_id(),
            request.strategy,
        )
        group = await asyncio.wait_for(result_of(asked), limit_s)
        return await in_thread(
            reserved, group, request.workers, request.cpus, request.start_timeout_s
        )

    async def _checked_in(self, dispatcher: Dispatcher, plan: GangPlan, deadline: float) -> None:
        """Wait for all ranks, and notice proxies that ended before they connected.

        Raises what ended the gang, `LaunchError`, or `TimeoutError`.
        """
        while not dispatcher.nodes.ready.done():
            left = deadline - time.monotonic()
            await asyncio.wait(
                [dispatcher.nodes.ready], timeout=max(0.0, min(POLL_INTERVAL_S, left))
            )
            late = [
                plan.nodes[i].ip
                for i in dispatcher.nodes.not_ready()
                if not dispatcher.nodes.ready.done()
            ]
            if late and left <= 0:
                self.stage = f"initialising MPI: ranks on {', '.join(late)} have not checked in"
                raise TimeoutError
            for i in dispatcher.nodes.not_connected():
                try:
                    runs = await asyncio.wait_for(
                        result_of(self.agents[i].runs.remote(plan.gang)), max(0.1, left)
                    )
                except (RayError, TimeoutError):
                    continue  # the gang does not depend on the agent
                if not runs and i in dispatcher.nodes.not_connected():
                    raise LaunchError(
                        f"the gang's proxy on {plan.nodes[i].ip} ended before it connected to the "
                        f"GroupManager at {plan.manager[-1]}: check that this node can connect to "
                        "that address. Its output is in the log of the node's Ray worker"
                    )
        dispatcher.nodes.ready.result()

    def hosts(self) -> list[str]:
        """Names of the hosts of a gang that is ready."""
        workers = () if self.address is None else self.address.workers
        return sorted({worker["hostname"] for worker in workers})

    async def free_nbytes(self, limit_s: float) -> int | None:
        """Free memory of all nodes; None if one of them does not answer."""
        asked = [result_of(agent.memory.remote()) for agent in self.agents]
        try:
            found: list[int] = await asyncio.wait_for(asyncio.gather(*asked), limit_s)
            return sum(found)
        except (RayError, TimeoutError):
            return None

    # --- the end ---

    @property
    def failure(self) -> AlchemistError | None:
        """The error that ended the gang."""
        return None if self.dispatcher is None else self.dispatcher.nodes.failure

    async def shutdown(self) -> None:
        """Ask the ranks to end in good order, if they have not failed."""
        if self.dispatcher is not None and self.failure is None:
            await self.dispatcher.nodes.shutdown(END_TIMEOUT_S)

    async def release(self, error: AlchemistError | None) -> None:
        """Close the sockets, wait until every node is clean, and give the CPUs back.

        `error` is what callers get. None: the gang has failed, and the sockets stay open, to say
        why.
        """
        reservation, self._reservation = self._reservation, None
        agents, self.agents = self.agents, []
        self.address = None
        failure = self.failure
        if self.dispatcher is not None and error is not None:
            self.dispatcher.close(error)
        lost = failure.facts.get("node") if failure is not None else None
        waits: list[Any] = []
        for node, agent in enumerate(agents):
            limit_s = LOST_NODE_TIMEOUT_S if node == lost else END_TIMEOUT_S
            gone = result_of(agent.wait_gone.remote(self.run, limit_s))
            waits.append(asyncio.wait_for(gone, limit_s + 0.5))
        await asyncio.gather(*waits, return_exceptions=True)
        if reservation is not None:
            with contextlib.suppress(RayError):
                await in_thread(reservation.release)
        self.released.set()
        self.remove_folder()

    def remove_folder(self) -> None:
        """Remove the folder of the sockets."""
        folder, self._folder = self._folder, None
        if folder is not None:
            folder.remove()


async def in_thread(function: Callable[..., T], *args: Any) -> T:
    """The result of a blocking function that runs in a thread."""
    loop = asyncio.get_running_loop()
    return await loop.run_in_executor(None, functools.partial(function, *args))
