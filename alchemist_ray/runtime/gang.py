"""Gang: a gang in its GroupManager, from its launch to its end, over all its incarnations.

When ranks are lost and `max_failures` allows it, the gang keeps its CPUs (or asks for others where
a node was lost), starts other ranks, and rebuilds its matrices. Commands wait meanwhile. A gang
that is resized starts its next incarnation beside the present one, and moves its matrices there.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import platform
import secrets
import time
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import ray
from ray.exceptions import RayError

from alchemist_ray.arguments import MAX_SECONDS
from alchemist_ray.arrays.handle import Handle
from alchemist_ray.attached.address import GangAddress, next_token
from alchemist_ray.attached.leases import ResultLease
from alchemist_ray.attached.libraries import results_of
from alchemist_ray.attached.states import GangState
from alchemist_ray.background import in_pool, in_time
from alchemist_ray.cluster.actors import result_of
from alchemist_ray.cluster.driver import find_driver
from alchemist_ray.cluster.placement import alive_nodes
from alchemist_ray.errors import (
    NEXT_GANG,
    AlchemistError,
    CancelledError,
    GroupError,
    GroupFailedError,
    LaunchError,
    SessionError,
    from_failure,
)
from alchemist_ray.measures import events, logs
from alchemist_ray.measures.exporter import EXPORT_INTERVAL_S
from alchemist_ray.plural import counted
from alchemist_ray.runtime.commands.dispatcher import Dispatcher
from alchemist_ray.runtime.commands.gang_measures import GangMeasures
from alchemist_ray.runtime.commands.handlers import NO_HOLDER
from alchemist_ray.runtime.commands.nodes import Nodes
from alchemist_ray.runtime.elastic import Elastic
from alchemist_ray.runtime.launch.gang_cpus import GangCpus
from alchemist_ray.runtime.launch.gang_request import GangRequest
from alchemist_ray.runtime.launch.incarnation import Incarnation
from alchemist_ray.runtime.life import Life
from alchemist_ray.runtime.recovery.adopting import adopt
from alchemist_ray.runtime.recovery.rebuilding import Rebuilding
from alchemist_ray.runtime.recovery.resizing import Resizing
from alchemist_ray.runtime.recovery.snapshots import Snapshots
from alchemist_ray.version import __version__
from mpi_workers.failures import Failure
from mpi_workers.wire.frames import Body

FAILED_KEPT_S = 600.0  # a detached gang that has failed tells its attached processes why
EXPECTED_S = 30.0
DROP_LIMIT_S = 10.0  # for cancelled tasks to end
LEAVE_S = 0.2  # for answers that are under way
AGENT_ANSWER_S = 4.0  # for the agent of a node that may be lost, or only busy
MEMORY_ANSWER_S = 2.0  # for the agents to report their nodes' free memory
QUOTA_INTERVAL_S = 1.0
MOST_RENEWALS = 3  # without a command in between
YIELDED = "the session released its workers (yield_workers)"

log = logging.getLogger(__name__)


class Gang:
    """See the module. `GroupManager.ask` calls its methods.

    Parameters
    ----------
    name : str
        Its name, or its id.
    ident : str
        Begins the names of its processes and folders; of no other gang.
    request : GangRequest
    epoch : int
        Of its first incarnation.
    leave : callable(gang)
        Called when no process needs to know any longer why a detached gang has ended.

    Attributes
    ----------
    request : GangRequest
        With the present number of workers.
    epoch : int
        Number of the current incarnation.
    address : GangAddress or None
        While it has ranks.
    failures : int
        How often it was started again, or was tried to.
    renewals : int
        How often its nodes have started their ranks again.
    """

    def __init__(
        self,
        name: str,
        ident: str,
        request: GangRequest,
        epoch: int,
        leave: Callable[[Gang], None],
    ) -> None:
        options = request.options
        self._name = name
        self._ident = ident
        self._leave = leave
        self._driver = find_driver(name if options.detached else "")
        self.request = request
        self.epoch = epoch
        self._first_epoch = epoch
        self.address: GangAddress | None = None
        self.failures = 0
        self.renewals = 0
        self._renewed_at = 0
        self._renewed_in_a_row = 0
        self._last_loss = ""
        self._not_started: BaseException | None = None
        self._why = "the program that owned the gang ended"  # it is being ended
        self._created = time.time()
        self._one_resize = asyncio.Lock()
        self._wanted: dict[str, bool] = {}  # by token of a `.remote` call: is its ObjectRef there?
        self._watches: list[asyncio.Task[None]] = []  # the end of the ranks ends them
        self._life = Life(
            name,
            {
                GangState.STARTING: self._start,
                GangState.RECOVERING: self._recover,
                GangState.FAILED: self._clear_failed,
                GangState.ENDING: self._end,
            },
        )
        folder = logs.folder_name(name, ident)
        self._log = logs.write_to(folder, request.settings)
        label = "" if name == ident else name
        self._measures = GangMeasures(label, request.owner, folder, options.gpus_per_worker)
        self.dispatcher = Dispatcher(
            self,
            lease_grace_s=options.lease_grace_s,
            stuck_timeout_s=options.stuck_timeout_s,
            recovers=options.max_failures > 0,
            detached=options.detached,
            measures=self._measures,
        )
        self.cpus = GangCpus(name, f"{ident}.{epoch}", request, self._driver)
        self._token = secrets.token_hex(32)
        self._now = self._incarnation(request)
        self.resizing = Resizing(self.dispatcher, self.cpus, self._moving, self._use)
        self._elastic = Elastic(self.cpus, self._resize, self._ready_address, self._watch)

    # --- its state ---

    @property
    def state(self) -> GangState:
        return self._life.state

    @property
    def failure(self) -> AlchemistError | None:
        """The error that ended the gang for good."""
        return self.dispatcher.failure

    def _ready_address(self) -> GangAddress | None:
        return self.address if self.state.has_ranks else None

    # --- start ---

    async def launch(self) -> GangAddress:
        """Start the ranks and wait until all have checked in.

        Raises
        ------
        ResourceError, LaunchError
            In time; nothing of the gang is left then.
        """
        self._life.enter(GangState.STARTING)
        await self._life.leaves(GangState.STARTING, GangState.ENDING)
        if self._not_started is not None:
            raise self._not_started
        return await self.gang_address()

    async def _start(self) -> None:
        begun = time.monotonic()
        try:
            self.request = await self._elastic.started(self.request)
            self._now.request = self.request
            address = await self._now.start(self.cpus, self._first_epoch, self._token)
            if self._now.failure is not None:  # since the last rank was ready
                raise LaunchError(str(self._now.failure), **self._now.failure.facts)
        except BaseException as error:
            ended = isinstance(error, asyncio.CancelledError)
            self._not_started = GroupFailedError(self._why) if ended else error
            self._measures.note(events.NOT_STARTED, outcome="failed", error=self._not_started)
            await self._clear(serve=False)
            self._leave_later(LEAVE_S)
            return
        self.address = address
        ranks = f"{counted(self.request.workers, 'rank')} on {', '.join(self.nodes)}"
        seconds = time.monotonic() - begun
        self._measures.note(events.STARTED, outcome="ok", seconds=seconds, ranks=ranks)
        self.dispatcher.use(self._now.nodes)
        self.dispatcher.used()  # the start, and the wait for CPUs, were no idle time
        self._life.enter(GangState.READY)
        self._begin_watches()

    def _incarnation(self, request: GangRequest) -> Incarnation:
        run = f"{self._ident}.{self.epoch}"
        return Incarnation(self._name, run, self.epoch, request, self.dispatcher, self._driver)

    def _begin_watches(self) -> None:
        self._elastic.watch(self.request)
        self._watch(self._show_measures())
        self._watch(self._keep_quota())
        if self.request.options.max_failures:  # so that little has to be repeated
            snapshots = Snapshots(self.dispatcher, self._ready_address)
            self._watch(snapshots.keep_copies())
            if (folder := self.request.checkpoint_folder) is not None:
                self._watch(snapshots.write_checkpoints(folder))
        if (limit_s := self.request.options.idle_timeout_s) is not None:
            self._watch(self._end_when_idle(limit_s))

    def _watch(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Do it in a task, which the end of the ranks ends."""
        task = asyncio.get_running_loop().create_task(work)
        task.add_done_callback(_report)
        self._watches.append(task)
        return task

    async def holding(self, reservation: str) -> None:
        """Return when CPUs have been given back; see `Driver.reserve`."""
        await self.cpus.holding(reservation)

    async def _keep_quota(self) -> None:
        """Learn how many bytes the matrices may have, as long as the cluster has a limit."""
        commands = self.dispatcher.commands
        while True:
            about = self.request.user, self._name, commands.nbytes
            asked: Any = self._driver.share_of_bytes.remote(*about)
            with contextlib.suppress(RayError):  # the Driver is being started again
                commands.quota_nbytes = await result_of(asked)
                if commands.quota_nbytes is None:
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

    # --- about the gang ---

    async def about(self, *, memory: bool = False) -> Body:
        """The gang's entry in the catalogue, as plain values; `memory`: ask the nodes, too."""
        request = self.request
        entry: Body = {
            "name": self._name,
            "named": self._name != self._ident,
            "state": self.state.value,
            "version": __version__,
            "python": platform.python_version(),
            "created": self._created,
            "owner": request.owner,
            "workers": request.workers,
            "gpus_per_worker": request.options.gpus_per_worker,
            "env": sorted(request.options.env or ()),
            "detached": request.options.detached,
            "idle_timeout_s": request.options.idle_timeout_s,
            "nodes": self.nodes,
            "failures": self.failures,
            "renewals": self.renewals,
            "last_loss": self._last_loss,
            "reason": "" if self.failure is None else str(self.failure.args[0]),
            **self.dispatcher.status(),
        }
        if memory:
            entry["free_nbytes"] = await self._now.free_nbytes(MEMORY_ANSWER_S)
        return entry

    @property
    def nodes(self) -> list[str]:
        """Names of its hosts."""
        return [] if self.address is None else sorted(set(self.address.hosts))

    async def gang_address(self) -> GangAddress:
        """How to reach the gang, when it has been started (again), or moved to other ranks.

        Raises
        ------
        SessionError
            If it is being ended, or did not start.
        GroupFailedError
            What ended it.
        """
        await self._life.leaves(GangState.STARTING, GangState.RECOVERING, GangState.RESIZING)
        if self.state is GangState.ENDING:
            raise SessionError(f"gang {self._name} is being ended: start another one")
        if self.state is GangState.NONE:
            raise no_workers(self._name)
        if self.failure is not None:
            raise self.failure.with_traceback(None)
        assert self.address is not None
        return self.address

    async def _check_epoch(self, epoch: int) -> None:
        """Raise `AlchemistError`, unless the gang has carried over the matrices of an epoch."""
        await self.gang_address()
        if not self._first_epoch <= epoch <= self.epoch:
            raise GroupFailedError(
                f"gang {self._name} has ended, and its session has started another one: make the "
                "matrices again there"
            )

    # --- commands that come through Ray ---

    async def command(self, epoch: int, body: Body, holder: str = NO_HOLDER) -> Body:
        """Run a command for a process that no socket of the dispatcher reaches.

        `holder` is the id under which its results are leased; without one they are pinned.
        """
        await self._check_epoch(epoch)
        try:
            return await self.dispatcher.submit(body, holder)
        except Failure as failure:
            raise from_failure(failure) from None

    async def keep_source(self, epoch: int, matrix: int, source: Any) -> None:
        """A matrix that is being sent can be sent again from these data, after a failure."""
        await self._check_epoch(epoch)
        record = self.dispatcher.commands.matrices.get(matrix)
        if isinstance(source, np.ndarray):  # an object of this actor outlives the sender
            source = [(await in_pool(ray.put, source), 0, 0)]
        if record is not None:
            record.kept = source

    async def call(self, epoch: int, body: Body, holder: str = NO_HOLDER) -> Any:
        """A routine call whose results are what the user gets: values and handles."""
        self._wanted[holder] = True
        try:
            address = await self.gang_address()
            reply = await self.command(epoch, body, holder)
        finally:
            if not self._wanted.pop(holder):
                await self.end_results([holder])
        return results_of(reply, lambda record: Handle.from_record(record, address, ResultLease()))

    async def end_results(self, tokens: list[str]) -> None:
        """The ObjectRefs of calls are gone: their results are freed, or will be after the call."""
        for token in tokens:
            if token in self._wanted:
                self._wanted[token] = False
            else:
                self.dispatcher.commands.lost(token)

    async def cancel(self) -> int:
        """Cancel all calls that run or wait; their number."""
        return self.dispatcher.cancel_calls()

    # --- lost ranks ---

    def ranks_lost(self, error: AlchemistError) -> None:
        """See `DispatcherOwner`: the nodes start ranks again, which have their matrices."""
        self._measures.lost(error)
        self._last_loss = str(error.facts.get("happened", error.args[0]))
        self.resizing.stop(error)
        if self.state.has_ranks:
            self._life.enter(GangState.RECOVERING)

    def nodes_lost(self, error: AlchemistError) -> bool:
        """See `DispatcherOwner`: with `max_failures` the gang is started again."""
        self._measures.lost(error)
        for incarnation in filter(None, (self._now, self.resizing.next)):
            incarnation.remove_folder()  # now: if the owner is gone, Ray kills this actor next
        self.resizing.stop(error)
        if self.state is GangState.RECOVERING:
            return True  # `_recover` notices
        if not self.state.has_ranks or self.failures >= self.request.options.max_failures:
            self._fail()
            return False
        self._life.enter(GangState.RECOVERING)
        return True

    def node_leaving(self, nodes: Nodes, error: AlchemistError) -> bool:
        """See `NodesOwner`: an elastic gang moves to other nodes."""
        return nodes is self._now.nodes and self._elastic.leave(self.request, nodes, error)

    def _fail(self) -> None:
        if self.state not in (GangState.FAILED, GangState.ENDING):
            self.address = None
            self._life.enter(GangState.FAILED)

    async def _clear_failed(self) -> None:
        self._leave_later(FAILED_KEPT_S)
        await self._clear(serve=True)

    def orphaned(self) -> None:
        """The owner's program is gone, and Ray ends this actor next: end the gang."""
        self._kill(GroupFailedError("the program that owned the gang ended"))

    async def _recover(self) -> None:
        """Start ranks again until that succeeds, or there have been too many failures.

        1. While the nodes are there, they start ranks, which have the matrices of those before.
        2. Else the gang is started again, up to `max_failures` times, and its matrices rebuilt.
        """
        error = self.dispatcher.loss
        assert error is not None
        await self.resizing.ended()
        while True:
            try:
                restored = ""
                if self._now.failure is None:
                    await self._renew(error)
                elif self.failures < self.request.options.max_failures:
                    self.failures += 1
                    restored = await self._start_again(error)
                else:
                    break
                done = "without ranks" if self._now.nodes.without_ranks else "started again"
                self._measures.note(events.RECOVERED, outcome="ok", result=done)
                self.dispatcher.go_on(restored)
                return
            except AlchemistError as again:
                error = again
            except Exception as again:  # whatever it is, callers wait for the gang
                log.exception("an attempt to start gang %s again failed", self._name)
                error = GroupFailedError(f"{type(again).__name__}: {again}")
        words = "not started again: it has ended"
        self._measures.note(events.RECOVERED, outcome="failed", result=words)
        self._fail()
        if self.request.options.max_failures:
            error = GroupFailedError(
                f"the gang was not started again, after {self.failures} failures (max_failures): "
                f"{error.args[0]}",
                **error.facts,
            )
        self.dispatcher.give_up(error)

    async def _renew(self, error: AlchemistError) -> None:
        """Have the nodes start ranks again, in the same memory. Raises `AlchemistError`.

        If they cannot, the gang stays without ranks, or is started again (`max_failures`).
        """
        nodes, commands = self._now.nodes, self.dispatcher.commands
        if nodes.last_round > self._renewed_at:  # a command has paid for the loss
            self._renewed_in_a_row = 0
        if nodes.without_ranks:
            self._renewed_in_a_row = MOST_RENEWALS - 1  # a call has asked for one more
        if self._renewed_in_a_row >= MOST_RENEWALS:
            if self.failures >= self.request.options.max_failures:
                await nodes.clear(commands.kept())
                nodes.go_without_ranks(error)
                self._life.enter(GangState.READY)
                return
            nodes.fail(
                GroupFailedError(
                    f"the ranks were lost {MOST_RENEWALS + 1} times without a command in between, "
                    f"so the gang was ended; {NEXT_GANG}. The last time, "
                    f"{error.facts.get('happened', error.args[0])}",
                    **error.facts,
                )
            )
        else:
            self._renewed_in_a_row += 1
            self._renewed_at = nodes.last_round  # also if the start fails
            await nodes.clear(commands.kept())
            self.renewals += 1
            await nodes.start(self.request.options.start_timeout_s)
            await adopt(commands)
            if commands.log.enabled and self.address is not None:
                await Rebuilding(commands, nodes, self.address).run_undefined()
            self._renewed_at = nodes.last_round
        if (failure := nodes.failure or nodes.lost) is not None:
            raise failure.with_traceback(None)
        self._life.enter(GangState.READY)

    async def _start_again(self, error: AlchemistError) -> str:
        old = self._now
        node_lost = await self._node_lost(error)
        await old.release()
        if node_lost:
            await self.cpus.release()  # others are reserved at the start
            self.request = await self._elastic.started(self.request)
        self.epoch += 1
        now = self._now = self._incarnation(self.request)
        address = await now.start(self.cpus, self._first_epoch, next_token(self._token))
        self.dispatcher.use(now.nodes)
        commands = self.dispatcher.commands
        try:
            restored = await Rebuilding(commands, now.nodes, address).run()
            if now.nodes.lost is not None:
                raise now.nodes.lost.with_traceback(None)
        except AlchemistError as lost:
            now.nodes.fail(lost)  # a part of the matrices is of no use to other ranks
            raise
        if now.failure is not None:
            raise now.failure
        self._life.enter(GangState.READY)
        self._moved_to(address)
        return restored

    async def _node_lost(self, error: AlchemistError) -> bool:
        """Whether a node of the gang is gone, or is being taken away."""
        if error.facts.get("cause") == "node leaving":
            return True
        node = error.facts.get("node")
        if node is not None and node < len(self._now.agents):
            try:
                answer = result_of(self._now.agents[node].memory.remote())
                await in_time(answer, AGENT_ANSWER_S)
            except (RayError, TimeoutError):
                return True
        # Also one that was lost during a start, whose error names no node.
        nodes = {ident for ident, _ in self.cpus.nodes(self.request.workers)}
        return not nodes <= await in_pool(alive_nodes)

    # --- another number of ranks ---

    async def resize(self, epoch: int, workers: int) -> None:
        """Move to this many ranks; one resize at a time.

        Raises
        ------
        AlchemistError
            The gang goes on as it was then, unless it has failed.
        """
        await self._check_epoch(epoch)
        self._elastic.stop_growing()
        await self._resize(workers)

    async def stop_resize(self) -> None:
        """End a resize that is under way: its caller no longer waits."""
        self.resizing.stop(CancelledError("it was cancelled"))

    async def _resize(self, workers: int) -> None:
        async with self._one_resize:
            await self._life.leaves(GangState.RECOVERING, GangState.RESIZING)
            if self.failure is not None:
                raise self.failure.with_traceback(None)
            if self.state is not GangState.READY or self.address is None:
                raise SessionError(
                    f"gang {self._name} {self.state.words}: als.resize needs a gang that has "
                    "workers"
                )
            if workers != self.request.workers:
                self.epoch += 1
                new = self._incarnation(replace(self.request, workers=workers))
                try:
                    await self.resizing.run(self._now, new, self.address)
                finally:
                    self.dispatcher.used()

    @contextlib.contextmanager
    def _moving(self) -> Iterator[None]:
        """While matrices are moved to the ranks of the next incarnation."""
        self._life.enter(GangState.RESIZING)
        try:
            yield
        finally:
            if self.state is GangState.RESIZING:  # else ranks were lost, or it is being ended
                self._life.enter(GangState.READY)

    def _use(self, new: Incarnation, address: GangAddress) -> None:
        """Let the next incarnation take the place of the present one."""
        if new.failure is not None:
            raise new.failure
        self._now = new
        self.request = new.request
        self.dispatcher.use(new.nodes)
        self._moved_to(address)

    def _moved_to(self, address: GangAddress) -> None:
        """Attached processes use the next incarnation's ranks, and know what did not arrive."""
        self._token = address.token
        self.address = replace(address, stale=dict(self.dispatcher.commands.stale))
        self.dispatcher.tell_move(self.address.move())

    # --- the end ---

    async def end(self, why: str = YIELDED) -> None:
        """End the ranks in good order and give the CPUs back; attached processes are told why.

        The manager of a detached gang ends too.
        """
        if self.state is GangState.STARTING:
            raise GroupError(f"gang {self._name} {self.state.words}: wait until it is ready")
        await self._ended(why)

    async def _ended(self, why: str) -> None:
        """End the gang, and wait until it has; it does so also if the caller goes away."""
        if self.state not in (GangState.NONE, GangState.ENDING):
            self._why = why
            self._life.enter(GangState.ENDING)
        await self._life.leaves(GangState.ENDING)

    async def _end(self) -> None:
        try:
            self.resizing.stop(SessionError(f"gang {self._name} is being ended: start another one"))
            await self.resizing.ended()
            await self._now.shutdown()
        finally:
            self.dispatcher.close(SessionError(self._why))
            await self._clear(serve=False)
            self._leave_later(LEAVE_S)

    async def kill(self, why: str) -> None:
        """End the ranks at once, and give the CPUs back."""
        await self._life.leaves(GangState.STARTING)  # by a call of `function`
        if self.state is not GangState.NONE:
            self._kill(GroupFailedError(f"the gang was killed: {why}"))
        await self._ended(YIELDED)

    async def drop(self) -> None:
        """End the gang at once, also if it is being started; it is not used again."""
        if self.state is GangState.STARTING:
            self._why = "the session was closed, and its gang ended with it"
            self._life.enter(GangState.ENDING)
        with contextlib.suppress(TimeoutError):  # its processes have ended then
            await in_time(self._life.leaves(GangState.ENDING), DROP_LIMIT_S)
        await self.kill("its session ended it")

    def _kill(self, error: AlchemistError) -> None:
        """End the ranks at once, and start no others."""
        self._fail()
        self.dispatcher.nodes.fail(error)
        if self.dispatcher.failure is None:  # ranks had been lost before
            self.dispatcher.give_up(error)

    async def _clear(self, *, serve: bool) -> None:
        self.address = None
        self.resizing.stop(SessionError("the gang has ended"))
        await self.resizing.ended()
        for task in self._watches:
            task.cancel()
        await self._now.release(serve=serve)
        await self.cpus.release()
        logs.close(self._log)

    def _leave_later(self, after_s: float) -> None:
        """End the actor of a detached gang."""
        if self.request.options.detached:
            asyncio.get_running_loop().call_later(after_s, self._leave, self)

    async def _end_when_idle(self, limit_s: float) -> None:
        """End the gang when no command has come for the idle timeout."""
        while True:
            idle_s = 0.0 if self._one_resize.locked() else self.dispatcher.idle_s
            if idle_s >= limit_s:
                break
            await asyncio.sleep(min(max(limit_s - idle_s, 0.01), MAX_SECONDS))
        why = f"gang {self._name} was ended after {limit_s:g} s without a command (idle_timeout_s)"
        self._why = why
        self._life.enter(GangState.ENDING)


def no_workers(gang: str) -> SessionError:
    """The error for commands to a gang that has ended, or was not started."""
    return SessionError(f"gang {gang} has no workers: request_workers(n) starts them")


def _report(task: asyncio.Task[None]) -> None:
    """A watch that no one waits for has ended."""
    if not task.cancelled() and (error := task.exception()) is not None:
        log.error("a part of a gang's GroupManager has failed", exc_info=error)
