"""The GroupManager: the actor that reserves, launches, watches and ends one gang.

The session that asked for the gang owns this actor, so Ray ends it when the
user's program dies; the gang's proxies notice at once and leave nothing behind.
"""

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

from alchemist_ray.arrays.handle import Handle
from alchemist_ray.errors import (
    AlchemistError,
    GroupFailedError,
    LaunchError,
    RoutineError,
    SessionError,
    from_failure,
)
from alchemist_ray.functions.node_files import Data, carried
from alchemist_ray.functions.packing import Work, new_name, packed_values, unpickled
from alchemist_ray.gang.address import GangAddress
from alchemist_ray.gang.leases import ResultLease
from alchemist_ray.gang.libraries import results_of
from alchemist_ray.launchers import LAUNCHERS, GangPlan, NodePlan
from alchemist_ray.runtime.commands import NO_HOLDER
from alchemist_ray.runtime.dispatcher import Dispatcher
from alchemist_ray.runtime.driver import find_driver
from alchemist_ray.runtime.gang_request import GangRequest
from alchemist_ray.runtime.placement import Reservation, check_capacity, reserved
from alchemist_ray.runtime.ray_calls import result_of
from mpi_workers.failures import Failure
from mpi_workers.node.cleanup import PrivateFolder
from mpi_workers.wire.frames import Body
from mpi_workers.wire.values import decode

T = TypeVar("T")
END_TIMEOUT_S = 5.0
LOST_NODE_TIMEOUT_S = 1.0  # the same for a node that was lost
POLL_INTERVAL_S = 1.0  # between checks of proxies that have not connected yet
KEEP_SHARE = 4  # a quarter of a node's free memory may be kept warm, for some seconds


class GroupManager:
    """Actor: see the module. All its state is on one event loop."""

    def __init__(self, gang: str) -> None:
        self._gang = gang
        self._dispatcher: Dispatcher | None = None
        self._address: GangAddress | None = None
        self._reservation: Reservation | None = None
        self._agents: list[ActorHandle] = []
        self._folder: PrivateFolder | None = None
        self._ending: asyncio.Task[None] | None = None
        self._run_name = gang
        self._released = asyncio.Event()
        self._stage = ""
        self._one_by_one = asyncio.Lock()
        self._starting: asyncio.Future[GangAddress] | None = None

    async def launch(self, request: GangRequest) -> GangAddress:
        """Start the ranks and wait until all have checked in.

        Raises
        ------
        ResourceError, LaunchError
            In time; nothing of the gang is left then.
        """
        await self._ended()
        if self._dispatcher is not None:
            self._dispatcher.close(SessionError("the session has started another gang"))
        deadline = time.monotonic() + request.start_timeout_s
        try:
            return await self._launch(request, deadline)
        except AlchemistError:
            await self._release()
            raise
        except TimeoutError:
            stage = self._stage
            await self._release()
            raise LaunchError(
                f"{request.workers} workers did not start in {request.start_timeout_s:.0f} s: "
                f"the start stopped at: {stage}. All started processes were ended. If the nodes "
                "are slow, increase start_timeout_s"
            ) from None
        except (RayError, OSError) as error:
            await self._release()
            raise LaunchError(f"the gang did not start: {error}") from error

    async def _launch(self, request: GangRequest, deadline: float) -> GangAddress:
        def left() -> float:
            return max(0.1, deadline - time.monotonic())

        self._run_name = f"{self._gang}.{request.epoch}"
        self._released.clear()
        self._stage = "waiting for CPUs"
        reservation = request.inherited
        if reservation is None:
            await _in_thread(check_capacity, request.workers, request.cpus, request.strategy)
            group = await asyncio.wait_for(
                result_of(
                    find_driver().reserve.remote(
                        self._gang,
                        self._run_name,
                        request.workers,
                        request.cpus,
                        ray.get_runtime_context().get_node_id(),
                        request.strategy,
                    )
                ),
                left(),
            )
            reservation = await _in_thread(
                reserved, group, request.workers, request.cpus, request.start_timeout_s
            )
        self._reservation = reservation
        self._stage = "waiting for the nodes' agents"
        nodes = reservation.nodes
        found = await asyncio.wait_for(
            result_of(find_driver().agents.remote([node for node, _ in nodes])), left()
        )
        launcher = LAUNCHERS[request.launcher](os.environ | request.settings)
        order = launcher.order([about["name"] for _, about in found])
        nodes, found = tuple(nodes[i] for i in order), [found[i] for i in order]
        self._agents = [agent for agent, _ in found]
        facts = [about for _, about in found]
        token = secrets.token_hex(32)
        dispatcher = Dispatcher(
            len(nodes), request.workers, token, self._on_failure, self._on_orphaned
        )
        self._dispatcher = dispatcher
        self._folder = PrivateFolder(f"manager-{self._run_name}")
        await dispatcher.listen(ray.util.get_node_ip_address(), self._folder.socket("manager"))
        plan = GangPlan(
            gang=self._run_name,
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
        self._stage = "starting processes"
        specs = launcher.specs(plan)
        starting = [
            result_of(agent.launch.remote(spec))
            for agent, spec in zip(self._agents, specs, strict=True)
        ]
        await asyncio.wait_for(asyncio.gather(*starting), left())
        await self._checked_in(dispatcher, plan, deadline)
        node_ids = [node for node, _ in nodes]
        self._address = GangAddress(
            gang=self._gang,
            session=request.session,
            epoch=request.epoch,
            token=token,
            addresses=tuple(dispatcher.addresses),
            workers=tuple(
                {**about, "node_id": node_ids[about["node"]], "ip": plan.nodes[about["node"]].ip}
                for _, about in sorted(dispatcher.nodes.ranks.items())
            ),
        )
        find_driver().register.remote(
            self._gang,
            {"session": request.session, "workers": request.workers, "nodes": node_ids},
        )
        return self._address

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
                self._stage = f"initialising MPI: ranks on {', '.join(late)} have not checked in"
                raise TimeoutError
            for i in dispatcher.nodes.not_connected():
                try:
                    runs = await asyncio.wait_for(
                        result_of(self._agents[i].runs.remote(plan.gang)), max(0.1, left)
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

    async def holding(self, run: str) -> None:
        """Return when the CPUs of an incarnation have been given back; see `Driver.reserve`."""
        if run == self._run_name:
            await self._released.wait()

    async def gang_address(self) -> GangAddress:
        """How to reach the gang. Raises what ended it, or SessionError without a gang."""
        if self._dispatcher is not None and self._dispatcher.nodes.failure is not None:
            raise self._dispatcher.nodes.failure
        if self._address is None:
            raise SessionError("the session has no workers: request_workers(n) starts a gang")
        return self._address

    async def command(self, epoch: int, body: Body, holder: str = NO_HOLDER) -> Body:
        """Run a command for a process that no socket of the dispatcher reaches.

        `holder` is the id under which its results are leased; without one they are pinned.
        """
        gang_address = await self.gang_address()
        if epoch != gang_address.epoch or self._dispatcher is None:
            raise GroupFailedError("that gang has ended; its session has started another one")
        try:
            return await self._dispatcher.submit(body, holder)
        except Failure as failure:
            raise from_failure(failure) from None

    async def stage(self, epoch: int, name: str, data: Data) -> None:
        """Put a file of a user's function into the gang's folder on every node."""
        gang_address = await self.gang_address()
        if epoch != gang_address.epoch:
            raise GroupFailedError("that gang has ended; its session has started another one")
        await asyncio.gather(
            *(
                # The gang does not depend on the agent: wait for one that is being restarted.
                result_of(
                    agent.stage.options(max_task_retries=-1).remote(self._run_name, name, data)
                )
                for agent in self._agents
            )
        )

    async def call(self, epoch: int, body: Body, holder: str = NO_HOLDER) -> Any:
        """A routine call whose results are what the user gets: values and handles."""
        address = await self.gang_address()
        reply = await self.command(epoch, body, holder)
        return results_of(reply, lambda record: Handle.from_record(record, address, ResultLease()))

    async def function(self, request: GangRequest, work: Work, *values: Any) -> Any:
        """Run a function on a gang of its own, which is started if it is not there.

        One after the other, in the order of the calls. `values` are what its object refs
        stood for. Raises `AlchemistError`.
        """
        async with self._one_by_one:
            epoch = (await self._own_gang(request)).epoch
            contents = {"code": work.packed.code}
            if work.packed.given is not None:
                contents["given"] = work.packed.given
            if values:
                contents["values"] = packed_values(values)
            files = {what: new_name(what) for what in (*contents, "result")}
            task = {**work.packed.task(), **files}
            body: Body = {"op": "run", "task": task, "uses": [], "timeout_s": work.timeout_s}
            try:
                for what, content in contents.items():
                    await self.stage(epoch, files[what], carried(content))
                reply = await self.command(epoch, body)
                return await self._result(epoch, work.packed.name, reply, files["result"])
            finally:
                if self._dispatcher is not None:
                    self._dispatcher.nodes.unstage(list(files.values()))

    async def _own_gang(self, request: GangRequest) -> GangAddress:
        """The gang that is there, or one that is started now, also if the caller goes away."""
        await self._started()
        with contextlib.suppress(AlchemistError):
            return await self.gang_address()
        self._starting = asyncio.ensure_future(self.launch(request))
        return await asyncio.shield(self._starting)

    async def _started(self) -> None:
        """Wait for a start that a cancelled call has left behind."""
        if self._starting is not None:
            await asyncio.wait([self._starting])
            self._starting = None

    async def _result(self, epoch: int, name: str, reply: Body, file: str) -> Any:
        """What a function has returned on rank 0."""
        if reply["matrices"]:
            known = [record["matrix"] for record in reply["matrices"]]
            await self.command(epoch, {"op": "free", "matrices": known})
            raise RoutineError(
                f"{name} must not return a DistMatrix, because its gang ends: return an array "
                "(gathered on rank 0), or run it with als.run on a session's gang"
            )
        value = reply["value"]
        if "plain" in value:
            return decode(value["plain"], lambda _: None)
        rank0: Any = self._agents[0].parts.options(max_task_retries=-1)
        return unpickled(await result_of(rank0.remote(self._run_name, file)), ())

    async def end(self) -> None:
        """End the ranks in good order and give the CPUs back."""
        await self._started()
        if self._dispatcher is not None and self._dispatcher.nodes.failure is None:
            await self._dispatcher.nodes.shutdown(END_TIMEOUT_S)
        await self._ended()
        await self._release()

    async def kill(self, why: str) -> None:
        """End the ranks at once, and give the CPUs back."""
        await self._started()
        if self._dispatcher is not None:
            self._dispatcher.nodes.fail(GroupFailedError(f"the gang was killed: {why}"))
        await self._ended()
        await self._release()

    async def _ended(self) -> None:
        """Wait until a gang that was lost is cleared up."""
        ending, self._ending = self._ending, None
        if ending is not None:
            await ending

    # --- lost gangs ---

    def _on_failure(self, error: AlchemistError) -> None:
        self._remove_folder()  # now: if the owner is gone, Ray kills this actor next
        if self._address is not None:  # else launch() cleans up
            self._ending = asyncio.get_running_loop().create_task(self._release(keep_failure=True))

    def _on_orphaned(self) -> None:
        """The owner's program is gone, and Ray ends this actor next: end the gang."""
        if self._dispatcher is not None:
            self._dispatcher.nodes.fail(GroupFailedError("the program that owned the gang ended"))

    async def _release(self, *, keep_failure: bool = False) -> None:
        """Close the sockets, wait until every node is clean, and give the CPUs back."""
        dispatcher, reservation = self._dispatcher, self._reservation
        agents, self._agents = self._agents, []
        self._address = self._reservation = None
        if dispatcher is not None and not keep_failure:
            dispatcher.close(SessionError("the session released its workers (yield_workers)"))
            self._dispatcher = None
        failure = dispatcher.nodes.failure if dispatcher is not None else None
        lost = failure.facts.get("node") if failure is not None else None
        waits: list[Any] = []
        for node, agent in enumerate(agents):
            limit_s = LOST_NODE_TIMEOUT_S if node == lost else END_TIMEOUT_S
            gone = result_of(agent.wait_gone.remote(self._run_name, limit_s))
            waits.append(asyncio.wait_for(gone, limit_s + 0.5))
        await asyncio.gather(*waits, return_exceptions=True)
        if reservation is not None:
            with contextlib.suppress(RayError):
                await _in_thread(reservation.release)
        self._released.set()
        self._remove_folder()
        with contextlib.suppress(RayError):
            find_driver().unregister.remote(self._gang)

    def _remove_folder(self) -> None:
        folder, self._folder = self._folder, None
        if folder is not None:
            folder.remove()


async def _in_thread(function: Callable[..., T], *args: Any) -> T:
    loop = asyncio.get_running_loop()
    return await loop.run_in_executor(None, functools.partial(function, *args))
