"""The connections of a process to all nodes of a gang, and the threads that use them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor, wait
from typing import TypeVar

from mpi_workers.data.description import DataEndpoints
from mpi_workers.data.node_connection import NodeConnection, closed
from mpi_workers.matrix import copy_kernels

S = TypeVar("S")
T = TypeVar("T")

IDLE_S = 10.0  # unused mappings are dropped: they hold the memory of ranks that are gone
MAX_STREAMS = 32  # threads that stream; further streams wait


class NodeConnections:
    """The connections of this process to all nodes of a gang. Thread-safe.

    Parameters
    ----------
    endpoints : DataEndpoints
        The gang's secret and its nodes' addresses.
    threads : int, optional
        Threads for copies through shared memory. Default: this process's cores.
    watch : callable(), optional
        Called every `WATCH_S` while a transfer waits for streams; raises if the gang has failed.
        Data connections themselves notice a cut link after two minutes only.
    connection_type : callable(node, endpoints) -> NodeConnection, optional
        Makes the connections to a node.
    """

    def __init__(
        self,
        endpoints: DataEndpoints,
        threads: int | None = None,
        watch: Callable[[], object] | None = None,
        connection_type: Callable[[int, DataEndpoints], NodeConnection] = NodeConnection,
    ) -> None:
        self.endpoints = endpoints
        self.watch = watch
        self._connection_type = connection_type
        self._connections: dict[int, NodeConnection] = {}
        self._lock = threading.Lock()
        self._timer: threading.Timer | None = None
        self.threads = threads or copy_kernels.default_threads()
        # Two executors: copies need cores and streams wait, neither may hold up the other.
        self.copiers = ThreadPoolExecutor(self.threads, thread_name_prefix="alchemist-copy")
        self.streams = ThreadPoolExecutor(MAX_STREAMS, thread_name_prefix="alchemist-stream")

    def connection(self, node: int) -> NodeConnection:
        with self._lock:
            found = self._connections.get(node)
            if found is None:
                found = self._connections[node] = self._connection_type(node, self.endpoints)
            return found

    def run_parallel(self, action: Callable[[int], object], numbers: Sequence[int]) -> None:
        """Run `action` for each number on the copying threads, and wait.

        Raises `Failure` (TransferError) if this object has been closed.
        """
        shares = [numbers[k :: self.threads] for k in range(self.threads)]
        try:
            for _ in self.copiers.map(lambda share: [action(i) for i in share], shares):
                pass
        except (RuntimeError, CancelledError):
            raise closed() from None

    def run_ahead(self, action: Callable[[S], T], items: Sequence[S]) -> Iterator[T]:
        """The results of `action`, in order; a thread computes one while the last one is used.

        Raises `Failure` (TransferError) if this object has been closed.
        """
        if len(items) < 2:
            yield from map(action, items)
            return
        following = self._submit(action, items[0])
        try:
            for item in items[1:]:
                running, following = following, self._submit(action, item)
                yield running.result()
                del running  # and with it its result
            yield following.result()
        except CancelledError:
            raise closed() from None
        finally:
            wait([following])

    def _submit(self, action: Callable[[S], T], item: S) -> Future[T]:
        try:
            return self.streams.submit(action, item)
        except RuntimeError:
            raise closed() from None

    def trim(self, idle_s: float = 0.0) -> bool:
        """Drop mappings and idle streams that no transfer uses; returns whether none is left.

        A mapping holds its pages, even after its rank has ended.
        """
        empty = True
        for connection in self._all():
            if not connection.lock.acquire(blocking=False):
                empty = False
                continue
            empty &= connection.rest(idle_s)
            connection.lock.release()
        return empty

    @property
    def resting(self) -> bool:
        """Whether nothing is mapped and nothing streams."""
        return all(connection.resting for connection in self._all())

    def trim_later(self) -> None:
        """Drop mappings and streams once they have been idle for `IDLE_S`."""
        with self._lock:
            if self._timer is None and self._connections:
                self._timer = threading.Timer(IDLE_S, self._trim_idle)
                self._timer.daemon = True
                self._timer.start()

    def _trim_idle(self) -> None:
        with self._lock:
            self._timer = None
        if not self.trim(IDLE_S):
            self.trim_later()

    def close(self) -> None:
        """Close every connection and end the threads; transfers under way fail."""
        connections = self._all()
        with self._lock:
            self._connections.clear()
            if self._timer is not None:
                self._timer.cancel()
        self.copiers.shutdown(wait=False, cancel_futures=True)
        self.streams.shutdown(wait=False, cancel_futures=True)
        for connection in connections:
            connection.hang_up()
            if connection.lock.acquire(blocking=False):  # else the failing transfer closes it
                connection.close()
                connection.lock.release()

    def _all(self) -> list[NodeConnection]:
        with self._lock:
            return list(self._connections.values())
