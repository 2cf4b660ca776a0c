"""The other end of server.py: any process that sends to or fetches from a gang's ranks.

Needs NumPy and a socket, nothing else: it runs in the user's process, in the
nodes' agents, in Ray tasks and in Spark's Python workers. Same node: the rank's
memory is mapped here and copied into directly. Other node: one TCP stream per
rank.
"""

from __future__ import annotations

import mmap
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpi_workers import tiles, wire
from mpi_workers.failures import Failure
from mpi_workers.layout import Piece, Spread, as_slice
from mpi_workers.regions import Region, stream
from mpi_workers.server import send_stream
from mpi_workers.wire import Kind

Array = NDArray[Any]
STALL_S = 60.0  # a rank that neither takes nor gives a byte for so long is given up
PANEL_BYTES = 64 << 20  # 64 MiB: a progress bar moves this often
MAPS_KEPT = 8  # mappings of a rank's memory kept for the next transfer

Progress = Callable[[int], None]


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
class Target:
    """A matrix of a gang, as far as a transfer needs to know it."""

    matrix: int
    spread: Spread
    dtype: np.dtype[Any]


@dataclass(frozen=True, slots=True)
class Doors:
    """How to reach the ranks of a gang: secret and addresses (``unix:`` first), by rank."""

    token: str = field(repr=False)
    addresses: tuple[tuple[str, ...], ...]


class RankLink:
    """The connection to one rank. Opened at first use; not thread-safe (see `lock`)."""

    def __init__(self, rank: int, doors: Doors) -> None:
        self.rank = rank
        self.lock = threading.Lock()
        addresses = doors.addresses[rank]
        self._token = doors.token
        self.near = wire.reachable_here(addresses[0])
        tcp = next((a for a in addresses if a.startswith("tcp:")), None)
        self._address = addresses[0] if self.near else tcp
        self._connection: wire.Connection | None = None
        self._maps: dict[int, Array] = {}  # segment id -> mapped bytes, oldest first

    @property
    def route(self) -> str:
        return "shared memory" if self.near else "TCP"

    def open(self) -> wire.Connection:
        if self._connection is None:
            if self._address is None:
                raise Failure("TransferError", f"rank {self.rank} has no address for other nodes")
            try:
                self._connection, _ = wire.connect(self._address, self._token, {"role": "data"})
            except (OSError, wire.WireError) as error:
                raise Failure(
                    "TransferError", f"rank {self.rank} at {self._address} is not there: {error}"
                ) from error
        return self._connection

    def close(self) -> None:
        """Drop the connection; what it had mapped for writing is thrown away by the rank."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        self._maps.clear()

    def map(self, target: Target, *, write: bool) -> Array:
        """The rank's block of a matrix, Fortran-ordered, in this process's memory."""
        connection = self.open()
        body = {"matrix": target.matrix, "write": write, "known": list(self._maps)}
        connection.send(Kind.MAP, body)
        frame = connection.expect(Kind.MAP, STALL_S)
        for dead in frame.body["dead"]:
            self._maps.pop(dead, None)
        segment = frame.body["segment"]
        mapped = self._maps.pop(segment, None)
        if mapped is None:
            (fd,) = frame.fds
            try:
                # Pages present at once: one fault per page is what a first copy costs most.
                flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
                mapped = np.frombuffer(mmap.mmap(fd, frame.body["nbytes"], flags=flags), np.uint8)
            finally:
                os.close(fd)
        while len(self._maps) >= MAPS_KEPT:
            self._maps.pop(next(iter(self._maps)))
        self._maps[segment] = mapped
        piece = target.spread.piece(self.rank)
        local: Array = mapped[: piece.size * target.dtype.itemsize].view(target.dtype)
        return local.reshape(piece.shape, order="F")

    def unmap(self, target: Target, written: int) -> None:
        connection = self.open()
        connection.send(Kind.UNMAP, {"matrix": target.matrix, "written": written})
        connection.expect(Kind.SYNC, STALL_S)

    def put(self, target: Target, region: Region, share: Array) -> RankTimes:
        """Stream this rank's share of a region."""
        connection = self.open()
        connection.sock.settimeout(STALL_S)
        body = {"matrix": target.matrix, "region": list(region)}
        try:
            packing, sending = send_stream(connection, Kind.PUT, body, share)
        except wire.ConnectionLost:
            # The rank refused and hung up: its reason is waiting to be read.
            connection.expect(Kind.SYNC, 1.0)
            raise
        return RankTimes(self.rank, self.route, share.nbytes, packing, sending)

    def sync(self) -> tuple[float, float]:
        """Wait until the rank has placed all that was put; its receive and place seconds."""
        connection = self.open()
        connection.send(Kind.SYNC)
        body = connection.expect(Kind.SYNC, STALL_S).body
        return float(body["receive_s"]), float(body["place_s"])

    def get(self, target: Target, region: Region, share: Array) -> RankTimes:
        """Fetch this rank's share of a region into `share` (any strides)."""
        connection = self.open()
        connection.send(Kind.GET, {"matrix": target.matrix, "region": list(region)})
        frame = connection.expect(Kind.DATA, STALL_S)
        if frame.payload_nbytes != share.nbytes:
            raise wire.WireError(f"rank {self.rank} sent {frame.payload_nbytes} bytes")
        connection.sock.settimeout(STALL_S)
        times = RankTimes(self.rank, self.route, share.nbytes)
        staging = np.empty(0, share.dtype)
        clock = time.perf_counter()
        for rows, cols in stream(share.shape, share.itemsize):
            part = share[rows, cols]
            if staging.size < part.size:
                staging = np.empty(part.size, share.dtype)
            packed = staging[: part.size]
            connection.read_into(memoryview(packed).cast("B"))
            arrived = time.perf_counter()
            tiles.copy(part, packed.reshape(part.shape, order="F"))
            now = time.perf_counter()
            times.receive_s += arrived - clock
            times.deserialize_s += now - arrived
            clock = now
        return times


class Ranks:
    """All ranks of a gang, seen from this process. Thread-safe.

    Parameters
    ----------
    doors : Doors
        The gang's secret and its ranks' addresses.
    threads : int, optional
        Threads for copies through shared memory. Default: this process's cores.
    """

    def __init__(self, doors: Doors, threads: int | None = None) -> None:
        self.doors = doors
        self._links: dict[int, RankLink] = {}
        self._lock = threading.Lock()
        self.threads = threads or tiles.default_threads()
        # Copies and streams wait for different things: neither may starve the other.
        self.copiers = ThreadPoolExecutor(self.threads, thread_name_prefix="alchemist-copy")
        self.streams = ThreadPoolExecutor(32, thread_name_prefix="alchemist-stream")

    def link(self, rank: int) -> RankLink:
        with self._lock:
            found = self._links.get(rank)
            if found is None:
                found = self._links[rank] = RankLink(rank, self.doors)
            return found

    def close(self) -> None:
        """Close every connection and end the threads."""
        with self._lock:
            links, self._links = list(self._links.values()), {}
        for link in links:
            link.close()
        self.copiers.shutdown(wait=False, cancel_futures=True)
        self.streams.shutdown(wait=False, cancel_futures=True)


class _Transfer:
    """What sending and fetching share: the links of one matrix, locked and mapped."""

    write: bool

    def __init__(self, ranks: Ranks, target: Target, progress: Progress | None = None) -> None:
        self._ranks = ranks
        self._target = target
        self._progress = progress
        self._near: list[tiles.Part] = []
        self._far: list[tuple[RankLink, Piece]] = []
        self._written: dict[int, int] = {}
        self._held: list[RankLink] = []
        self.times: dict[int, RankTimes] = {}

    def _chosen(self) -> Iterator[RankLink]:
        raise NotImplementedError

    def __enter__(self) -> Any:
        spread = self._target.spread
        try:
            for link in sorted(self._chosen(), key=lambda k: k.rank):  # one order: no deadlock
                link.lock.acquire()
                self._held.append(link)
                piece = spread.piece(link.rank)
                self.times[link.rank] = RankTimes(link.rank, link.route)
                if not piece.size:
                    continue
                if link.near:
                    local = self._guarded(link, lambda k=link: k.map(self._target, write=self.write))
                    self._near.append(tiles.Part(link.rank, piece, local))
                else:
                    self._far.append((link, piece))
        except BaseException:
            self._abandon()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is not None:
            self._abandon()
            return
        try:
            for part in self._near:
                link = self._ranks.link(part.rank)
                self._guarded(
                    link, lambda k=link, r=part.rank: k.unmap(self._target, self._written.get(r, 0))
                )
            self._finish_streams()
        except BaseException:
            self._abandon()
            raise
        self._release()

    def _finish_streams(self) -> None:
        """Wait for what was streamed to have arrived."""

    def _abandon(self) -> None:
        """Close the links, so that the ranks know that nothing more comes from here."""
        self._near.clear()
        for link in self._held:
            link.close()
        self._release()

    def _release(self) -> None:
        held, self._held = self._held, []
        for link in held:
            link.lock.release()

    def _guarded(self, link: RankLink, action: Callable[[], Any]) -> Any:
        """Run an action on a link; name the rank in whatever goes wrong."""
        try:
            return action()
        except (wire.WireError, OSError) as error:
            why = "it gave no sign of life" if isinstance(error, TimeoutError) else str(error)
            raise Failure(
                "TransferError", f"the transfer with rank {link.rank} broke: {why}", rank=link.rank
            ) from error

    def _panels(self, array: Array) -> Iterator[tuple[int, Array]]:
        """Row panels, so that progress can be told while a large array moves."""
        if self._progress is None or array.nbytes <= PANEL_BYTES:
            yield 0, array
            return
        rows = max(1, PANEL_BYTES // max(1, array.nbytes // len(array)))
        for i in range(0, len(array), rows):
            yield i, array[i : i + rows]

    def _copy_near(self, array: Array, origin: tuple[int, int]) -> None:
        for row, panel in self._panels(array):
            spent = tiles.exchange(
                panel,
                (origin[0] + row, origin[1]),
                self._near,
                into_parts=self.write,
                executor=self._ranks.copiers,
                threads=self._ranks.threads if panel.nbytes > 1 << 20 else 1,
            )
            moved = 0
            region = _region(panel, (origin[0] + row, origin[1]))
            for part in self._near:
                elements = region.of(part.piece).size
                moved += elements * array.itemsize
                times = self.times[part.rank]
                times.nbytes += elements * array.itemsize
                if self.write:
                    self._written[part.rank] = self._written.get(part.rank, 0) + elements
                    times.send_s += spent[part.rank]
                else:
                    times.receive_s += spent[part.rank]
            if self._progress is not None:
                self._progress(moved)

    def _stream_far(
        self,
        array: Array,
        origin: tuple[int, int],
        action: Callable[[RankLink, Region, Array], RankTimes],
    ) -> list[Any]:
        region = _region(array, origin)

        def one(link: RankLink, piece: Piece) -> None:
            share = region.of(piece)
            if not share.size:
                return
            cut = array[as_slice(share.rows, origin[0]), as_slice(share.cols, origin[1])]
            times = self._guarded(link, lambda: action(link, region, cut))
            self.times[link.rank].add(times)
            if self._progress is not None:
                self._progress(cut.nbytes)

        return [self._ranks.streams.submit(one, link, piece) for link, piece in self._far]


class Writer(_Transfer):
    """Sends blocks of an array into a matrix that is not sealed yet (a context manager)."""

    write = True

    def _chosen(self) -> Iterator[RankLink]:
        for group in self._target.spread.owners():
            if len(group) > 1:
                raise Failure(
                    "LayoutError",
                    f"{self._target.spread.layout} keeps copies: send to another layout "
                    "and let the ranks copy",
                )
            yield self._ranks.link(group[0])

    def __enter__(self) -> Writer:
        super().__enter__()
        return self

    def write_block(self, block: Array, origin: tuple[int, int]) -> None:
        """Send a block whose first element is global `origin`.

        Parameters
        ----------
        block : ndarray, shape (m, n)
            Of the matrix's dtype or one that casts to it; any strides, may be read-only.
        origin : (int, int)
            Global row and column of its first element.

        Raises
        ------
        Failure
            TransferError naming the rank.
        """
        far = block if block.dtype == self._target.dtype else block.astype(self._target.dtype)
        waiting = self._stream_far(
            far, origin, lambda link, region, cut: link.put(self._target, region, cut)
        ) if self._far else []  # fmt: skip
        try:
            if self._near:
                self._copy_near(block, origin)
        finally:
            _gather(waiting)

    def _finish_streams(self) -> None:
        def one(link: RankLink) -> None:
            received, placed = self._guarded(link, link.sync)
            self.times[link.rank].receive_s += received
            self.times[link.rank].deserialize_s += placed

        _gather([self._ranks.streams.submit(one, link) for link, _ in self._far])


class Reader(_Transfer):
    """Fetches regions of a sealed matrix (a context manager)."""

    write = False

    def _chosen(self) -> Iterator[RankLink]:
        for group in self._target.spread.owners():
            links = [self._ranks.link(rank) for rank in group[:64]]
            yield next((link for link in links if link.near), links[0])

    def __enter__(self) -> Reader:
        super().__enter__()
        return self

    def read_block(self, out: Array, origin: tuple[int, int]) -> None:
        """Fill `out` with the region of the matrix that begins at `origin`.

        Raises
        ------
        Failure
            TransferError naming the rank.
        """
        waiting = self._stream_far(
            out, origin, lambda link, region, cut: link.get(self._target, region, cut)
        ) if self._far else []  # fmt: skip
        try:
            if self._near:
                self._copy_near(out, origin)
        finally:
            _gather(waiting)


def _region(array: Array, origin: tuple[int, int]) -> Region:
    m, n = array.shape
    return Region(origin[0], origin[0] + m, origin[1], origin[1] + n)


def _gather(futures: Sequence[Any]) -> None:
    """Wait for all futures; raise the first error once none is running any more."""
    first: BaseException | None = None
    for future in futures:
        try:
            future.result()
        except BaseException as error:
            first = first or error
    if first is not None:
        raise first

