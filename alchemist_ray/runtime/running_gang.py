"""RunningGang: a gang from its launch to its end, over all its incarnations.

When ranks are lost and `max_failures` allows it, the gang keeps its CPUs (or asks for others where
a node was lost), starts other ranks, and rebuilds its matrices. Commands wait meanwhile. A gang
that is resized starts its next incarnation beside the present one, and moves its matrices there.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from ray.exceptions import RayError

from alchemist_ray.errors import AlchemistError, GroupFailedError, LaunchError, SessionError
from alchemist_ray.gang.address import GangAddress, next_token
from alchemist_ray.observe import logs
from alchemist_ray.observe.exporter import EXPORT_INTERVAL_S
from alchemist_ray.plural import counted
from alchemist_ray.runtime.cluster.ray_calls import result_of
from alchemist_ray.runtime.commands.dispatcher import Dispatcher
from alchemist_ray.runtime.driver import find_driver
from alchemist_ray.runtime.launch.gang_cpus import GangCpus
from alchemist_ray.runtime.launch.gang_measures import GangMeasures
from alchemist_ray.runtime.launch.gang_request import GangRequest
from alchemist_ray.runtime.launch.incarnation import LOST_NODE_TIMEOUT_S, Incarnation
from alchemist_ray.runtime.recovery.automatic_checkpoints import AutomaticCheckpoints
from alchemist_ray.runtime.recovery.elastic import Elastic
from alchemist_ray.runtime.recovery.kept_copies import KeptCopies
from alchemist_ray.runtime.recovery.rebuilding import Rebuilding
from alchemist_ray.runtime.recovery.resizing import Resizing

QUOTA_INTERVAL_S = 1.0

log = logging.getLogger(__name__)

STATES = {
    "starting": "is being started",
    "ready": "has workers",
    "recovering": "is being started again",
    "ending": "is being ended",
}


class RunningGang:
    """One launch of a gang.

    Parameters
    ----------
    gang, ident : str
        Its name, and the beginning of the names of its processes.
    epoch : int
        Number of its first incarnation.
    request : GangRequest
    on_lost : callable()
        Called when it has failed for good.

    Attributes
    ----------
    state : str
        A key of `STATES`, or ``"failed"``.
    epoch : int
        Number of the current incarnation.
    address : GangAddress or None
        When it is ready.
    failures : int
        How often it was started again, or was tried to.
    resizing : Resizing
        Moves it to another number of ranks.
    """

    def __init__(
        self,
        gang: str,
        ident: str,
        epoch: int,
        request: GangRequest,
        on_lost: Callable[[], None],
    ) -> None:
        self._gang = gang
        self._ident = ident
        self._first_epoch = self.epoch = epoch
        self._on_lost = on_lost
        self.request = request
        self.state = "starting"
        self.failures = 0
        self.address: GangAddress | None = None
        folder = logs.folder_name(gang, ident)
        self._log = logs.write_to(folder, request.settings)
        self._measures = GangMeasures("" if gang == ident else gang, request.owner, folder)
        self.dispatcher = Dispatcher(
            self._on_failure,
            self._on_orphaned,
            lease_grace_s=request.options.lease_grace_s,
            recovers=request.options.max_failures > 0,
            measures=self._measures,
        )
        self._driver = find_driver(gang if request.options.detached else "")
        self.cpus = GangCpus(gang, f"{ident}.{epoch}", request, self._driver)
        self._token = secrets.token_hex(32)
        self._now = self._incarnation(request)
        self._final = False
        self._recovery: asyncio.Task[None] | None = None
        self._one_resize = asyncio.Lock()
        self.resizing = Resizing(self.dispatcher, self.cpus, self._use)
        self._elastic = Elastic(self.cpus, self._resize, self._ready_address)
        self._clearing: asyncio.Task[None] | None = None
        self._tasks: list[asyncio.Task[None]] = []

    def _incarnation(self, request: GangRequest) -> Incarnation:
        run = f"{self._ident}.{self.epoch}"
        return Incarnation(self._gang, run, self.epoch, request, self.dispatcher, self._driver)

    async def start(self) -> GangAddress:
        """Start the ranks.

        Raises
        ------
        ResourceError, LaunchError
            In time; nothing of the gang is left then.
        """
        begun = time.monotonic()
        try:
            self.request = await self._elastic.started(self.request)
            self._now.request = self.request
            self.address = await self._now.start(self.cpus, self._first_epoch, self._token)
            if self._now.failure is not None:  # since the last rank was ready
                raise LaunchError(str(self._now.failure), **self._now.failure.facts)
        except BaseException as error:
            self._measures.not_started(error)
            logs.close(self._log)
            await self._now.release()
            await self.cpus.release()
            raise
        self.state = "ready"
        ranks = f"{counted(self.request.workers, 'rank')} on {', '.join(self.nodes)}"
        self._measures.started(time.monotonic() - begun, ranks)
        self._tasks.append(asyncio.get_running_loop().create_task(self._show_measures()))
        self.dispatcher.use(self._now.nodes)
        self._elastic.watch(self.request, self._now.nodes)
        self._tasks.append(asyncio.get_running_loop().create_task(self._keep_quota()))
        if self.request.options.max_failures:
            self._shorten_log()
        return self.address

    def _shorten_log(self) -> None:
        """Keep copies and write checkpoints, so that little has to be repeated."""
        loop, folder = asyncio.get_running_loop(), self.request.checkpoint_folder
        copies = KeptCopies(self.dispatcher, self._ready_address)
        self._tasks.append(loop.create_task(copies.run()))
        if folder is not None:
            commands = self.dispatcher.commands
            writing = AutomaticCheckpoints(commands, self._ready_address, folder)
            self._tasks.append(loop.create_task(writing.run()))

    async def _keep_quota(self) -> None:
        """Learn how many bytes the matrices may have, as long as the cluster has a limit."""
        commands = self.dispatcher.commands
        while True:
            nbytes = sum(record.nbytes for record in commands.matrices.values())
            asked: Any = self._driver.share_of_bytes.remote(self.request.user, self._gang, nbytes)
            with contextlib.suppress(RayError):  # the Driver is being started again
                share: int | None = await result_of(asked)
                commands.quota.nbytes = share
                if commands.quota.nbytes is None:
                    return
            await asyncio.sleep(QUOTA_INTERVAL_S)

    async def _show_measures(self) -> None:
        try:
            while True:
                records = self.dispatcher.commands.matrices.values()
                status = self.dispatcher.status()
                self._measures.show(self.state, status, self._ready_address(), records)
                await asyncio.sleep(EXPORT_INTERVAL_S)
        finally:
            self._measures.hide()

    def _ready_address(self) -> GangAddress | None:
        return self.address if self.state == "ready" else None

    @property
    def failure(self) -> AlchemistError | None:
        """The error that ended the gang for good."""
        return self.dispatcher.failure

    @property
    def agents(self) -> list[Any]:
        """The agents of its nodes."""
        return list(self._now.agents)

    @property
    def nodes(self) -> list[str]:
        """Names of its hosts."""
        return [] if self.address is None else sorted(set(self.address.hosts))

    def valid(self, epoch: int) -> bool:
        """Whether matrices of an epoch were carried over to the current one."""
        return self._first_epoch <= epoch <= self.epoch

    async def settled(self) -> None:
        """Wait while it is being started again, or moved to other ranks."""
        while self.resizing.moving or self.state == "recovering":
            await self.resizing.moved()
            if self.state == "recovering" and self._recovery is not None:
                await asyncio.wait([self._recovery])

    async def free_nbytes(self, limit_s: float) -> int | None:
        """Free memory of all nodes; None if one of them does not answer."""
        return await self._now.free_nbytes(limit_s)

    # --- lost ranks ---

    def _on_failure(self, error: AlchemistError) -> bool:
        """Ranks are lost; whether others are started."""
        self._measures.lost(error)
        for incarnation in filter(None, (self._now, self.resizing.next)):
            incarnation.remove_folder()  # now: if the owner is gone, Ray kills this actor next
        self.resizing.stop(error)
        if self._recovery is not None and not self._recovery.done():
            return True  # it notices
        if (
            self._final
            or self.state != "ready"
            or self.failures >= self.request.options.max_failures
        ):
            self._fail()
            return False
        self.failures += 1
        self.state = "recovering"
        self._recovery = asyncio.get_running_loop().create_task(self._recover(error))
        return True

    def _fail(self) -> None:
        if self.state == "ending":
            return
        self.state = "failed"
        self.address = None
        self._clearing = asyncio.get_running_loop().create_task(self._clear(serve=True))
        self._on_lost()

    def _on_orphaned(self) -> None:
        """The owner's program is gone, and Ray ends this actor next: end the gang."""
        self.kill(GroupFailedError("the program that owned the gang ended"))

    async def _recover(self, error: AlchemistError) -> None:
        """Start other ranks until that succeeds, or `max_failures` are used up."""
        await self.resizing.ended()
        while True:
            try:
                await self._start_again(error)
                self._measures.recovered(there=True)
                return
            except AlchemistError as again:
                error = again
            except Exception as again:  # whatever it is, callers wait for the gang
                log.exception("an attempt to start gang %s again failed", self._gang)
                error = GroupFailedError(f"{type(again).__name__}: {again}")
            if self.failures >= self.request.options.max_failures:
                break
            self.failures += 1
        self._measures.recovered(there=False)
        self._fail()
        self.dispatcher.give_up(
            GroupFailedError(
                f"the gang was not started again, after {self.failures} failures (max_failures): "
                f"{error.args[0]}",
                **error.facts,
            )
        )

    async def _start_again(self, error: AlchemistError) -> None:
        old, node_lost = self._now, await self._node_lost(error)
        await old.release()
        if node_lost:
            await self.cpus.release()  # others are reserved at the start
            self.request = await self._elastic.started(self.request)
        self.epoch += 1
        now = self._now = self._incarnation(self.request)
        token = next_token(self._token)
        address = await now.start(self.cpus, self._first_epoch, token)
        self._elastic.watch(self.request, now.nodes)
        self.dispatcher.use(now.nodes)
        commands = self.dispatcher.commands
        restored = await Rebuilding(commands, now.nodes, address, now.agents).run()
        if now.failure is not None:
            raise now.failure
        self._token = token
        self.address = replace(address, stale=dict(commands.stale))
        self.state = "ready"
        self.dispatcher.renew(self.address.renewal())
        self.dispatcher.resume(restored)

    async def _node_lost(self, error: AlchemistError) -> bool:
        """Whether a node of the gang is gone, or is being taken away."""
        node = error.facts.get("node")
        if node is None or node >= len(self._now.agents):
            return False
        if error.facts.get("cause") == "node leaving":
            return True
        try:
            answer = result_of(self._now.agents[node].memory.remote())
            await asyncio.wait_for(answer, LOST_NODE_TIMEOUT_S)
        except (RayError, TimeoutError):
            return True
        return False

    # --- another number of ranks ---

    async def resize(self, workers: int) -> None:
        """Move to this many ranks; one resize at a time.

        Raises
        ------
        AlchemistError
            The gang goes on as it was then, unless it has failed.
        """
        self._elastic.stop_growing()
        await self._resize(workers)

    async def _resize(self, workers: int) -> None:
        async with self._one_resize:
            await self.settled()
            if self.failure is not None:
                raise self.failure.with_traceback(None)
            if self.state != "ready" or self.address is None:
                raise SessionError(
                    f"gang {self._gang} {STATES.get(self.state, 'has ended')}: als.resize needs a "
                    "gang that has workers"
                )
            if workers != self.request.workers:
                self.epoch += 1
                new = self._incarnation(replace(self.request, workers=workers))
                await self.resizing.run(self._now, new, self.address)

    def _use(self, new: Incarnation, address: GangAddress) -> None:
        """Let the next incarnation take the place of the present one."""
        if new.failure is not None:
            raise new.failure
        commands = self.dispatcher.commands
        new.nodes.unreferenced += self._now.nodes.unreferenced  # freed there, too
        self._elastic.watch(new.request, new.nodes)
        self._now = new
        self.request = new.request
        self._token = address.token
        self.address = replace(address, stale=dict(commands.stale))
        self.dispatcher.use(new.nodes)
        self.dispatcher.renew(self.address.renewal())

    # --- the end ---

    def kill(self, error: AlchemistError) -> None:
        """End the ranks at once, and start no others; `release` cleans up."""
        self._final = True
        if self._recovery is not None:
            self._recovery.cancel()
        if self.dispatcher.nodes.failure is None:
            self.dispatcher.nodes.fail(error)
        elif self.dispatcher.failure is None:  # while it was being started again
            self._fail()
            self.dispatcher.give_up(error)

    async def shutdown(self) -> None:
        """End the ranks in good order."""
        self.state = "ending"
        self.resizing.stop(SessionError(f"gang {self._gang} is being ended: start another one"))
        await self.resizing.ended()
        await self._stop_recovery()
        await self._now.shutdown()

    async def release(self, error: AlchemistError) -> None:
        """Clean up and give the CPUs back; attached processes get `error`."""
        await self._stop_recovery()
        if self._clearing is not None:
            await self._clearing
        self.dispatcher.close(error)
        await self._clear(serve=False)

    async def _stop_recovery(self) -> None:
        if self._recovery is not None:
            self._recovery.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._recovery

    async def _clear(self, *, serve: bool) -> None:
        self.address = None
        self.resizing.stop(SessionError("the gang has ended"))
        await self.resizing.ended()
        self._elastic.close()
        for task in self._tasks:
            task.cancel()
        await self._now.release(serve=serve)
        await self.cpus.release()
        logs.close(self._log)
