"""`Executor`: calls on MPI ranks as futures of `concurrent.futures`."""

from __future__ import annotations

import concurrent.futures
import math
import queue
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields
from functools import partial
from itertools import chain
from typing import Any

from alchemist_ray.arguments import MAX_SECONDS, checked_mapping, positive_int
from alchemist_ray.attached.address import GangAddress
from alchemist_ray.attached.connection import GangConnection
from alchemist_ray.attached.libraries import call_limits
from alchemist_ray.attached.options import ConnectionOptions, with_options
from alchemist_ray.background import in_thread
from alchemist_ray.cluster.actors import ask, ask_manager, told
from alchemist_ray.errors import BadArgumentError, GroupFailedError, advising
from alchemist_ray.functions.user_code import packed_values, run_task
from alchemist_ray.ray_access.catalogue import connect
from alchemist_ray.ray_access.mpi_function import (
    FunctionOptions,
    Host,
    gang_key,
    give_back,
    packed,
    take,
)
from mpi_workers.wire.frames import Body

AHEAD = 2  # calls that a gang has at a time: one runs, the next is there when it ends
FULL_S = 1.0  # from one look for room for another gang to the next
SHARE_S = 5.0  # that a gang waits for CPUs until those with other options take no more calls
CANCEL_INTERVAL_S = 0.1
MIN_IDLE_S = 0.05


@dataclass(frozen=True, kw_only=True)
class ExecutorOptions(FunctionOptions):
    """The gangs of an executor. Raises `ValueError`, `ResourceError`."""

    num_workers: int = 2
    max_gangs: int = 4
    idle_s: float = 60.0  # `shutdown` ends them at once

    def __post_init__(self) -> None:
        positive_int("max_gangs", self.max_gangs)
        super().__post_init__()


ExecutorOptions.__init__.__qualname__ = "Executor"  # which Python's errors name


class CallFuture(concurrent.futures.Future[Any]):
    """The future of a call. `cancel` also ends a call that runs; its gang stays."""

    def __init__(self, options: FunctionOptions, task: Body, refs: list[Any]) -> None:
        super().__init__()
        self.options = options
        self.task = task
        self.refs = refs
        self.given = False  # to a gang
        self._ending = threading.RLock()
        self._connection: GangConnection | None = None  # that runs it
        self._over = threading.Event()

    def running(self) -> bool:
        return self.given and not self.done()

    def cancel(self) -> bool:
        """Cancel the call, unless it is over; returns whether it is cancelled."""
        with self._ending:
            if self.cancelled():
                return True
            if not super().cancel():
                return False
            self.set_running_or_notify_cancel()
            self._drop_arguments()
            if self._connection is not None:
                in_thread(self._leave)
        return True

    def _drop_arguments(self) -> None:
        """They may be large, and the future stays as long as the program refers to it."""
        self.task = {}
        self.refs = []

    def _leave(self) -> None:
        """Have the ranks leave the call, as soon as its command has been sent."""
        while True:
            with self._ending:
                if self._connection is None:
                    return
                self._connection.cancel()
            self._over.wait(CANCEL_INTERVAL_S)

    def run(self, connection: GangConnection) -> Any:
        """The result of rank 0. Raises what the call raises."""
        with self._ending:
            if self.cancelled():
                return None
            self._connection = connection
            task = self.task
            refs = self.refs
        try:
            if refs:
                values = ask(refs)
                if self.cancelled():
                    return None
                task = {**task, "values": packed_values(values)}
            return run_task(connection, task, [], call_limits(self.options.timeout_s), own=True)
        finally:
            with self._ending:
                self._connection = None
            self._over.set()

    def finish(self, result: Any = None, error: BaseException | None = None) -> None:
        with self._ending:
            if self.cancelled() or not self.set_running_or_notify_cancel():
                return
            self._drop_arguments()
        if error is None:
            self.set_result(result)
        else:
            self.set_exception(error)


@dataclass(eq=False)
class _Gang:
    """A gang of an executor, with threads that give it calls: at most `AHEAD` at a time."""

    host: Host
    key: FunctionOptions
    calls: queue.SimpleQueue[CallFuture | None] = field(default_factory=queue.SimpleQueue)
    idle_s: float = 0.0  # of its last call
    given: list[CallFuture] = field(default_factory=list)  # at most `AHEAD`; the first one runs
    waits_since: float | None = None  # to start, for CPUs that gangs with other options may have
    used: float = field(default_factory=time.monotonic)

    @property
    def busy(self) -> int:
        """How many calls it has."""
        return len(self.given)


class Executor(concurrent.futures.Executor):
    """An executor of `concurrent.futures` whose calls run on MPI ranks.

    ::

        with alchemist_ray.Executor(num_workers=2, max_gangs=4) as executor:
            futures = [executor.submit(simulate, x) for x in range(100)]  # def simulate(comm, x)
            for future in concurrent.futures.as_completed(futures):
                print(future.result())

    Parameters
    ----------
    num_workers : int
        Number of MPI ranks of a call.
    max_gangs : int
        Gangs with the same number of ranks that run calls at the same time, at most. A gang starts
        when all others are busy and its CPUs are free.
    threads_per_worker, env, cpus_per_worker, gpus_per_worker, launcher, start_timeout_s, timeout_s
        As for `mpi_function`.
    idle_s : float
        Seconds that an idle gang is kept for the next call. Gangs end with `shutdown`, too.

    Notes
    -----
    `submit` and `map` call ``fn(comm, *args)`` on every rank; the result is that of rank 0.
    Arguments, results and errors are as of `mpi_function`. `asyncio`'s ``run_in_executor`` takes it
    as well.
    """

    @with_options(ExecutorOptions, "Executor")
    def __init__(self, options: ExecutorOptions) -> None:
        self._options = options
        own = {each.name: getattr(options, each.name) for each in fields(FunctionOptions)}
        self._function_options = FunctionOptions(**own)
        self._changed = threading.Condition()  # guards what follows
        self._waiting: defaultdict[FunctionOptions, deque[CallFuture]] = defaultdict(deque)
        self._gangs: defaultdict[FunctionOptions, list[_Gang]] = defaultdict(list)
        self._opening: set[FunctionOptions] = set()
        self._full: dict[FunctionOptions, float] = {}  # when there was no room for another gang
        self._running = 0
        self._closed = False

    def submit(  # type: ignore[override]  # `resources` is ours
        self,
        fn: Callable[..., Any],
        /,
        *args: Any,
        resources: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> CallFuture:
        """Call ``fn(comm, *args, **kwargs)`` on every rank of a gang; its future.

        Parameters
        ----------
        fn : callable
        resources : dict, optional
            Options of the executor that are others for this call: ``{"num_workers": 4}``.

        Raises
        ------
        RuntimeError
            After `shutdown`.
        BadArgumentError
            If something cannot be pickled, for a handle, and for unknown resources.
        """
        given = checked_mapping("resources", resources, "names and values of options")
        own = asdict(self._function_options)
        if unknown := set(given) - set(own):
            raise BadArgumentError(
                f"resources={resources!r}: a call has no {min(unknown)!r}; it has {', '.join(own)}"
            )
        options = FunctionOptions(**{**own, **given}) if given else self._function_options
        future = CallFuture(options, *packed(options, fn, args, kwargs))
        key = gang_key(options)
        with self._changed:
            if self._closed:
                raise RuntimeError("cannot schedule new futures after shutdown")
            self._waiting[key].append(future)
            self._give(key)
        return future

    # The methods below that begin with `_give`, `_shares` and `_end` are called with the lock.

    def _give(self, key: FunctionOptions) -> None:
        """Give waiting calls to the gangs that have the fewest; start another one if all have some.

        The second call of a gang is there when its first one ends.
        """
        waiting, gangs = self._waiting[key], self._gangs[key]
        while waiting and not self._shares(key):
            gang = min(gangs, key=lambda gang: gang.busy, default=None)
            if gang is None or gang.busy:
                more = len(gangs) < self._options.max_gangs
                looked = self._full.get(key, -math.inf) if gangs else -math.inf
                if more and time.monotonic() - looked > FULL_S:
                    if key not in self._opening:
                        self._opening.add(key)
                        in_thread(partial(self._open, key, first=not gangs))
                    return  # when it is there, or known not to fit
                if gang is None or gang.busy >= AHEAD:
                    return
            call = waiting.popleft()
            if not call.cancelled():
                call.given = True
                gang.idle_s = call.options.idle_s
                gang.given.append(call)
                self._running += 1
                gang.calls.put(call)

    def _give_all(self) -> None:
        for key in list(self._waiting):
            self._give(key)

    def _shares(self, key: FunctionOptions) -> bool:
        """Whether its gangs take no more calls, so that one with other options has their CPUs."""
        late = time.monotonic() - SHARE_S
        others = (gang for gang in chain(*self._gangs.values()) if gang.key != key and gang.busy)
        return any(gang.waits_since is not None and gang.waits_since < late for gang in others)

    def _open(self, key: FunctionOptions, *, first: bool) -> None:
        """Have one gang more, if there is room. There is for the first: it waits, or shares one."""
        host: Host | None = None
        failed: Exception | None = None
        since: float | None = None
        try:
            host = take(key, first=False)
            if host is None and first:
                since = time.monotonic()
                host = take(key, first=True)
        except Exception as error:  # no cluster, no driver
            failed = error
        with self._changed:
            self._opening.discard(key)
            if host is not None:
                gang = _Gang(host, key, waits_since=since)
                self._gangs[key].append(gang)
                for _ in range(AHEAD):
                    in_thread(partial(self._serve, gang))
                if since is not None:
                    self._end_idle()
            elif failed is None or self._gangs[key]:
                self._full[key] = time.monotonic()
                failed = None
            refused = [] if failed is None else [*self._waiting[key]]
            if refused:
                self._waiting[key].clear()
            self._running += len(refused)
            self._give(key)
        for call in refused:
            call.finish(error=failed)
        self._over(len(refused))

    def _over(self, count: int) -> None:
        """Calls have ended."""
        with self._changed:
            self._running -= count
            if self._closed:
                self._end_idle()
            self._changed.notify_all()

    def _serve(self, gang: _Gang) -> None:
        """Run calls of a gang, one after the other, until the gang is given back."""
        connection: GangConnection | None = None
        while (call := self._next(gang)) is not None:
            again = ended = False
            try:
                if connection is None or connection.known_loss() is not None:
                    connection = None
                    connection = _connected(gang.host)
                    with self._changed:
                        gang.waits_since = None
                        self._give_all()
                call.finish(call.run(connection))
            except BaseException as failed:
                error = told(failed)
                if isinstance(error, GroupFailedError):  # the next call starts the gang again
                    again = error.facts.get("begun") is False
                    if connection is not None:
                        connection.close()
                    connection = None
                    error = advising(error, "the next call starts a new one")
                ended = connection is None and not _alive(gang.host)
                if not again:
                    call.finish(error=error)
            with self._changed:
                gang.given.remove(call)
                gang.used = time.monotonic()
                if again:
                    self._waiting[gang.key].appendleft(call)
                if ended:
                    self._end(gang)
                self._give_all()
                if any(each.busy and each.waits_since for each in chain(*self._gangs.values())):
                    self._end_idle()
            self._over(1)
            del call
        if connection is not None:
            connection.close()

    def _next(self, gang: _Gang) -> CallFuture | None:
        """The next call of a gang. None: it is given back."""
        while True:
            try:
                return gang.calls.get(timeout=min(max(gang.idle_s, MIN_IDLE_S), MAX_SECONDS))
            except queue.Empty:
                with self._changed:
                    if not gang.busy and time.monotonic() - gang.used >= gang.idle_s:
                        self._end(gang)

    def _end_idle(self) -> None:
        """Give the gangs back that have nothing to do."""
        for key, gangs in self._gangs.items():
            if not self._waiting[key] or self._shares(key):
                for gang in [gang for gang in gangs if not gang.busy]:
                    self._end(gang)

    def _end(self, gang: _Gang) -> None:
        if gang in self._gangs[gang.key]:
            self._gangs[gang.key].remove(gang)
            give_back(gang.host)
            for _ in range(AHEAD):
                gang.calls.put(None)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Take no more calls; their gangs end when all have ended.

        Parameters
        ----------
        wait : bool
            Return when all calls have ended.
        cancel_futures : bool
            Cancel those that no ranks have begun.
        """
        with self._changed:
            self._closed = True
            gangs = chain(*self._gangs.values())
            ahead = chain(*(gang.given[1:] for gang in gangs), *self._waiting.values())
            waiting = [*ahead] if cancel_futures else []
        for call in waiting:
            call.cancel()
        with self._changed:
            self._give_all()
            self._end_idle()
            if wait:
                self._changed.wait_for(
                    lambda: not self._running and not any(self._waiting.values())
                )


def _alive(host: Host) -> bool:
    """Whether it can start a gang: not after ``ray.shutdown()``, or the end of its GroupManager."""
    try:
        return host.own.alive()
    except Exception:  # Ray is not there
        return False


def _connected(host: Host) -> GangConnection:
    """A connection to a gang, which is started if necessary."""
    address: GangAddress = ask_manager(host.own.own_gang(host.request))
    return connect(address, host.own, ConnectionOptions(progress=False))
