"""The connections of a process to the nodes of a gang, kept open, and the threads that use them.

On the same node the ranks' memory is mapped into this process by file descriptor. To another node
there are a few TCP streams.
"""

from __future__ import annotations

import contextlib
import errno
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Any, TypeVar

from numpy.typing import NDArray

from mpi_workers.data.description import DataEndpoints, NodeTimes, TransferTarget
from mpi_workers.data.streams import InArrays, Order, Share, is_by_row, move_stream
from mpi_workers.deadlines import STALL_TIMEOUT_S
from mpi_workers.failures import Failure
from mpi_workers.matrix import copy_kernels
from mpi_workers.matrix.mapping import SharedMapping
from mpi_workers.matrix.node_shares import Region
from mpi_workers.wire import frames, sockets
from mpi_workers.wire.blocking import DROPPED, MAX_FDS, Connection, connect, persist
from mpi_workers.wire.frames import Body, Kind

Array = NDArray[Any]

MAX_MAPPINGS = 8  # of a rank's memory, kept for the next transfer
CONNECT_STEP_S = 2.0  # of an attempt to connect: `hang_up` ends the attempts
STREAMS_PER_NODE = 2  # connections to another node that stream at the same time


class NodeConnection:
    """The connections to one node, opened at first use. Not thread-safe: hold `lock`.

    Different threads may use different streams at the same time.
    """

    def __init__(self, node: int, endpoints: DataEndpoints) -> None:
        self.node = node
        self.about = endpoints.nodes[node]
        self.lock = threading.Lock()
        self._token = endpoints.token
        found = sockets.reachable_addresses(self.about.addresses)
        self._address = found[0] if found else None
        self.near = bool(found) and found[0].startswith("unix:")
        self._streams: list[Connection | None] = [None] * (1 if self.near else STREAMS_PER_NODE)
        self.shut = threading.Event()  # until `close`
        self._mappings: dict[int, dict[int, Array]] = {}  # by rank and segment, oldest use first
        self._used = 0.0  # time of the last use

    @property
    def route(self) -> str:
        return "shared memory" if self.near else "TCP"

    @property
    def streams(self) -> int:
        """How many streams can be used at the same time."""
        return len(self._streams)

    @property
    def name(self) -> str:
        """The node in messages."""
        first, last = self.about.first, self.about.first + self.about.count - 1
        numbers = f"rank {first}" if first == last else f"ranks {first} to {last}"
        return f"the node of {numbers} ({', '.join(self.about.addresses[-1:])})"

    def open(self, stream: int = 0) -> Connection:
        self._used = time.monotonic()
        connection = self._streams[stream]
        if connection is None:
            connection = self._streams[stream] = self._connected()
            if self.shut.is_set():  # by another thread, while the connection was opened
                connection.hang_up()
        return connection

    def _connected(self) -> Connection:
        if self._address is None:
            raise Failure(
                "TransferError",
                f"{self.name} has no address that this process can reach: check the network "
                "between the two (alchemist doctor)",
            )
        address, fields = self._address, {"role": "data"}

        def attempt() -> Connection:
            if self.shut.is_set():
                raise closed()
            keepalive, step_s = sockets.DATA, CONNECT_STEP_S
            return connect(address, self._token, fields, timeout_s=step_s, keepalive=keepalive)[0]

        try:
            return persist(attempt, sockets.DATA.timeout_s, (*DROPPED, TimeoutError))
        except (OSError, frames.WireError) as error:
            words = f"cannot connect to {self.name} at {self._address}: {error}"
            raise Failure("TransferError", words) from error

    def check(self) -> None:
        """Raise `Failure` if a rank is gone: its memory stays writable after its death."""
        if self.open().readable():
            raise Failure(
                "TransferError",
                f"the transfer with {self.name} failed: its data endpoint closed the connection",
            )

    def hang_up(self) -> None:
        """End the connections for any thread that uses or opens them, until `close`."""
        self.shut.set()
        for connection in self._streams:
            if connection is not None:
                connection.hang_up()

    def rest(self, idle_s: float = 0.0) -> None:
        """Release everything that was not used in the last `idle_s`."""
        if time.monotonic() - self._used >= idle_s:
            self._mappings.clear()
            if not self.near:
                self.close()

    @property
    def resting(self) -> bool:
        """Whether there are neither mappings nor connections to another node."""
        return not self._mappings and (self.near or not any(self._streams))

    def close(self) -> None:
        """Close the connections; memory that was mapped for writing is never used again."""
        for stream, connection in enumerate(self._streams):
            if connection is not None:
                connection.close()
                self._streams[stream] = None
        self.shut.clear()
        self._mappings.clear()

    # --- shared memory ---

    def map(
        self, target: TransferTarget, ranks: Sequence[int], *, write: bool, populate: bool
    ) -> list[copy_kernels.RankPart]:
        """The ranks' blocks of a matrix, Fortran-ordered, in this process's memory.

        `populate`: map all pages now, which costs less than page faults on most of them.
        """
        parts = []
        for start in range(0, len(ranks), MAX_FDS):
            parts += self._map(target, ranks[start : start + MAX_FDS], write, populate)
        self._used = time.monotonic()
        return parts

    def _map(
        self, target: TransferTarget, ranks: Sequence[int], write: bool, populate: bool
    ) -> list[copy_kernels.RankPart]:
        connection = self.open()
        body = {"matrix": target.matrix, "ranks": list(ranks), "write": write}
        connection.send(Kind.MAP, body)
        frame = connection.expect(Kind.MAP, STALL_TIMEOUT_S)
        found = []
        try:
            if len(frame.fds) != len(ranks):  # the kernel drops those that are too many
                raise OSError(
                    errno.EMFILE,
                    "this process has too many open files: raise its limit (ulimit -n)",
                )
            for (rank, segment, nbytes), fd in zip(frame.body["parts"], frame.fds, strict=True):
                mappings = self._mappings.setdefault(rank, {})
                memory = mappings.pop(segment, None)
                if memory is None:
                    mapping = SharedMapping(fd, nbytes)
                    if populate:
                        mapping.populate()
                    memory = mapping.array()
                while len(mappings) >= MAX_MAPPINGS:
                    mappings.pop(next(iter(mappings)))
                mappings[segment] = memory
                indices = target.distribution.local_indices(rank)
                local = memory[: indices.size * target.dtype.itemsize].view(target.dtype)
                shaped = local.reshape(indices.shape, order="F")
                found.append(copy_kernels.RankPart(rank, indices, shaped))
        finally:
            for fd in frame.fds:
                os.close(fd)
        return found

    def unmap(self, target: TransferTarget, written: dict[int, int]) -> None:
        """End the loan of `map`, and report how many elements were written, by rank."""
        connection = self.open()
        pairs = [[rank, count] for rank, count in written.items()]
        connection.send(Kind.UNMAP, {"matrix": target.matrix, "written": pairs})
        connection.expect(Kind.SYNC, STALL_TIMEOUT_S)
        self._used = time.monotonic()

    # --- streams ---

    def put(
        self, target: TransferTarget, ranks: list[int], region: Region, array: Array, stream: int
    ) -> NodeTimes:
        """Stream the ranks' share of a region that `array` covers."""
        connection = self.open(stream)
        connection.sock.settimeout(STALL_TIMEOUT_S)
        share, body = _share(target, ranks, region, array)
        with _refusals(connection):
            connection.begin(Kind.PUT, body, share.nbytes)
            elements = InArrays(array, region)
            times = move_stream(connection, share, elements, out=True, stop_on_reply=True)
        return NodeTimes(self.node, self.route, share.nbytes, times.copying, times.moving)

    def get(
        self, target: TransferTarget, ranks: list[int], region: Region, array: Array, stream: int
    ) -> NodeTimes:
        """Fetch the ranks' share of a region that `array` (any strides) covers."""
        connection = self.open(stream)
        share, body = _share(target, ranks, region, array)
        connection.send(Kind.GET, body)
        frame = connection.expect(Kind.DATA, STALL_TIMEOUT_S)
        if frame.payload_nbytes != share.nbytes:
            raise frames.WireError(
                f"the node sent {frame.payload_nbytes} bytes instead of {share.nbytes}"
            )
        connection.sock.settimeout(STALL_TIMEOUT_S)
        times = move_stream(connection, share, InArrays(array, region), out=False)
        return NodeTimes(self.node, self.route, share.nbytes, 0.0, 0.0, times.moving, times.copying)

    def sync(self) -> NodeTimes:
        """Wait until the node has stored and counted what was put; its times."""
        total = NodeTimes(self.node, self.route)
        opened = [connection for connection in self._streams if connection is not None]
        for connection in opened:
            connection.send(Kind.SYNC)
        for connection in opened:
            body = connection.expect(Kind.SYNC, STALL_TIMEOUT_S).body
            total.receive_s += float(body["receive_s"])
            total.deserialize_s += float(body["place_s"])
        return total


@contextlib.contextmanager
def _refusals(connection: Connection) -> Iterator[None]:
    """Raise the node's refusal, which it sends before it closes the connection."""
    try:
        yield
    except frames.ConnectionLost as lost:
        try:
            connection.expect(Kind.REFUSED, 1.0)
        except (frames.WireError, OSError):
            raise lost from None
        raise


def _share(
    target: TransferTarget, ranks: list[int], region: Region, array: Array
) -> tuple[Share, Body]:
    """The part of a region that the ranks hold, in the order of the array; the request for it."""
    order: Order = "C" if is_by_row(array) else "F"
    share = Share.of(target.distribution, ranks, region, target.dtype, order)
    return share, {
        "matrix": target.matrix, "ranks": ranks, "region": list(region), "order": order
    }  # fmt: skip


def closed() -> Failure:
    return Failure("TransferError", "the connections to the gang were closed")


@contextlib.contextmanager
def attributed(connection: NodeConnection) -> Iterator[None]:
    """Connection errors within the context become a `Failure` that names the node."""
    try:
        yield
    except (frames.WireError, OSError) as error:
        if connection.shut.is_set():
            raise closed() from error
        stalled = isinstance(error, TimeoutError)
        why = f"no answer for {STALL_TIMEOUT_S:g} s" if stalled else str(error)
        raise Failure(
            "TransferError", f"the transfer with {connection.name} failed: {why}"
        ) from error


S = TypeVar("S")
T = TypeVar("T")

IDLE_S = 10.0  # then unused mappings are dropped: they hold the memory of ranks that are gone
STREAM_THREADS = 32  # threads that stream; further streams wait


@dataclass(eq=False)
class NodeConnections:
    """The connections of this process to all nodes of a gang. Thread-safe.

    Attributes
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
    idle_s : float
        After this time, mappings and streams that are not used are dropped.
    """

    endpoints: DataEndpoints
    threads: int = field(default_factory=copy_kernels.default_threads)
    watch: Callable[[], object] = lambda: None
    connection_type: Callable[[int, DataEndpoints], NodeConnection] = NodeConnection
    idle_s: float = IDLE_S
    _connections: dict[int, NodeConnection] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _timer: threading.Timer | None = None

    def __post_init__(self) -> None:
        # Two executors: copies need cores and streams wait, neither may hold up the other.
        self.copiers = ThreadPoolExecutor(self.threads, thread_name_prefix="alchemist-copy")
        self._streams = ThreadPoolExecutor(STREAM_THREADS, thread_name_prefix="alchemist-stream")

    def connection(self, node: int) -> NodeConnection:
        with self._lock:
            found = self._connections.get(node)
            if found is None:
                found = self._connections[node] = self.connection_type(node, self.endpoints)
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

        Never two at a time: they may use the same connection.

        Raises `Failure` (TransferError) if this object has been closed.
        """
        if len(items) < 2:
            yield from map(action, items)
            return
        following = self.submit(action, items[0])
        try:
            for item in items[1:]:
                result = following.result()
                following = self.submit(action, item)
                yield result
                del result
            yield following.result()
        except CancelledError:
            raise closed() from None
        finally:
            wait([following])

    def submit(self, action: Callable[..., T], *arguments: Any) -> Future[T]:
        """Run an action on a thread for streams. Raises `Failure` as `run_ahead`."""
        try:
            return self._streams.submit(action, *arguments)
        except RuntimeError:
            raise closed() from None

    def trim(self, idle_s: float = 0.0) -> None:
        """Drop mappings and idle streams that no transfer uses.

        A mapping holds its pages, even after its rank has ended.
        """
        for connection in self._all():
            if connection.lock.acquire(blocking=False):
                connection.rest(idle_s)
                connection.lock.release()

    @property
    def resting(self) -> bool:
        """Whether nothing is mapped and nothing streams."""
        return all(connection.resting for connection in self._all())

    def trim_later(self) -> None:
        """Drop mappings and streams once they have been idle for `idle_s`."""
        with self._lock:
            if self._timer is None and self._connections:
                self._timer = threading.Timer(self.idle_s, self._trim_idle)
                self._timer.daemon = True
                self._timer.start()

    def _trim_idle(self) -> None:
        with self._lock:
            self._timer = None
        self.trim(self.idle_s)
        if not self.resting:
            self.trim_later()

    def close(self) -> None:
        """Close every connection and end the threads; transfers under way fail."""
        connections = self._all()
        with self._lock:
            self._connections.clear()
            if self._timer is not None:
                self._timer.cancel()
        self.copiers.shutdown(wait=False, cancel_futures=True)
        self._streams.shutdown(wait=False, cancel_futures=True)
        for connection in connections:
            connection.hang_up()
            if connection.lock.acquire(blocking=False):  # else the failing transfer closes it
                connection.close()
                connection.lock.release()

    def _all(self) -> list[NodeConnection]:
        with self._lock:
            return list(self._connections.values())
