"""`Executor`: calls on MPI ranks as futures of `concurrent.futures`."""

from __future__ import annotations

import concurrent.futures
import queue
import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from functools import partial
from itertools import chain
from typing import Any

import ray

from alchemist_ray.arguments import checked_mapping, positive_int
from alchemist_ray.attached.options import with_options
from alchemist_ray.cluster.actors import told
from alchemist_ray.errors import BadArgumentError
from alchemist_ray.ray_access.mpi_function import FunctionOptions, gangs_of, pooled, release

# Calls that a gang has at a time: one runs, the next is there when it ends; of short calls more.
AHEAD, MOST_AHEAD = 2, 16
AHEAD_S = 0.05  # time that they take


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

    def __init__(self, start: Callable[[], Any], key: FunctionOptions) -> None:
        super().__init__()
        self.start = start
        self.key = key
        self.ref: Any = None  # of the call, when a gang has it
        self.given = 0.0  # when it got it
        self.done_by_ray: Any = None  # the future of its ObjectRef

    def running(self) -> bool:
        return self.ref is not None and not self.done()

    def cancel(self) -> bool:
        """Cancel the call, unless it is over; returns whether it is cancelled."""
        if self.cancelled():
            return True
        if not super().cancel():
            return False
        self.set_running_or_notify_cancel()
        if self.ref is not None:
            ray.cancel(self.ref)
        return True

    def finish(self) -> None:
        """Take the result of the ObjectRef."""
        if self.cancelled() or not self.set_running_or_notify_cancel():
            return
        error = self.done_by_ray.exception()
        if error is None:
            self.set_result(self.done_by_ray.result())
        else:
            self.set_exception(told(error))


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
    threads_per_worker, cpus_per_worker, launcher, start_timeout_s, timeout_s
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
        self._lock = threading.Lock()
        self._waiting: defaultdict[FunctionOptions, deque[CallFuture]] = defaultdict(deque)
        self._running: set[CallFuture] = set()
        # When the last call ended, and what one takes: by options, of all their gangs together.
        self._paces: dict[FunctionOptions, tuple[float, float]] = {}
        # Calls that have ended, and None: look again. Ray's own threads must not wait for a lock.
        self._news: queue.SimpleQueue[CallFuture | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
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
        own = {field.name: getattr(self._options, field.name) for field in fields(FunctionOptions)}
        if unknown := set(given) - set(own):
            raise BadArgumentError(
                f"resources={resources!r}: a call has no {min(unknown)!r}; it has {', '.join(own)}"
            )
        key = FunctionOptions(**{**own, **given})
        start = pooled(key, fn, args, kwargs, self._options.max_gangs)
        future = CallFuture(start, key)
        with self._lock:
            if self._closed:
                raise RuntimeError("cannot schedule new futures after shutdown")
            self._waiting[key].append(future)
            if self._thread is None:
                self._thread = threading.Thread(target=self._serve, name="Executor", daemon=True)
                self._thread.start()
        self._news.put(None)
        return future

    def _serve(self) -> None:
        """Start calls and hand over their results, until the executor is shut down and idle."""
        keys: set[FunctionOptions] = set()
        while True:
            ended = self._news.get()
            if ended is not None:
                self._running.discard(ended)
                self._note(ended)
                ended.finish()
            for call in self._startable():
                keys.add(call.key)
                try:
                    call.ref, call.given = call.start(), time.monotonic()
                except Exception as error:  # no cluster, no driver
                    if call.set_running_or_notify_cancel():
                        call.set_exception(error)
                    continue
                self._running.add(call)
                call.ref.future().add_done_callback(partial(self._tell, call))
                if call.cancelled():  # meanwhile
                    ray.cancel(call.ref)
            with self._lock:
                if self._closed and not any(self._waiting.values()) and not self._running:
                    break
        for key in keys:
            release(key)

    def _note(self, ended: CallFuture) -> None:
        """Take the time of a call into account that has ended."""
        now, (last, seconds) = time.monotonic(), self._paces.get(ended.key, (0.0, AHEAD_S))
        taken = now - max(last, ended.given)
        self._paces[ended.key] = now, 0.7 * seconds + 0.3 * taken

    def _ahead(self, key: FunctionOptions) -> int:
        _, seconds = self._paces.get(key, (0.0, AHEAD_S))
        return max(AHEAD, min(MOST_AHEAD, int(AHEAD_S / max(seconds, 1e-6))))

    def _startable(self) -> list[CallFuture]:
        """The calls, in their order, that gangs have room for."""
        found: list[CallFuture] = []
        busy = Counter(call.key for call in self._running)
        with self._lock:
            for key, waiting in self._waiting.items():
                # One more than its gangs have room for starts another gang.
                ahead = self._ahead(key)
                room = min(ahead * gangs_of(key) + 1, ahead * self._options.max_gangs) - busy[key]
                while waiting and room > 0:
                    call = waiting.popleft()
                    if not call.cancelled():
                        found.append(call)
                        room -= 1
        return found

    def _tell(self, call: CallFuture, done: concurrent.futures.Future[Any]) -> None:
        call.done_by_ray = done
        self._news.put(call)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Take no more calls; their gangs end when all have ended.

        Parameters
        ----------
        wait : bool
            Return when all calls have ended.
        cancel_futures : bool
            Cancel those that no gang has begun.
        """
        with self._lock:
            self._closed = True
            waiting = [*chain(*self._waiting.values())] if cancel_futures else []
        for call in waiting:
            call.cancel()
        self._news.put(None)
        if wait and self._thread is not None:
            self._thread.join()
