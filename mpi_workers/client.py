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
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from functools import partial
from queue import SimpleQueue
from types import TracebackType
from typing import Any, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from mpi_workers import tiles, wire
from mpi_workers.failures import Failure
from mpi_workers.layout import Piece, Spread, as_slice
from mpi_workers.regions import Region
from mpi_workers.streams import is_tiled, receive_stream, send_stream
from mpi_workers.wire import Kind

Array = NDArray[Any]
STALL_S = 60.0  # a rank that neither takes nor gives a byte for so long is given up
PANEL_BYTES = 64 << 20  # 64 MiB: a progress bar moves this often
MAPS_KEPT = 8  # mappings of a rank's memory kept for the next transfer

Progress = Callable[[int], None]  # called with bytes moved, from several threads
T = TypeVar("T")


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

    def hang_up(self) -> None:
        """End the connection under whatever thread uses it; its owner closes it."""
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
        try:
            if mapped is None:
                if len(frame.fds) != 1:
                    raise wire.WireError(f"{len(frame.fds)} file descriptors came with a map")
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
            )
        except wire.ConnectionLost as lost:
            # Where the rank refused and hung up, its reason is waiting to be read.
            try:
                connection.expect(Kind.REFUSED, 1.0)
            except (wire.WireError, OSError):
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

    def get(self, target: Target, region: Region, share: Array) -> RankTimes:
        """Fetch this rank's share of a region into `share` (any strides)."""
        connection = self.open()
        tiled = is_tiled(share)
        body = {"matrix": target.matrix, "region": list(region), "tiled": tiled}
        connection.send(Kind.GET, body)
        frame = connection.expect(Kind.DATA, STALL_S)
        nbytes = share.size * target.dtype.itemsize
        if frame.payload_nbytes != nbytes:
            raise wire.WireError(f"it sent {frame.payload_nbytes} bytes instead of {nbytes}")
        connection.sock.settimeout(STALL_S)
        receiving, placing = receive_stream(connection, share, target.dtype, tiled=tiled, order="F")
        return RankTimes(
            self.rank,
            self.route,
            nbytes,
            receive_s=receiving,
            deserialize_s=placing,
        )


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
        for link in links:
            link.hang_up()
            if link.lock.acquire(blocking=False):  # else the transfer that fails now closes it
                link.close()
                link.lock.release()
        self.copiers.shutdown(wait=False, cancel_futures=True)
        self.streams.shutdown(wait=False, cancel_futures=True)

    def _all(self) -> list[RankLink]:
        with self._lock:
            return list(self._links.values())


class _Transfer:
    """What sending and fetching share: the links of one matrix, locked and mapped.

    Holds the links: another transfer with the same ranks waits on another
    thread, and must not be begun on this one. After an error the transfer is
    over: leave the context.
    """

    write: bool

    def __init__(self, ranks: Ranks, target: Target, progress: Progress | None = None) -> None:
        self._ranks = ranks
        self._target = target
        self._progress = progress
        self._near: list[tiles.Part] = []
        self._far: list[tuple[RankLink, Piece]] = []
        self._held: list[RankLink] = []
        self._running: list[Future[None]] = []
        self._done: SimpleQueue[Future[None]] = SimpleQueue()
        self._written: dict[int, int] = {}  # elements, by near rank
        self.times: dict[int, RankTimes] = {}

    def _chosen(self) -> Iterator[RankLink]:
        raise NotImplementedError

    def __enter__(self) -> Self:
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
                    local = _named(link, partial(link.map, self._target, write=self.write))
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
            mapped = {part.rank for part in self._near}
            self._near.clear()
            for link in self._held:
                if link.rank in mapped:
                    written = self._written.get(link.rank, 0)
                    _named(link, partial(link.unmap, self._target, written))
            self._finish_streams()
        except BaseException:
            self._abandon()
            raise
        self._release()

    def _finish_streams(self) -> None:
        """Wait for what was streamed to have arrived."""

    def _abandon(self) -> None:
        """Close the links, so that the ranks know that nothing more comes from here.

        Only when no thread uses them: a closed file descriptor may soon be another file.
        """
        self._near.clear()
        for link in self._held:
            link.hang_up()
        wait([future for future in self._running if not future.cancel()])
        for link in self._held:
            link.close()
        self._release()

    def _release(self) -> None:
        held, self._held = self._held, []
        for link in held:
            link.lock.release()

    def _start(self, action: Callable[..., None], *arguments: Any) -> None:
        """Run something on a thread of its own; `_join` waits for it."""
        try:
            future = self._ranks.streams.submit(action, *arguments)
        except RuntimeError:
            raise self._closed() from None
        future.add_done_callback(self._done.put)
        self._running.append(future)

    def _join(self) -> None:
        """Wait for the streams under way; raise the first error as soon as there is one."""
        try:
            for _ in self._running:
                self._done.get().result()
        except CancelledError:
            raise self._closed() from None
        self._running.clear()

    def _closed(self) -> Failure:
        return Failure("TransferError", "the connections to the gang were closed")

    def _move(
        self,
        array: Array,
        origin: tuple[int, int],
        action: Callable[[RankLink, Region, Array], RankTimes],
    ) -> None:
        """Copy what near ranks hold of a region, and have `action` stream the others' shares."""
        whole = self._region(array, origin)
        for row, panel in self._panels(array):
            region = self._region(panel, (whole.row0 + row, whole.col0))
            self._stream_far(panel, region, action)
            if self._near:
                self._copy_near(panel, region)
            self._join()

    def _panels(self, array: Array) -> Iterator[tuple[int, Array]]:
        """Row panels, so that progress can be told while a large array moves."""
        if self._progress is None or array.nbytes <= PANEL_BYTES:
            yield 0, array
            return
        rows = max(1, PANEL_BYTES // max(1, array.nbytes // len(array)))
        for i in range(0, len(array), rows):
            yield i, array[i : i + rows]

    def _copy_near(self, panel: Array, region: Region) -> None:
        try:
            spent = tiles.exchange(
                panel,
                (region.row0, region.col0),
                self._near,
                into_parts=self.write,
                executor=self._ranks.copiers,
                threads=self._ranks.threads if panel.nbytes > 1 << 20 else 1,
            )
        except RuntimeError:
            raise self._closed() from None
        moved = 0
        for part in self._near:
            elements = region.of(part.piece).size
            nbytes = elements * self._target.dtype.itemsize
            moved += nbytes
            times = self.times[part.rank]
            times.nbytes += nbytes
            if self.write:
                self._written[part.rank] = self._written.get(part.rank, 0) + elements
                times.send_s += spent[part.rank]
            else:
                times.receive_s += spent[part.rank]
        if self._progress is not None:
            self._progress(moved)

    def _stream_far(
        self,
        panel: Array,
        region: Region,
        action: Callable[[RankLink, Region, Array], RankTimes],
    ) -> None:
        """Start a stream with every far rank that holds something of a region."""

        def one(link: RankLink, cut: Array) -> None:
            times = _named(link, partial(action, link, region, cut))
            self.times[link.rank].add(times)
            if self._progress is not None:
                self._progress(times.nbytes)

        for link, piece in self._far:
            share = region.of(piece)
            if share.size:
                cut = panel[as_slice(share.rows, region.row0), as_slice(share.cols, region.col0)]
                self._start(one, link, cut)

    def _region(self, array: Array, origin: tuple[int, int]) -> Region:
        (row0, col0), (m, n) = origin, array.shape
        bounds = [row0, row0 + m, col0, col0 + n]
        return Region.checked(list(map(int, bounds)), self._target.spread.shape)


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
            TransferError naming the rank; ShapeError if the block is not all in the matrix.
        """
        self._move(block, origin, lambda link, region, cut: link.put(self._target, region, cut))

    def _finish_streams(self) -> None:
        def one(link: RankLink) -> None:
            received, placed = _named(link, link.sync)
            self.times[link.rank].receive_s += received
            self.times[link.rank].deserialize_s += placed

        for link, _ in self._far:
            self._start(one, link)
        self._join()


class Reader(_Transfer):
    """Fetches regions of a sealed matrix (a context manager)."""

    write = False

    def _chosen(self) -> Iterator[RankLink]:
        for group in self._target.spread.owners():
            links = [self._ranks.link(rank) for rank in group[:64]]
            yield next((link for link in links if link.near), links[0])

    def read_block(self, out: Array, origin: tuple[int, int]) -> None:
        """Fill `out` with the region of the matrix that begins at `origin`.

        Raises
        ------
        Failure
            TransferError naming the rank; ShapeError if the region is not all in the matrix.
        """
        self._move(out, origin, lambda link, region, cut: link.get(self._target, region, cut))


def _named(link: RankLink, action: Callable[[], T]) -> T:
    """Run an action on a link; name the rank in whatever goes wrong."""
    try:
        return action()
    except (wire.WireError, OSError) as error:
        why = "it gave no sign of life" if isinstance(error, TimeoutError) else str(error)
        raise Failure(
            "TransferError", f"the transfer with rank {link.rank} broke: {why}", rank=link.rank
        ) from error
