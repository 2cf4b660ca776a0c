"""The GroupManager: the actor that reserves, launches, watches and ends one gang.

The GroupManager of a private gang belongs to the session that asked for it, so Ray ends it when the
user's program dies; the gang's proxies notice at once and leave nothing behind. The manager of a
detached gang belongs to the cluster, and ends itself when its gang has ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import platform
import time
from typing import Any

import ray

from alchemist_ray.arrays.handle import Handle
from alchemist_ray.errors import (
    AlchemistError,
    GroupError,
    GroupFailedError,
    RoutineError,
    SessionError,
    from_failure,
)
from alchemist_ray.functions.node_files import Data, carried
from alchemist_ray.functions.packing import Work, new_name, packed_values, unpickled
from alchemist_ray.gang.address import GangAddress
from alchemist_ray.gang.leases import ResultLease
from alchemist_ray.gang.libraries import results_of
from alchemist_ray.runtime.commands import NO_HOLDER
from alchemist_ray.runtime.driver import end_own_driver
from alchemist_ray.runtime.gang_request import GangRequest
from alchemist_ray.runtime.incarnation import Incarnation
from alchemist_ray.runtime.names import NAMESPACE, group_name
from alchemist_ray.runtime.ray_calls import result_of
from alchemist_ray.version import __version__
from mpi_workers.failures import Failure
from mpi_workers.wire.frames import Body
from mpi_workers.wire.values import decode

FAILED_KEPT_S = 600.0  # a detached gang that has failed tells its attached processes why
IDLE_POLLS = 10  # checks of a gang within its idle_timeout_s
EXPECTED_S = 30.0
LEAVE_S = 0.2  # for answers that are under way
MEMORY_ANSWER_S = 2.0  # for the agents to report their nodes' free memory
POLL_INTERVAL_S = 0.01  # for a start or an end that another call waits for
STATES = {"starting": "is being started", "ready": "has workers", "ending": "is being ended"}
YIELDED = "the session released its workers (yield_workers)"


class GroupManager:
    """Actor: see the module. All its state is on one event loop.

    Parameters
    ----------
    gang : str
        Id of the gang: its name, if it has one.
    ident : str
        Begins the names of the gang's processes and folders; of no other manager.
    """

    def __init__(self, gang: str, ident: str) -> None:
        self._gang = gang
        self._ident = ident
        self._epoch = 0
        self._now: Incarnation | None = None  # the last one, also when it has failed
        self._state = "none"
        self._created = time.time()
        self._ending: asyncio.Task[None] | None = None
        self._one_by_one = asyncio.Lock()
        self._starting: asyncio.Future[GangAddress] | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    # --- start ---

    async def launch(self, request: GangRequest) -> GangAddress:
        """Start the ranks and wait until all have checked in.

        Raises
        ------
        ResourceError, LaunchError
            In time; nothing of the gang is left then.
        GroupError
            If the gang is there or starts already.
        """
        if self._state in STATES:
            raise GroupError(f"gang {self._gang} {STATES[self._state]}")
        await self._ended()
        if self._now is not None and self._now.dispatcher is not None:
            self._now.dispatcher.close(SessionError("the session has started another gang"))
        self._epoch += 1
        self._state = "starting"
        self._created = time.time()
        run = f"{self._ident}.{self._epoch}"
        now = Incarnation(
            self._gang, run, self._epoch, request, self._on_failure, self._on_orphaned
        )
        self._now = now
        try:
            address = await now.start()
        except BaseException:
            self._state, self._now = "none", None
            if request.lifetime.detached:
                self._in_background(self._leave(LEAVE_S, None))
            raise
        self._state = "ready"
        if request.lifetime.idle_timeout_s is not None:
            self._in_background(self._end_when_idle(now, request.lifetime.idle_timeout_s))
        return address

    def _in_background(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def holding(self, run: str) -> None:
        """Return when the CPUs of an incarnation have been given back; see `Driver.reserve`."""
        if self._now is not None and run == self._now.run:
            await self._now.released.wait()

    # --- about the gang ---

    async def about(self, *, memory: bool = False) -> Body:
        """The gang's entry in the catalogue, as plain values; `memory`: ask the nodes, too."""
        now = self._now
        entry: Body = {
            "name": self._gang,
            "named": self._gang != self._ident,
            "state": self._state,
            "version": __version__,
            "python": platform.python_version(),
            "created": self._created,
            "reason": "",
        }
        if now is not None:
            request = now.request
            entry |= {
                "owner": request.owner,
                "workers": request.workers,
                "detached": request.lifetime.detached,
                "idle_timeout_s": request.lifetime.idle_timeout_s,
                "nodes": now.hosts(),
                "reason": "" if now.failure is None else str(now.failure.args[0]),
            }
            if now.dispatcher is not None:
                entry |= now.dispatcher.status()
            if memory:
                entry["free_nbytes"] = await now.free_nbytes(MEMORY_ANSWER_S)
        return entry

    async def gang_address(self) -> GangAddress:
        """How to reach the gang. Raises what ended it, or SessionError without a gang."""
        if self._now is not None and self._now.failure is not None:
            raise self._now.failure
        if self._now is None or self._now.address is None:
            raise SessionError("the session has no workers: request_workers(n) starts a gang")
        return self._now.address

    async def attach(self) -> GangAddress:
        """How to reach the gang, when it has started.

        Raises
        ------
        SessionError
            If it is being ended, or did not start.
        GroupFailedError
            What ended it.
        """
        while self._state == "starting" and self._now is not None:
            await asyncio.sleep(POLL_INTERVAL_S)
        if self._state == "ending":
            raise SessionError(f"gang {self._gang} is being ended: start another one")
        return await self.gang_address()

    async def command(self, epoch: int, body: Body, holder: str = NO_HOLDER) -> Body:
        """Run a command for a process that no socket of the dispatcher reaches.

        `holder` is the id under which its results are leased; without one they are pinned.
        """
        gang_address = await self.gang_address()
        dispatcher = self._now.dispatcher if self._now is not None else None
        if epoch != gang_address.epoch or dispatcher is None:
            raise GroupFailedError("that gang has ended; its session has started another one")
        try:
            return await dispatcher.submit(body, holder)
        except Failure as failure:
            raise from_failure(failure) from None

    async def stage(self, epoch: int, name: str, data: Data) -> None:
        """Put a file of a user's function into the gang's folder on every node."""
        gang_address = await self.gang_address()
        if self._now is not None and self._now.dispatcher is not None:
            self._now.dispatcher.used()
        if epoch != gang_address.epoch:
            raise GroupFailedError("that gang has ended; its session has started another one")
        await asyncio.gather(
            *(
                # The gang does not depend on the agent: wait for one that is being restarted.
                result_of(
                    agent.stage.options(max_task_retries=-1).remote(
                        gang_address.incarnation, name, data
                    )
                )
                for agent in self._agents()
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
                if self._now is not None and self._now.dispatcher is not None:
                    self._now.dispatcher.nodes.unstage(list(files.values()))

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
        """The value that a function has returned on rank 0."""
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
        incarnation = (await self.gang_address()).incarnation
        rank0: Any = self._agents()[0].parts.options(max_task_retries=-1)
        return unpickled(await result_of(rank0.remote(incarnation, file)), ())

    def _agents(self) -> list[Any]:
        return [] if self._now is None else list(self._now.agents)

    # --- the end ---

    async def end(self, why: str = YIELDED) -> None:
        """End the ranks in good order and give the CPUs back; attached processes are told why.

        The manager of a detached gang ends too.
        """
        await self._started()
        if self._state == "starting":
            raise GroupError(f"gang {self._gang} {STATES[self._state]}: wait until it is ready")
        while self._state == "ending":
            await asyncio.sleep(POLL_INTERVAL_S)
        if self._now is not None:
            self._state = "ending"
            await self._now.shutdown()
        await self._finish(SessionError(why))

    async def cancel(self) -> int:
        """Cancel all calls that run or wait; their number."""
        if self._now is None or self._now.dispatcher is None:
            return 0
        return self._now.dispatcher.cancel_calls()

    async def kill(self, why: str) -> None:
        """End the ranks at once, and give the CPUs back."""
        await self._started()
        if self._now is not None and self._now.dispatcher is not None:
            self._now.dispatcher.nodes.fail(GroupFailedError(f"the gang was killed: {why}"))
        await self._finish(SessionError(YIELDED))

    async def _finish(self, error: AlchemistError) -> None:
        await self._ended()
        now = self._now
        try:
            if now is not None:
                await now.release(error)
        finally:
            self._state, self._now = "none", None
        if now is not None and now.request.lifetime.detached:
            self._in_background(self._leave(LEAVE_S, None))

    async def _ended(self) -> None:
        """Wait until a gang that was lost is cleared up."""
        ending, self._ending = self._ending, None
        if ending is not None:
            await ending

    async def _leave(self, after_s: float, last: Incarnation | None) -> None:
        """End this actor, unless its gang has been started again by then."""
        await asyncio.sleep(after_s)
        if self._now is last:
            self._exit()

    async def expect_launch(self) -> None:
        """End this actor if the process that made it has died before it could ask for a gang."""
        await asyncio.sleep(EXPECTED_S)
        if self._state == "none":
            self._exit()

    def _exit(self) -> None:
        end_own_driver(self._gang)
        # Not `ray.actor.exit_actor`: it waits for all calls that the actor is serving.
        ray.kill(ray.get_actor(group_name(self._gang), namespace=NAMESPACE))

    async def _end_when_idle(self, now: Incarnation, limit_s: float) -> None:
        """End the gang when no command has come for the idle timeout."""
        while now is self._now and now.dispatcher is not None and now.failure is None:
            idle_s = now.dispatcher.idle_s
            if idle_s >= limit_s:
                await self.end(
                    f"gang {self._gang} was ended after {limit_s:g} s without a command "
                    "(idle_timeout_s)"
                )
                return
            await asyncio.sleep(min(max(limit_s - idle_s, 0.01), limit_s / IDLE_POLLS))

    # --- lost gangs ---

    def _on_failure(self, error: AlchemistError) -> None:
        now = self._now
        assert now is not None
        now.remove_folder()  # now: if the owner is gone, Ray kills this actor next
        if now.address is not None:  # else launch() cleans up
            self._state = "failed"
            self._ending = asyncio.get_running_loop().create_task(now.release(None))
            if now.request.lifetime.detached:
                self._in_background(self._leave(FAILED_KEPT_S, now))

    def _on_orphaned(self) -> None:
        """The owner's program is gone, and Ray ends this actor next: end the gang."""
        if self._now is not None and self._now.dispatcher is not None:
            self._now.dispatcher.nodes.fail(
                GroupFailedError("the program that owned the gang ended")
            )
