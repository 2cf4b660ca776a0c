"""The GroupManager: the actor that reserves, launches, watches and ends gangs.

The private gangs of a process share one (`manager_pool`), because an actor takes 0.5 s of CPU to
start. It belongs to that process, so Ray ends it when the user's program dies; the gangs' proxies
notice at once and leave nothing behind. A gang with a name has a GroupManager of its own. That of
a detached gang belongs to the cluster, and ends itself when its gang has ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import platform
import time
from collections.abc import Coroutine
from typing import Any, TypeVar

import numpy as np
import ray

from alchemist_ray.arrays.handle import Handle
from alchemist_ray.errors import (
    AlchemistError,
    CancelledError,
    GroupError,
    GroupFailedError,
    RoutineError,
    SessionError,
    advising,
    from_failure,
)
from alchemist_ray.functions import packing
from alchemist_ray.functions.packing import Work
from alchemist_ray.gang.address import GangAddress
from alchemist_ray.gang.leases import ResultLease
from alchemist_ray.gang.libraries import results_of
from alchemist_ray.observe import exporter
from alchemist_ray.runtime.cluster.names import NAMESPACE, group_name
from alchemist_ray.runtime.commands.handlers import NO_HOLDER
from alchemist_ray.runtime.driver import end_own_driver
from alchemist_ray.runtime.launch.gang_cpus import in_thread
from alchemist_ray.runtime.launch.gang_request import GangRequest
from alchemist_ray.runtime.running_gang import STATES, RunningGang
from alchemist_ray.version import __version__
from mpi_workers.failures import Failure
from mpi_workers.wire.frames import Body

FAILED_KEPT_S = 600.0  # a detached gang that has failed tells its attached processes why
IDLE_POLLS = 10  # checks of a gang within its idle_timeout_s
EXPECTED_S = 30.0
DROP_LIMIT_S = 10.0  # for cancelled tasks to end
LEAVE_S = 0.2  # for answers that are under way
MEMORY_ANSWER_S = 2.0  # for the agents to report their nodes' free memory
POLL_INTERVAL_S = 0.01  # for a start or an end that another call waits for
T = TypeVar("T")
YIELDED = "the session released its workers (yield_workers)"


class ManagedGang:
    """A gang of a GroupManager, before its start, while it runs, and after its failure.

    Parameters
    ----------
    gang : str
        Id of the gang: its name, if it has one.
    ident : str
        Begins the names of its processes and folders; of no other gang.
    """

    def __init__(self, gang: str, ident: str) -> None:
        self._name = gang
        self._ident = ident
        self._epoch = 0
        self._gang: RunningGang | None = None  # the last one, also when it has failed
        self._one_by_one = asyncio.Lock()
        self._starting: asyncio.Future[GangAddress] | None = None
        self._tasks: set[asyncio.Task[Any]] = set()
        self._created = time.time()
        self._resizes = 0  # that a process waits for
        self._calls: set[str] = set()  # tokens of `.remote` calls under way
        self._unwanted: set[str] = set()  # those whose ObjectRef is gone
        self._dropped = False

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
        return await self._in_background(self._launch(request))

    async def _launch(self, request: GangRequest) -> GangAddress:
        if self._dropped:
            raise GroupFailedError(f"gang {self._name} was ended before the call had its turn")
        if self._gang is not None and self._gang.state in STATES:
            raise GroupError(f"gang {self._name} {STATES[self._gang.state]}")
        if self._gang is not None:
            await self._gang.release(SessionError("the session has started another gang"))
            self._epoch = self._gang.epoch
        self._created = time.time()
        epoch = max(self._epoch, request.after) + 1
        gang = RunningGang(self._name, self._ident, epoch, request, self._on_lost)
        self._gang = gang
        try:
            address = await gang.start()
        except BaseException:
            self._epoch, self._gang = gang.epoch, None
            if request.options.detached:
                self._in_background(self._leave(LEAVE_S, None))
            raise
        if request.options.idle_timeout_s is not None:
            self._in_background(self._end_when_idle(gang, request.options.idle_timeout_s))
        return address

    def _in_background(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Do it in a task, which `drop` ends."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def holding(self, reservation: str) -> None:
        """Return when CPUs have been given back; see `Driver.reserve`."""
        if self._gang is not None:
            await self._gang.cpus.holding(reservation)

    async def resize(self, epoch: int, workers: int) -> None:
        """Move the gang to this many ranks. Raises `AlchemistError`; see `RunningGang.resize`."""
        gang = await self._of_epoch(epoch)
        self._resizes += 1
        try:
            await gang.resize(workers)
        finally:
            self._resizes -= 1
            gang.dispatcher.used()

    async def stop_resize(self) -> None:
        """End a resize that is under way: its caller no longer waits."""
        if self._gang is not None:
            self._gang.resizing.stop(CancelledError("it was cancelled"))

    # --- about the gang ---

    async def about(self, *, memory: bool = False) -> Body:
        """The gang's entry in the catalogue, as plain values; `memory`: ask the nodes, too."""
        gang = self._gang
        entry: Body = {
            "name": self._name,
            "named": self._name != self._ident,
            "state": "none" if gang is None else gang.state,
            "version": __version__,
            "python": platform.python_version(),
            "created": self._created,
            "reason": "",
        }
        if gang is not None:
            request = gang.request
            entry |= {
                "owner": request.owner,
                "workers": request.workers,
                "detached": request.options.detached,
                "idle_timeout_s": request.options.idle_timeout_s,
                **({"state": "resizing"} if gang.resizing.moving else {}),
                "nodes": gang.nodes,
                "failures": gang.failures,
                "reason": "" if gang.failure is None else str(gang.failure.args[0]),
                **gang.dispatcher.status(),
            }
            if memory:
                entry["free_nbytes"] = await gang.free_nbytes(MEMORY_ANSWER_S)
        return entry

    async def gang_address(self) -> GangAddress:
        """How to reach the gang, when it has been started (again).

        Raises what ended it, or SessionError without a gang.
        """
        if self._gang is not None:
            await self._gang.settled()
        if self._gang is not None and self._gang.failure is not None:
            raise self._gang.failure.with_traceback(None)
        if self._gang is None or self._gang.address is None:
            raise SessionError(f"gang {self._name} has no workers: request_workers(n) starts them")
        return self._gang.address

    async def attach(self) -> GangAddress:
        """How to reach the gang, when it has started.

        Raises
        ------
        SessionError
            If it is being ended, or did not start.
        GroupFailedError
            What ended it.
        """
        while self._gang is not None and self._gang.state == "starting":
            await asyncio.sleep(POLL_INTERVAL_S)
        if self._gang is not None and self._gang.state == "ending":
            raise SessionError(f"gang {self._name} is being ended: start another one")
        return await self.gang_address()

    async def _of_epoch(self, epoch: int) -> RunningGang:
        """The gang, if it has carried over the matrices of an epoch."""
        await self.gang_address()
        if self._gang is None or not self._gang.valid(epoch):
            raise GroupFailedError(
                f"gang {self._name} has ended, and its session has started another one: make the "
                "matrices again there"
            )
        return self._gang

    async def command(self, epoch: int, body: Body, holder: str = NO_HOLDER) -> Body:
        """Run a command for a process that no socket of the dispatcher reaches.

        `holder` is the id under which its results are leased; without one they are pinned.
        """
        gang = await self._of_epoch(epoch)
        try:
            return await gang.dispatcher.submit(body, holder)
        except Failure as failure:
            raise from_failure(failure) from None

    async def keep_source(self, epoch: int, matrix: int, source: Any) -> None:
        """A matrix that is being sent can be sent again from these data, after a failure."""
        gang = await self._of_epoch(epoch)
        record = gang.dispatcher.commands.matrices.get(matrix)
        if isinstance(source, np.ndarray):  # an object of this actor outlives the sender
            source = [(await in_thread(ray.put, source), 0, 0)]
        if record is not None:
            record.kept = source

    async def call(self, epoch: int, body: Body, holder: str = NO_HOLDER) -> Any:
        """A routine call whose results are what the user gets: values and handles."""
        self._calls.add(holder)
        try:
            address = await self.gang_address()
            reply = await self.command(epoch, body, holder)
        finally:
            self._calls.discard(holder)
            if holder in self._unwanted:
                self._unwanted.discard(holder)
                await self.end_results([holder])
        return results_of(reply, lambda record: Handle.from_record(record, address, ResultLease()))

    async def end_results(self, tokens: list[str]) -> None:
        """The ObjectRefs of calls are gone: their results are freed, or will be after the call."""
        self._unwanted.update(self._calls.intersection(tokens))
        for token in tokens:
            if token not in self._calls and self._gang is not None:
                self._gang.dispatcher.commands.lost(token)

    async def function(self, request: GangRequest, work: Work, *values: Any) -> Any:
        """Run a function on a gang of its own, which is started if it is not there.

        One after the other, in the order of the calls. `values` are what its object refs
        stood for. Raises `AlchemistError`.
        """
        async with self._one_by_one:
            epoch = (await self._own_gang(request)).epoch
            task = work.packed.task()
            if values:
                task["values"] = await in_thread(packing.packed_values, values)
            body: Body = {"op": "run", "task": task, "uses": [], "timeout_s": work.timeout_s}
            try:
                return await self._result(epoch, work.packed.name, await self.command(epoch, body))
            except GroupFailedError as error:
                raise advising(error, "the next call starts a new one") from None

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

    async def _result(self, epoch: int, name: str, reply: Body) -> Any:
        """The value that a function has returned on rank 0."""
        if known := [record["matrix"] for record in reply["matrices"]]:
            await self.command(epoch, {"op": "free", "matrices": known})
            raise RoutineError(
                f"{name} must not return a DistMatrix, because its gang ends: return an array "
                "(gathered on rank 0), or run it with als.run on a session's gang"
            )
        return await in_thread(packing.result_of, reply, dict)

    # --- the end ---

    async def end(self, why: str = YIELDED) -> None:
        """End the ranks in good order and give the CPUs back; attached processes are told why.

        The manager of a detached gang ends too.
        """
        if self._gang is not None and self._gang.state == "starting":
            raise GroupError(f"gang {self._name} {STATES['starting']}: wait until it is ready")
        await self._started()
        while self._gang is not None and self._gang.state == "ending":
            await asyncio.sleep(POLL_INTERVAL_S)
        if self._gang is not None:
            await self._gang.shutdown()
        await self._finish(SessionError(why))

    async def cancel(self) -> int:
        """Cancel all calls that run or wait; their number."""
        return 0 if self._gang is None else self._gang.dispatcher.cancel_calls()

    async def kill(self, why: str) -> None:
        """End the ranks at once, and give the CPUs back."""
        await self._started()
        if self._gang is not None:
            self._gang.kill(GroupFailedError(f"the gang was killed: {why}"))
        await self._finish(SessionError(YIELDED))

    async def drop(self) -> None:
        """End the gang at once, also if it is being started; it is not used again."""
        self._dropped = True  # calls of `function` may wait for their turn
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=DROP_LIMIT_S)
        await self.kill("its session ended it")

    async def _finish(self, error: AlchemistError) -> None:
        gang = self._gang
        try:
            if gang is not None:
                await gang.release(error)
        finally:
            self._gang = None
            self._epoch = self._epoch if gang is None else gang.epoch
        if gang is not None and gang.request.options.detached:
            self._in_background(self._leave(LEAVE_S, None))

    def _on_lost(self) -> None:
        """The gang has failed for good."""
        if self._gang is not None and self._gang.request.options.detached:
            self._in_background(self._leave(FAILED_KEPT_S, self._gang))

    async def _leave(self, after_s: float, last: RunningGang | None) -> None:
        """End this actor, unless its gang has been started again by then."""
        await asyncio.sleep(after_s)
        if self._gang is last:
            self._exit()

    async def expect_launch(self) -> None:
        """End this actor if the process that made it has died before it could ask for a gang."""
        await asyncio.sleep(EXPECTED_S)
        if self._gang is None:
            self._exit()

    def _exit(self) -> None:
        end_own_driver(self._name)
        # Not `ray.actor.exit_actor`: it waits for all calls that the actor is serving.
        ray.kill(ray.get_actor(group_name(self._name), namespace=NAMESPACE))

    async def _end_when_idle(self, gang: RunningGang, limit_s: float) -> None:
        """End the gang when no command has come for the idle timeout."""
        while gang is self._gang and gang.failure is None:
            idle_s = 0.0 if self._resizes else gang.dispatcher.idle_s
            if idle_s >= limit_s:
                await self.end(
                    f"gang {self._name} was ended after {limit_s:g} s without a command "
                    "(idle_timeout_s)"
                )
                return
            await asyncio.sleep(min(max(limit_s - idle_s, 0.01), limit_s / IDLE_POLLS))


STARTS = ("launch", "function", "expect_launch")  # methods that begin a gang


class GroupManager:
    """Actor: see the module. All its state is on one event loop.

    Parameters
    ----------
    ident : str, optional
        Begins the names of the processes and folders of a gang with a name. Those of a private
        gang begin with its id.
    """

    def __init__(self, ident: str = "") -> None:
        self._ident = ident
        self._gangs: dict[str, ManagedGang] = {}
        exporter.start()

    def gang(self, name: str) -> ManagedGang:
        """A gang; without ranks if it has not been started here."""
        return self._gangs.get(name) or ManagedGang(name, self._ident or name)

    async def ask(self, name: str, method: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method of a gang; see `GangHandle`."""
        gang = self.gang(name)
        if method in STARTS:
            self._gangs[name] = gang
        try:
            return await getattr(gang, method)(*args, **kwargs)
        except asyncio.CancelledError:
            if self._gangs.get(name) is gang:
                raise
            raise GroupFailedError("the session was closed, and its gang ended with it") from None

    async def gangs(self, *, memory: bool = False) -> list[Body]:
        """The entries of all gangs in the catalogue; see `ManagedGang.about`."""
        asked = (gang.about(memory=memory) for gang in self._gangs.values())
        return list(await asyncio.gather(*asked))

    async def forget(self, name: str) -> None:
        """End a gang at once, also one that is being started: its session is closed."""
        if name in self._gangs:
            await self._gangs.pop(name).drop()
