"""Connections to a gang's ranks, kept open between transfers.

On the same node a rank's memory is mapped into this process by file descriptor. To another node
there is one TCP stream per rank.
"""

from __future__ import annotations

import mmap
import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from mpi_workers.data.streams import is_tiled, receive_stream, send_stream
from mpi_workers.failures import Failure
from mpi_workers.matrix import copy_kernels
from mpi_workers.matrix.layout import Distribution
from mpi_workers.matrix.regions import Region
from mpi_workers.wire import frames, sockets
from mpi_workers.wire.blocking import Connection, connect
from mpi_workers.wire.frames import Kind

Array = NDArray[Any]
T = TypeVar("T")

STALL_TIMEOUT_S = 600.0  # for a rank's next byte; its death and a lost node are noticed before
MAX_MAPPINGS = 8  # of a rank's memory, kept for the next transfer
MAPPING_IDLE_S = 10.0  # unused mappings are dropped: they hold the memory of ranks that are gone
WATCH_S = 1.0
MAX_STREAMS = 32  # threads that stream; further streams wait


@dataclass(slots=True)
class RankTimes:
    """Duration of each phase of a transfer for one rank, in seconds (the paper's Figure 3).

    A copy through shared memory counts as `send_s` (`receive_s` on a fetch); the other phases
    belong to streams.
    """

    rank: int
    route: str
    nbytes: int = 0
    serialize_s: float = 0.0
    send_s: float = 0.0
    receive_s: float = 0.0
    deserialize_s: float = 0.0

    def add(self, other: RankTimes) -> None:
        self.nbytes += other.nbytes
        self.serialize_s += other.serialize_s
        self.send_s += other.send_s
        self.receive_s += other.receive_s
        self.deserialize_s += other.deserialize_s


@dataclass(frozen=True, slots=True)
class TransferTarget:
    """A matrix of a gang: the properties that a transfer needs."""

    matrix: int
    distribution: Distribution
    dtype: np.dtype[Any]


@dataclass(frozen=True, slots=True)
class RankEndpoints:
    """The gang's secret and the addresses of its ranks (``unix:`` first), by rank."""

    token: str = field(repr=False)
    addresses: tuple[tuple[str, ...], ...]


class RankConnection:
    """The connection to one rank, opened at first use. Not thread-safe: hold `lock`."""

    def __init__(self, rank: int, rank_endpoints: RankEndpoints) -> None:
        self.rank = rank
        self.lock = threading.Lock()
        self._token = rank_endpoints.token
        found = sockets.reachable_addresses(rank_endpoints.addresses[rank])
        self._address = found[0] if found else None
        self.near = bool(found) and found[0].startswith("unix:")
        self._connection: Connection | None = None
        self._shut = False
        self._mappings: dict[int, Array] = {}  # by segment id, oldest first
        self._used = 0.0  # time of the last use of a mapping

    @property
    def route(self) -> str:
        return "shared memory" if self.near else "TCP"

    def open(self) -> Connection:
        if self._connection is None:
            if self._address is None:
                raise Failure(
                    "TransferError", f"rank {self.rank} has no address that this node can reach"
                )
            try:
                self._connection, _ = connect(
                    self._address,
                    self._token,
                    {"role": "data"},
                    timeout_s=sockets.DATA.timeout_s,  # a routine may hold its interpreter
                    keepalive=sockets.DATA,
                )
            except (OSError, frames.WireError) as error:
                raise Failure(
                    "TransferError",
                    f"cannot connect to rank {self.rank} at {self._address}: {error}",
                ) from error
            if self._shut:  # by another thread, while the connection was opened
                self._connection.hang_up()
        return self._connection

    def check(self) -> None:
        """Raise `Failure` if the rank is gone: its memory stays writable after its death."""
        if self.open().readable():
            raise Failure(
                "TransferError",
                f"the transfer with rank {self.rank} failed: the rank has closed the connection",
                rank=self.rank,
            )

    def hang_up(self) -> None:
        """End the connection for any thread that uses or opens it, until `close`."""
        self._shut = True
        if self._connection is not None:
            self._connection.hang_up()

    def drop_mappings(self, idle_s: float = 0.0) -> bool:
        """Drop mappings unless one was used in the last `idle_s`; returns whether none is left."""
        if time.monotonic() - self._used >= idle_s:
            self._mappings.clear()
        return not self._mappings

    def close(self) -> None:
        """Close the connection; the rank discards memory that was mapped for writing."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        self._shut = False
        self._mappings.clear()

    def map(self, target: TransferTarget, *, write: bool) -> Array:
        """The rank's block of a matrix, Fortran-ordered, in this process's memory."""
        connection = self.open()
        body = {"matrix": target.matrix, "write": write, "known": list(self._mappings)}
        connection.send(Kind.MAP, body)
        frame = connection.expect(Kind.MAP, STALL_TIMEOUT_S)
        for dead in frame.body["dead"]:
            self._mappings.pop(dead, None)
        segment = frame.body["segment"]
        mapped = self._mappings.pop(segment, None)
        try:
            if mapped is None:
                if len(frame.fds) != 1:
                    raise frames.WireError(f"{len(frame.fds)} file descriptors came with a MAP")
                # Populated at once: page faults dominate the cost of a first copy.
                flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
                memory = mmap.mmap(frame.fds[0], frame.body["nbytes"], flags=flags)
                mapped = np.frombuffer(memory, np.uint8)
        finally:
            for fd in frame.fds:
                os.close(fd)
        while len(self._mappings) >= MAX_MAPPINGS:
            self._mappings.pop(next(iter(self._mappings)))
        self._mappings[segment] = mapped
        self._used = time.monotonic()
        local_indices = target.distribution.local_indices(self.rank)
        local: Array = mapped[: local_indices.size * target.dtype.itemsize].view(target.dtype)
        return local.reshape(local_indices.shape, order="F")

    def unmap(self, target: TransferTarget, written: int) -> None:
        """End the lease of `map`, and report how many elements were written."""
        connection = self.open()
        connection.send(Kind.UNMAP, {"matrix": target.matrix, "written": written})
        connection.expect(Kind.SYNC, STALL_TIMEOUT_S)
        self._used = time.monotonic()

    def put(self, target: TransferTarget, region: Region, share: Array) -> RankTimes:
        """Stream this rank's share of a region."""
        connection = self.open()
        connection.sock.settimeout(STALL_TIMEOUT_S)
        tiled = is_tiled(share)
        body = {"matrix": target.matrix, "region": list(region), "tiled": tiled}
        try:
            packing, sending = send_stream(
                connection,
                Kind.PUT,
                body,
                share,
                target.dtype,
                tiled=tiled,
                order="C" if tiled else "F",
                stop_on_reply=True,
            )
        except frames.ConnectionLost as lost:
            # If the rank has refused, its reason can still be read.
            try:
                connection.expect(Kind.REFUSED, 1.0)
            except (frames.WireError, OSError):
                raise lost from None
            raise
        return RankTimes(
            self.rank, self.route, share.size * target.dtype.itemsize, packing, sending
        )

    def sync(self) -> tuple[float, float]:
        """Wait until the rank has stored what was put; returns its receive and place seconds."""
        connection = self.open()
        connection.send(Kind.SYNC)
        body = connection.expect(Kind.SYNC, STALL_TIMEOUT_S).body
        return float(body["receive_s"]), float(body["place_s"])

    def get(self, target: TransferTarget, region: Region, share: Array) -> RankTimes:
        """Fetch this rank's share of a region into `share` (any strides)."""
        connection = self.open()
        tiled = is_tiled(share)
        body = {"matrix": target.matrix, "region": list(region), "tiled": tiled}
        connection.send(Kind.GET, body)
        frame = connection.expect(Kind.DATA, STALL_TIMEOUT_S)
        nbytes = share.size * target.dtype.itemsize
        if frame.payload_nbytes != nbytes:
            raise frames.WireError(
                f"the rank sent {frame.payload_nbytes} bytes instead of {nbytes}"
            )
        connection.sock.settimeout(STALL_TIMEOUT_S)
        receiving, placing = receive_stream(connection, share, target.dtype, tiled=tiled, order="F")
        return RankTimes(
            self.rank,
            self.route,
            nbytes,
            receive_s=receiving,
            deserialize_s=placing,
        )


class RankConnections:
    """The connections of this process to all ranks of a gang. Thread-safe.

    Parameters
    ----------
    rank_endpoints : RankEndpoints
        The gang's secret and its ranks' addresses.
    threads : int, optional
        Threads for copies through shared memory. Default: this process's cores.
    watch : callable(), optional
        Called every `WATCH_S` while a transfer waits for streams; raises if the gang has failed.
        Data connections themselves notice a cut link after two minutes only.
    """

    def __init__(
        self,
        rank_endpoints: RankEndpoints,
        threads: int | None = None,
        watch: Callable[[], object] | None = None,
    ) -> None:
        self.rank_endpoints = rank_endpoints
        self.watch = watch
        self._connections: dict[int, RankConnection] = {}
        self._lock = threading.Lock()
        self._timer: threading.Timer | None = None
        self.threads = threads or copy_kernels.default_threads()
        # Two executors: copies need cores and streams wait, neither may hold up the other.
        self.copiers = ThreadPoolExecutor(self.threads, thread_name_prefix="alchemist-copy")
        self.streams = ThreadPoolExecutor(MAX_STREAMS, thread_name_prefix="alchemist-stream")

    def connection(self, rank: int) -> RankConnection:
        with self._lock:
            found = self._connections.get(rank)
            if found is None:
                found = self._connections[rank] = RankConnection(rank, self.rank_endpoints)
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

    def trim(self, idle_s: float = 0.0) -> bool:
        """Drop mappings of the ranks' memory that no transfer uses; returns whether none is left.

        A mapping holds its pages, even after its rank has ended.
        """
        empty = True
        for connection in self._all():
            if not connection.lock.acquire(blocking=False):
                empty = False
                continue
            empty &= connection.drop_mappings(idle_s)
            connection.lock.release()
        return empty

    def trim_later(self) -> None:
        """Drop mappings once they have been idle for `MAPPING_IDLE_S`."""
        with self._lock:
            if self._timer is None and self._connections:
                self._timer = threading.Timer(MAPPING_IDLE_S, self._trim_idle)
                self._timer.daemon = True
                self._timer.start()

    def _trim_idle(self) -> None:
        with self._lock:
            self._timer = None
        if not self.trim(MAPPING_IDLE_S):
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

    def _all(self) -> list[RankConnection]:
        with self._lock:
            return list(self._connections.values())


def closed() -> Failure:
    return Failure("TransferError", "the connections to the gang were closed")


def attribute_errors(connection: RankConnection, action: Callable[[], T]) -> T:
    """Run an action with a rank; connection errors become a `Failure` that names the rank."""
    try:
        return action()
    except (frames.WireError, OSError) as error:
        why = (
            f"no answer for {STALL_TIMEOUT_S:g} s"
            if isinstance(error, TimeoutError)
            else str(error)
        )
        raise Failure(
            "TransferError",
            f"the transfer with rank {connection.rank} failed: {why}",
            rank=connection.rank,
        ) from error
