"""`routine.remote(...)` without Ray: a future."""

from __future__ import annotations

import threading
from collections import deque
from concurrent.futures import Future
from typing import Any

from alchemist_ray.gang.connection import GangConnection
from alchemist_ray.gang.libraries import results_of
from mpi_workers.wire.frames import Body

THREADS = 32  # calls that wait at the same time; the gang runs one after the other anyway


class CallFuture(Future[Any]):
    """The result of a routine call that was not waited for: `result(timeout)` returns it.

    It is used like the futures of `concurrent.futures`, and can be awaited with
    `asyncio.wrap_future`.
    """

    def future(self) -> CallFuture:
        """This object: what the same method of a Ray ObjectRef returns."""
        return self


class GatewayCalls:
    """The calls of one connection that run in the background.

    Python waits at its end for the threads of a `ThreadPoolExecutor`, and so for the calls.
    """

    def __init__(self, connection: GangConnection) -> None:
        self._connection = connection
        self._lock = threading.Lock()  # guards what follows
        self._waiting: deque[tuple[CallFuture, Body]] = deque()
        self._threads = 0

    def call(self, body: Body) -> CallFuture:
        """Start a routine call."""
        future = CallFuture()
        with self._lock:
            self._waiting.append((future, body))
            more = self._threads < THREADS
            self._threads += more
        if more:
            threading.Thread(target=self._serve, name="alchemist-calls", daemon=True).start()
        return future

    def _serve(self) -> None:
        while True:
            with self._lock:
                if not self._waiting:
                    self._threads -= 1
                    return
                future, body = self._waiting.popleft()
            self._run(future, body)

    def _run(self, future: CallFuture, body: Body) -> None:
        if not future.set_running_or_notify_cancel():
            return
        try:
            reply = self._connection.request(body)
            future.set_result(results_of(reply, self._connection.handle))
        except BaseException as error:
            future.set_exception(error)
