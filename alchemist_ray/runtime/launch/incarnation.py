"""Incarnation: the ranks of a gang, their CPUs and sockets, from their start to their end."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayError

from alchemist_ray.attached.address import GangAddress
from alchemist_ray.background import in_time
from alchemist_ray.cluster.actors import result_of
from alchemist_ray.errors import AlchemistError, LaunchError, SessionError
from alchemist_ray.launchers import LAUNCHERS
from alchemist_ray.measures.logs import folder_name
from alchemist_ray.plural import counted
from alchemist_ray.runtime.commands.dispatcher import Dispatcher
from alchemist_ray.runtime.commands.nodes import Nodes
from alchemist_ray.runtime.launch.gang_cpus import GangCpus
from alchemist_ray.runtime.launch.gang_request import GangRequest
from mpi_workers.deadlines import NODES_END_S
from mpi_workers.node.cleanup import PrivateFolder
from mpi_workers.node.specs import GangPlan, NodePlan, RankOptions
from mpi_workers.wire.acceptor import Acceptor, AuthenticatedPeer

LOST_NODE_TIMEOUT_S = 1.0  # `NODES_END_S` of a node that was lost
POLL_INTERVAL_S = 1.0  # between checks of proxies that have not connected yet; for an answer
LATE_S = 2.0  # for a reservation, which has its own limit, to say what it waits for
KEEP_SHARE = 4  # a quarter of a node's free memory may be kept warm, for some seconds


@dataclass(eq=False)
class Incarnation:
    """One incarnation of a gang.

    Attributes
    ----------
    gang : str
    run : str
        Names the processes and folders of this incarnation.
    epoch : int
    request : GangRequest
    dispatcher : Dispatcher
        Of the gang.
    driver : actor
    stage : str
        The step at which the start is, for messages.
    agents : list of actor
        One per node.
    nodes : Nodes
        Of the dispatcher; without nodes until it starts.
    """

    gang: str
    run: str
    epoch: int
    request: GangRequest
    dispatcher: Dispatcher
    driver: Any
    stage: str = ""
    agents: list[ActorHandle] = field(default_factory=list)
    nodes: Nodes = field(init=False)
    _acceptor: Acceptor[AuthenticatedPeer] | None = None
    _folder: PrivateFolder | None = None

    def __post_init__(self) -> None:
        self.nodes = self.dispatcher.new_nodes(0, 0)

    async def start(self, cpus: GangCpus, first_epoch: int, token: str) -> GangAddress:
        """Start the ranks and wait until all have checked in.

        Parameters
        ----------
        cpus : GangCpus
            Reserved now, as far as they are not.
        first_epoch : int
            Handles of this epoch and later ones are valid.
        token : str
            The secret of this incarnation.

        Raises
        ------
        ResourceError, LaunchError
            In time; no process of the incarnation is left then.
        """
        request = self.request
        limit_s = request.options.start_timeout_s
        deadline = asyncio.get_running_loop().time() + limit_s
        try:
            self.stage = "waiting for CPUs"
            async with asyncio.timeout_at(deadline + LATE_S):
                await cpus.reserve(request.workers, limit_s)
            async with asyncio.timeout_at(deadline):
                return await self._start(cpus, first_epoch, token)
        except BaseException as error:
            await self.release()
            if isinstance(error, TimeoutError):
                raise LaunchError(
                    f"the gang of {counted(request.workers, 'worker')} did not start within "
                    f"{limit_s:.0f} s. Last stage: {self.stage}. All its processes were ended. If "
                    "the nodes are slow, increase start_timeout_s"
                ) from None
            # An error that an agent has raised is of both kinds.
            if isinstance(error, RayError | OSError) and not isinstance(error, AlchemistError):
                raise LaunchError(f"the gang did not start: {error}") from error
            raise

    async def _start(self, cpus: GangCpus, first_epoch: int, token: str) -> GangAddress:
        request = self.request
        nodes: Sequence[tuple[str, int]] = cpus.nodes(request.workers)
        devices = cpus.devices(request.workers)
        self.stage = "waiting for the nodes' agents"
        agents = await result_of(self.driver.agents.remote([node for node, _ in nodes]))
        launcher = LAUNCHERS[request.options.launcher](os.environ | request.settings)
        order = launcher.order([node["name"] for _, node in agents])
        nodes, agents = [nodes[i] for i in order], [agents[i] for i in order]
        self.agents = [agent for agent, _ in agents]
        facts = [node for _, node in agents]
        self.nodes = self.dispatcher.new_nodes(len(nodes), request.workers)
        self.nodes.node_ids = tuple(node for node, _ in nodes)
        self._folder = PrivateFolder(f"manager-{self.run}")
        here = ray.util.get_node_ip_address()
        path = self._folder.socket("manager")
        self._acceptor, addresses = self.dispatcher.listen(token, self.nodes, here, path)
        plan = GangPlan(
            gang=self.run,
            nodes=tuple(
                NodePlan(known["ip"], ranks, known["name"], devices[node])
                for (node, ranks), known in zip(nodes, facts, strict=True)
            ),
            token=token,
            manager=addresses,
            keep_bytes=min(node["memory"] for node in facts) // KEEP_SHARE,
            options=RankOptions(
                threads=request.options.threads_per_worker,
                start_timeout_s=request.options.start_timeout_s,
                mpi_waits=request.options.mpi_waits,
                gpu=request.options.gpu,
                env=request.options.env or {},
            ),
            log_folder=folder_name(self.gang, self.run.rpartition(".")[0]),
        )
        self.stage = "starting processes"
        plan = replace(plan, start=launcher.start(plan))
        starting = [
            result_of(agent.launch.remote(plan, node)) for node, agent in enumerate(self.agents)
        ]
        await asyncio.gather(*starting)
        await self._checked_in(plan)
        return GangAddress(
            gang=self.gang,
            session=request.session,
            epoch=self.epoch,
            token=token,
            addresses=addresses,
            nodes=tuple(address for _, address in sorted(self.nodes.data.items())),
            incarnation=self.run,
            hosts=tuple(map(self.nodes.host, range(len(nodes)))),
            node_ids=self.nodes.node_ids,
            shared=request.options.name is not None,
            lease_grace_s=request.options.lease_grace_s,
            idle_timeout_s=request.options.idle_timeout_s,
            stuck_timeout_s=request.options.stuck_timeout_s,
            first_epoch=first_epoch,
            recovers=request.options.max_failures > 0,
            checkpoint_folder=request.checkpoint_folder,
        )

    async def _checked_in(self, plan: GangPlan) -> None:
        """Wait for all ranks, and notice proxies that ended before they connected.

        Raises what ended the gang, or `LaunchError`.
        """
        while not self.nodes.ready.done():
            late = ", ".join(plan.nodes[i].ip for i in self.nodes.not_ready())
            self.stage = f"initialising MPI: ranks on {late} have not checked in"
            await asyncio.wait([self.nodes.ready], timeout=POLL_INTERVAL_S)
            asked = self.nodes.not_connected()
            # The gang does not depend on an agent that does not answer.
            answers = [
                in_time(result_of(self.agents[i].why_ended.remote(plan.gang)), POLL_INTERVAL_S)
                for i in asked
            ]
            for i, why in zip(
                asked, await asyncio.gather(*answers, return_exceptions=True), strict=True
            ):
                if isinstance(why, str) and i in self.nodes.not_connected():
                    raise LaunchError(
                        f"the gang's proxy on {plan.nodes[i].ip} ended before it connected: {why}"
                    )
        self.nodes.ready.result()

    async def free_nbytes(self, limit_s: float) -> int | None:
        """Free memory of all nodes; None if one of them does not answer."""
        asked = [result_of(agent.memory.remote()) for agent in self.agents]
        try:
            found: list[int] = await in_time(asyncio.gather(*asked), limit_s)
            return sum(found)
        except (RayError, TimeoutError):
            return None

    # --- the end ---

    @property
    def failure(self) -> AlchemistError | None:
        """The error that ended the ranks."""
        return self.nodes.failure

    async def shutdown(self) -> None:
        """Ask the ranks to end in good order, if they have not failed."""
        if self.failure is None:
            await self.nodes.shutdown(NODES_END_S)

    async def release(self, *, serve: bool = False) -> None:
        """End the ranks, close the sockets, and wait until every node is clean.

        `serve`: the gang has failed, and the sockets stay open, to say why.
        """
        lost = self.failure.facts.get("node") if self.failure is not None else None
        self.nodes.close(SessionError("the ranks were ended"))
        if not serve and self._acceptor is not None:
            self._acceptor.close()
        waits: list[Any] = []
        for node, agent in enumerate(self.agents):
            limit_s = LOST_NODE_TIMEOUT_S if node == lost else NODES_END_S
            gone = result_of(agent.wait_gone.remote(self.run, limit_s))
            waits.append(in_time(gone, limit_s + 0.5))
        await asyncio.gather(*waits, return_exceptions=True)
        self.agents = []
        self.remove_folder()

    def remove_folder(self) -> None:
        """Remove the folder of the sockets."""
        folder, self._folder = self._folder, None
        if folder is not None:
            folder.remove()
