"""The other end of server.py: any process that sends to or fetches from a gang's ranks.

Needs NumPy and a socket, nothing else: it runs in the user's process, in the
nodes' agents, in Ray tasks and in Spark's Python workers. Same node: one pass of
copies serves the mapped memory of all ranks. Other node: a stream per rank, all
at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import CancelledError, Future, wait
from functools import partial
from queue import SimpleQueue
from types import TracebackType
from typing import Any, NamedTuple, Self

from mpi_workers.data.rank_connections import (
    Array,
    RankConnection,
    RankConnections,
    RankTimes,
    TransferTarget,
    closed,
    named,
)
from mpi_workers.failures import Failure
from mpi_workers.matrix import copy_kernels
from mpi_workers.matrix.layout import LocalIndices, Shape, as_slice
from mpi_workers.matrix.regions import Region

__all__ = ["MatrixReader", "MatrixWriter", "Progress"]

PANEL_BYTES = 64 << 20  # 64 MiB: a progress bar moves this often
LOOK_BYTES = 512 << 20  # 512 MiB: what is copied whole where nobody watches a bar
WORTH = 64 << 10  # 64 KiB for a rank: takes as long to copy as it takes to see to a rank
RUN = 256  # bytes of a column for a rank: 32 elements
WORTH_STREAM = 8 << 20  # 8 MiB of a block: several messages for each of its ranks

Progress = Callable[[int], None]  # called with bytes moved, from several threads


class _Panel(NamedTuple):
    """A region of the matrix that moves at once, or one rank's share of it."""

    array: Array
    region: Region


class _Transfer:
    """What sending and fetching share: the links of one matrix, locked and mapped.

    Holds the links: another transfer with the same ranks waits on another
    thread, and must not be begun on this one. After an error the transfer is
    over: leave the context.
    """

    write: bool

    def __init__(
        self, ranks: RankConnections, target: TransferTarget, progress: Progress | None = None
    ) -> None:
        self._ranks = ranks
        self._target = target
        self._progress = progress
        self._near: list[copy_kernels.RankPart] = []
        self._far: list[tuple[RankConnection, LocalIndices]] = []
        self._held: list[RankConnection] = []
        self._running: list[Future[None]] = []
        self._done: SimpleQueue[Future[None]] = SimpleQueue()
        self._written: dict[int, int] = {}  # elements, by near rank
        self.times: dict[int, RankTimes] = {}

    def _chosen(self) -> Iterator[RankConnection]:
        raise NotImplementedError

    def __enter__(self) -> Self:
        distribution = self._target.distribution
        try:
            for link in sorted(self._chosen(), key=lambda k: k.rank):  # one order: no deadlock
                link.lock.acquire()
                self._held.append(link)
                local_indices = distribution.local_indices(link.rank)
                self.times[link.rank] = RankTimes(link.rank, link.route)
                if not local_indices.size:
                    continue
                if link.near:
                    local = named(link, partial(link.map, self._target, write=self.write))
                    self._near.append(copy_kernels.RankPart(link.rank, local_indices, local))
                else:
                    self._far.append((link, local_indices))
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
                    named(link, partial(link.unmap, self._target, written))
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
            raise closed() from None
        future.add_done_callback(self._done.put)
        self._running.append(future)

    def _join(self) -> None:
        """Wait for the streams under way; raise the first error as soon as there is one."""
        try:
            for _ in self._running:
                self._done.get().result()
        except CancelledError:
            raise closed() from None
        self._running.clear()

    def _move(
        self,
        blocks: Iterable[copy_kernels.ArrayBlock],
        action: Callable[[RankConnection, Region, Array], RankTimes],
    ) -> None:
        """Copy what near ranks hold of regions, and have `action` stream the others' shares."""
        for panels in self._panels(blocks):
            self._stream_far(panels, action)
            if self._near:
                self._copy_near(panels)
            self._join()

    def _panels(self, blocks: Iterable[copy_kernels.ArrayBlock]) -> Iterator[list[_Panel]]:
        """What moves at once: small enough for progress, and a rank's death, to be told soon."""
        most = PANEL_BYTES if self._progress is not None else LOOK_BYTES
        panels: list[_Panel] = []
        nbytes = 0
        for array, (row, col) in blocks:
            bounds = [row, row + array.shape[0], col, col + array.shape[1]]
            whole = Region.checked(list(map(int, bounds)), self._target.distribution.shape)
            height = max(1, len(array))
            if array.nbytes > most:
                height = max(1, PANEL_BYTES // (array.nbytes // len(array)))
            for i in range(0, len(array), height):
                rows = array[i : i + height]
                if panels and nbytes + rows.nbytes > PANEL_BYTES:
                    yield panels
                    panels, nbytes = [], 0
                row0 = whole.row0 + i
                region = Region(row0, row0 + len(rows), whole.col0, whole.col1)
                panels.append(_Panel(rows, region))
                nbytes += rows.nbytes
        if panels:
            yield panels

    def _copy_near(self, panels: Sequence[_Panel]) -> None:
        # Memory can be written long after its rank is gone. By number: an error must not hold it.
        for rank in [part.rank for part in self._near]:
            if self._ranks.link(rank).open().has_news():
                words = f"the transfer with rank {rank} broke: the rank is gone or ended it"
                raise Failure("TransferError", words, rank=rank)
        large = sum(panel.array.nbytes for panel in panels) > 1 << 20
        try:
            copied = copy_kernels.exchange(
                [
                    copy_kernels.ArrayBlock(array, (region.row0, region.col0))
                    for array, region in panels
                ],
                self._near,
                into_parts=self.write,
                executor=self._ranks.copiers,
                threads=self._ranks.threads if large else 1,
            )
        except (RuntimeError, CancelledError):
            raise closed() from None
        moved = 0
        for rank, (elements, seconds) in copied.items():
            nbytes = elements * self._target.dtype.itemsize
            moved += nbytes
            times = self.times[rank]
            times.nbytes += nbytes
            if self.write:
                self._written[rank] = self._written.get(rank, 0) + elements
                times.send_s += seconds
            else:
                times.receive_s += seconds
        if self._progress is not None:
            self._progress(moved)

    def _stream_far(
        self,
        panels: Sequence[_Panel],
        action: Callable[[RankConnection, Region, Array], RankTimes],
    ) -> None:
        """Start a stream with every far rank that holds something of some regions."""

        def stream(link: RankConnection, cuts: Sequence[_Panel]) -> None:
            for cut, region in cuts:
                times = named(link, partial(action, link, region, cut))
                self.times[link.rank].add(times)
                if self._progress is not None:
                    self._progress(times.nbytes)

        for link, local_indices in self._far:
            cuts = []
            for array, region in panels:
                share = region.of(local_indices)
                if share.size:
                    here = as_slice(share.rows, region.row0), as_slice(share.cols, region.col0)
                    cuts.append(_Panel(array[here], region))
            if cuts:
                self._start(stream, link, cuts)


class MatrixWriter(_Transfer):
    """Sends blocks of an array into a matrix that is not sealed yet (a context manager)."""

    write = True

    def _chosen(self) -> Iterator[RankConnection]:
        for group in self._target.distribution.owners():
            if len(group) > 1:
                raise Failure(
                    "LayoutError",
                    f"{self._target.distribution.layout} keeps copies: send to another layout "
                    "and let the ranks copy",
                )
            yield self._ranks.link(group[0])

    def write_block(self, block: Array, origin: tuple[int, int]) -> None:
        """Send a block whose first element is global `origin`: `write_blocks` of one."""
        self.write_blocks([copy_kernels.ArrayBlock(block, origin)])

    def write_blocks(self, blocks: Iterable[copy_kernels.ArrayBlock]) -> None:
        """Send blocks, those on one node all at once.

        Parameters
        ----------
        blocks : iterable of (ndarray of shape (m, n), (int, int))
            Of the matrix's dtype or one that casts to it; any strides, may be read-only. With
            the global row and column of its first element each.

        Raises
        ------
        Failure
            TransferError naming the rank; ShapeError if a block is not all in the matrix.

        Notes
        -----
        A block costs some 10 us for each rank that holds a part of it: those that `is_small`
        tells of are better joined first.
        """
        self._move(blocks, lambda link, region, cut: link.put(self._target, region, cut))

    def is_small(self, shape: Shape) -> bool:
        """Whether to copy a block of this shape to its neighbours costs less than to send it alone.

        So it is if it is small for each rank; and if it is low, because ranks keep columns: few
        elements of each lie together.
        """
        m, n = shape
        itemsize = self._target.dtype.itemsize
        if self._far:
            return m * n * itemsize < WORTH_STREAM
        dealt = max((part.local_indices.rows.step for part in self._near), default=1)
        return m * n * itemsize < WORTH * len(self._near) or m * itemsize < RUN * dealt

    def _finish_streams(self) -> None:
        def one(link: RankConnection) -> None:
            received, placed = named(link, link.sync)
            self.times[link.rank].receive_s += received
            self.times[link.rank].deserialize_s += placed

        for link, _ in self._far:
            self._start(one, link)
        self._join()


class MatrixReader(_Transfer):
    """Fetches regions of a sealed matrix (a context manager)."""

    write = False

    def _chosen(self) -> Iterator[RankConnection]:
        for group in self._target.distribution.owners():
            links = [self._ranks.link(rank) for rank in group[:64]]
            yield next((link for link in links if link.near), links[0])

    def read_block(self, out: Array, origin: tuple[int, int]) -> None:
        """Fill `out` with the region of the matrix that begins at `origin`.

        Raises
        ------
        Failure
            TransferError naming the rank; ShapeError if the region is not all in the matrix.
        """
        block = copy_kernels.ArrayBlock(out, origin)
        self._move([block], lambda link, region, cut: link.get(self._target, region, cut))
