"""Connections to a gang's ranks, kept warm between transfers.

Same node: a rank's memory is mapped here by file descriptor. Other node: one
TCP stream per rank.
"""

from __future__ import annotations

import mmap
import os
import threading
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

STALL_S = 60.0  # a rank that neither takes nor gives a byte for so long is given up
MAPS_KEPT = 8  # mappings of a rank's memory kept for the next transfer
STREAMS = 32  # threads: more streams than these take turns


@dataclass(slots=True)
class RankTimes:
    """Where the time of a transfer went for one rank, in seconds (the paper's Figure 3).

    A copy through shared memory is all `send_s` (or `receive_s` on a fetch): the
    other columns belong to streams.
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
    """A matrix of a gang, as far as a transfer needs to know it."""

    matrix: int
    distribution: Distribution
    dtype: np.dtype[Any]


@dataclass(frozen=True, slots=True)
class RankEndpoints:
    """How to reach the ranks of a gang: secret and addresses (``unix:`` first), by rank."""

    token: str = field(repr=False)
    addresses: tuple[tuple[str, ...], ...]


class RankConnection:
    """The connection to one rank. Opened at first use; not thread-safe (see `lock`)."""

    def __init__(self, rank: int, rank_endpoints: RankEndpoints) -> None:
        self.rank = rank
        self.lock = threading.Lock()
        addresses = rank_endpoints.addresses[rank]
        self._token = rank_endpoints.token
        self.near = sockets.reachable_here(addresses[0])
        tcp = next((a for a in addresses if a.startswith("tcp:")), None)
        self._address = addresses[0] if self.near else tcp
        self._connection: Connection | None = None
        self._over = False
        self._maps: dict[int, Array] = {}  # segment id -> mapped bytes, oldest first

    @property
    def route(self) -> str:
        return "shared memory" if self.near else "TCP"

    def open(self) -> Connection:
        if self._connection is None:
            if self._address is None:
                raise Failure("TransferError", f"rank {self.rank} has no address for other nodes")
            try:
                self._connection, _ = connect(self._address, self._token, {"role": "data"})
            except (OSError, frames.WireError) as error:
                raise Failure(
                    "TransferError", f"rank {self.rank} at {self._address} is not there: {error}"
                ) from error
            if self._over:  # told to hang up while it was being dialled
                self._connection.hang_up()
        return self._connection

    def hang_up(self) -> None:
        """End the connection under whatever thread uses or opens it; `close` makes it new."""
        self._over = True
        if self._connection is not None:
            self._connection.hang_up()

    def forget(self) -> None:
        """Drop the mappings kept for the next transfer: only then is freed memory given back."""
        self._maps.clear()

    def close(self) -> None:
        """Drop the connection; what it had mapped for writing is thrown away by the rank."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        self._over = False
        self._maps.clear()

    def map(self, target: TransferTarget, *, write: bool) -> Array:
        """The rank's block of a matrix, Fortran-ordered, in this process's memory."""
        connection = self.open()
        body = {"matrix": target.matrix, "write": write, "known": list(self._maps)}
        connection.send(Kind.MAP, body)
        frame = connection.expect(Kind.MAP, STALL_S)
        for dead in frame.body["dead"]:
            self._maps.pop(dead, None)
        segment = frame.body["segment"]
        mapped = self._maps.pop(segment, None)
        try:
            if mapped is None:
                if len(frame.fds) != 1:
                    raise frames.WireError(f"{len(frame.fds)} file descriptors came with a map")
                # Pages present at once: one fault per page is what a first copy costs most.
                flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
                memory = mmap.mmap(frame.fds[0], frame.body["nbytes"], flags=flags)
                mapped = np.frombuffer(memory, np.uint8)
        finally:
            for fd in frame.fds:
                os.close(fd)
        while len(self._maps) >= MAPS_KEPT:
            self._maps.pop(next(iter(self._maps)))
        self._maps[segment] = mapped
        local_indices = target.distribution.local_indices(self.rank)
        local: Array = mapped[: local_indices.size * target.dtype.itemsize].view(target.dtype)
        return local.reshape(local_indices.shape, order="F")

    def unmap(self, target: TransferTarget, written: int) -> None:
        connection = self.open()
        connection.send(Kind.UNMAP, {"matrix": target.matrix, "written": written})
        connection.expect(Kind.SYNC, STALL_S)

    def put(self, target: TransferTarget, region: Region, share: Array) -> RankTimes:
        """Stream this rank's share of a region."""
        connection = self.open()
        connection.sock.settimeout(STALL_S)
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
                heed=True,
            )
        except frames.ConnectionLost as lost:
            # Where the rank refused and hung up, its reason is waiting to be read.
            try:
                connection.expect(Kind.REFUSED, 1.0)
            except (frames.WireError, OSError):
                raise lost from None
            raise
        return RankTimes(
            self.rank, self.route, share.size * target.dtype.itemsize, packing, sending
        )

    def sync(self) -> tuple[float, float]:
        """Wait until the rank has placed all that was put; its receive and place seconds."""
        connection = self.open()
        connection.send(Kind.SYNC)
        body = connection.expect(Kind.SYNC, STALL_S).body
        return float(body["receive_s"]), float(body["place_s"])

    def get(self, target: TransferTarget, region: Region, share: Array) -> RankTimes:
        """Fetch this rank's share of a region into `share` (any strides)."""
        connection = self.open()
        tiled = is_tiled(share)
        body = {"matrix": target.matrix, "region": list(region), "tiled": tiled}
        connection.send(Kind.GET, body)
        frame = connection.expect(Kind.DATA, STALL_S)
        nbytes = share.size * target.dtype.itemsize
        if frame.payload_nbytes != nbytes:
            raise frames.WireError(f"it sent {frame.payload_nbytes} bytes instead of {nbytes}")
        connection.sock.settimeout(STALL_S)
        receiving, placing = receive_stream(connection, share, target.dtype, tiled=tiled, order="F")
        return RankTimes(
            self.rank,
            self.route,
            nbytes,
            receive_s=receiving,
            deserialize_s=placing,
        )


class RankConnections:
    """All ranks of a gang, seen from this process. Thread-safe.

    Parameters
    ----------
    rank_endpoints : RankEndpoints
        The gang's secret and its ranks' addresses.
    threads : int, optional
        Threads for copies through shared memory. Default: this process's cores.
    """

    def __init__(self, rank_endpoints: RankEndpoints, threads: int | None = None) -> None:
        self.rank_endpoints = rank_endpoints
        self._links: dict[int, RankConnection] = {}
        self._lock = threading.Lock()
        self.threads = threads or copy_kernels.default_threads()
        # Copies and streams wait for different things: neither may starve the other.
        self.copiers = ThreadPoolExecutor(self.threads, thread_name_prefix="alchemist-copy")
        self.streams = ThreadPoolExecutor(STREAMS, thread_name_prefix="alchemist-stream")

    def link(self, rank: int) -> RankConnection:
        with self._lock:
            found = self._links.get(rank)
            if found is None:
                found = self._links[rank] = RankConnection(rank, self.rank_endpoints)
            return found

    def share_out(self, action: Callable[[int], object], numbers: Sequence[int]) -> None:
        """Run `action` for each number, on the threads that copy, and wait.

        Raises `Failure` (TransferError) if this has been closed.
        """
        shares = [numbers[k :: self.threads] for k in range(self.threads)]
        try:
            for _ in self.copiers.map(lambda share: [action(i) for i in share], shares):
                pass
        except (RuntimeError, CancelledError):
            raise closed() from None

    def trim(self) -> None:
        """Let go of the ranks' memory that is mapped here and in no transfer under way.

        A mapping kept warm holds its pages even after the rank has given them
        back: to be called when matrices have been freed and memory is short.
        """
        for link in self._all():
            if link.lock.acquire(blocking=False):
                link.forget()
                link.lock.release()

    def close(self) -> None:
        """Close every connection and end the threads; transfers under way fail."""
        links = self._all()
        with self._lock:
            self._links.clear()
        self.copiers.shutdown(wait=False, cancel_futures=True)
        self.streams.shutdown(wait=False, cancel_futures=True)
        for link in links:
            link.hang_up()
            if link.lock.acquire(blocking=False):  # else the transfer that fails now closes it
                link.close()
                link.lock.release()

    def _all(self) -> list[RankConnection]:
        with self._lock:
            return list(self._links.values())


def closed() -> Failure:
    return Failure("TransferError", "the connections to the gang were closed")


def named(link: RankConnection, action: Callable[[], T]) -> T:
    """Run an action on a link; name the rank in whatever goes wrong."""
    try:
        return action()
    except (frames.WireError, OSError) as error:
        why = "it gave no sign of life" if isinstance(error, TimeoutError) else str(error)
        raise Failure(
            "TransferError", f"the transfer with rank {link.rank} broke: {why}", rank=link.rank
        ) from error
