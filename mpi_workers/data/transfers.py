"""Sending to and fetching from a gang's ranks: the client side of `mpi_workers.data.server`.

Needs NumPy and a socket only: it runs in the user's process, in agents, in Ray tasks and in
Spark's Python workers. On the same node one pass of copies serves the mapped memory of all ranks.
To other nodes there is one stream per rank, all at the same time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import CancelledError, Future, wait
from functools import partial
from queue import Empty, SimpleQueue
from types import TracebackType
from typing import Any, NamedTuple, Self

from mpi_workers.data.rank_connections import (
    WATCH_S,
    Array,
    RankConnection,
    RankConnections,
    RankTimes,
    TransferTarget,
    attribute_errors,
    closed,
)
from mpi_workers.failures import Failure
from mpi_workers.matrix import copy_kernels
from mpi_workers.matrix.layout import LocalIndices, Shape, as_slice
from mpi_workers.matrix.regions import Region

__all__ = ["MatrixReader", "MatrixWriter", "Progress"]

STEP_BYTES = 64 << 20  # 64 MiB: progress is reported, and the ranks are checked, this often
UNCUT_BYTES = 512 << 20  # 512 MiB: up to this size a block is one step if progress is not reported
MIN_BYTES_PER_RANK = 64 << 10  # 64 KiB: takes as long to copy as a rank's overhead
MIN_COLUMN_BYTES = 256  # of a column for a rank: 32 elements
MAX_COPIES = 64  # ranks to look at for a near copy
MIN_STREAM_BYTES = 8 << 20  # 8 MiB of a block: several messages for each of its ranks

Progress = Callable[[int], None]  # called with bytes moved, from several threads


class _Step(NamedTuple):
    """A region of the matrix that moves in one step, or one rank's share of it."""

    array: Array
    region: Region


class _Transfer:
    """The base of sending and fetching: the connections for one matrix, locked and mapped.

    Another transfer with the same ranks waits for this one: do not start it on the same thread.
    After an error the transfer is over: leave the context.
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
        self._locked: list[RankConnection] = []
        self._running: list[Future[None]] = []
        self._done: SimpleQueue[Future[None]] = SimpleQueue()
        self._written: dict[int, int] = {}  # elements, by near rank
        self.times: dict[int, RankTimes] = {}

    def _select(self) -> Iterator[RankConnection]:
        """The connections that the transfer needs."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        distribution = self._target.distribution
        try:
            # Always in the same order, so that two transfers cannot deadlock.
            for connection in sorted(self._select(), key=lambda c: c.rank):
                connection.lock.acquire()
                self._locked.append(connection)
                local_indices = distribution.local_indices(connection.rank)
                self.times[connection.rank] = RankTimes(connection.rank, connection.route)
                if not local_indices.size:
                    continue
                if connection.near:
                    mapping = partial(connection.map, self._target, write=self.write)
                    local = attribute_errors(connection, mapping)
                    self._near.append(copy_kernels.RankPart(connection.rank, local_indices, local))
                else:
                    self._far.append((connection, local_indices))
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
            for connection in self._locked:
                if connection.rank in mapped:
                    written = self._written.get(connection.rank, 0)
                    unmapping = partial(connection.unmap, self._target, written)
                    attribute_errors(connection, unmapping)
            self._finish_streams()
        except BaseException:
            self._abandon()
            raise
        self._release()

    def _finish_streams(self) -> None:
        """Wait until the ranks have stored what was streamed."""

    def _abandon(self) -> None:
        """Close the connections, which tells the ranks that the transfer has failed.

        First waits for the threads that use them: a closed file descriptor may be reused.
        """
        self._near.clear()
        for connection in self._locked:
            connection.hang_up()
        wait([future for future in self._running if not future.cancel()])
        for connection in self._locked:
            connection.close()
        self._release()

    def _release(self) -> None:
        locked, self._locked = self._locked, []
        for connection in locked:
            connection.lock.release()
        if any(connection.near for connection in locked):
            self._ranks.trim_later()

    def _start(self, action: Callable[..., None], *arguments: Any) -> None:
        """Run an action on a thread; `_join` waits for it."""
        try:
            future = self._ranks.streams.submit(action, *arguments)
        except RuntimeError:
            raise closed() from None
        future.add_done_callback(self._done.put)
        self._running.append(future)

    def _join(self) -> None:
        """Wait for the running streams; raises the first error at once."""
        try:
            for _ in self._running:
                self._next_finished().result()
        except CancelledError:
            raise closed() from None
        self._running.clear()

    def _next_finished(self) -> Future[None]:
        while True:
            try:
                return self._done.get(timeout=WATCH_S)
            except Empty:
                if self._ranks.watch is not None:
                    self._ranks.watch()

    def _move(
        self,
        blocks: Iterable[copy_kernels.ArrayBlock],
        action: Callable[[RankConnection, Region, Array], RankTimes],
    ) -> None:
        """Copy the shares of near ranks, and stream those of the others with `action`."""
        for steps in self._steps(blocks):
            self._stream_far(steps, action)
            if self._near:
                self._copy_near(steps)
            self._join()

    def _steps(self, blocks: Iterable[copy_kernels.ArrayBlock]) -> Iterator[list[_Step]]:
        """Cut blocks into steps, small enough to report progress and a rank's death in time."""
        limit = STEP_BYTES if self._progress is not None else UNCUT_BYTES
        steps: list[_Step] = []
        nbytes = 0
        for array, (row, col) in blocks:
            bounds = [row, row + array.shape[0], col, col + array.shape[1]]
            whole = Region.checked(list(map(int, bounds)), self._target.distribution.shape)
            height = max(1, len(array))
            if array.nbytes > limit:
                height = max(1, STEP_BYTES // (array.nbytes // len(array)))
            for i in range(0, len(array), height):
                rows = array[i : i + height]
                if steps and nbytes + rows.nbytes > STEP_BYTES:
                    yield steps
                    steps, nbytes = [], 0
                row0 = whole.row0 + i
                region = Region(row0, row0 + len(rows), whole.col0, whole.col1)
                steps.append(_Step(rows, region))
                nbytes += rows.nbytes
        if steps:
            yield steps

    def _copy_near(self, steps: Sequence[_Step]) -> None:
        for rank in [part.rank for part in self._near]:  # a traceback must not hold its memory
            self._ranks.connection(rank).check()
        large = sum(step.array.nbytes for step in steps) > 1 << 20
        try:
            copied = copy_kernels.exchange(
                [
                    copy_kernels.ArrayBlock(array, (region.row0, region.col0))
                    for array, region in steps
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
        steps: Sequence[_Step],
        action: Callable[[RankConnection, Region, Array], RankTimes],
    ) -> None:
        """Start a stream with every far rank that has a share of the regions."""

        def stream(connection: RankConnection, shares: Sequence[_Step]) -> None:
            for array, region in shares:
                times = attribute_errors(connection, partial(action, connection, region, array))
                self.times[connection.rank].add(times)
                if self._progress is not None:
                    self._progress(times.nbytes)

        for connection, local_indices in self._far:
            shares = []
            for array, region in steps:
                share = region.of(local_indices)
                if share.size:
                    here = as_slice(share.rows, region.row0), as_slice(share.cols, region.col0)
                    shares.append(_Step(array[here], region))
            if shares:
                self._start(stream, connection, shares)


class MatrixWriter(_Transfer):
    """Sends blocks of an array into a matrix that is not sealed yet (a context manager)."""

    write = True

    def _select(self) -> Iterator[RankConnection]:
        for group in self._target.distribution.owners():
            if len(group) > 1:
                raise Failure(
                    "LayoutError",
                    f"{self._target.distribution.layout} keeps copies: send in another layout, "
                    "then use to_layout",
                )
            yield self._ranks.connection(group[0])

    def write_block(self, block: Array, origin: tuple[int, int]) -> None:
        """Send a block whose first element is global `origin`: `write_blocks` of one."""
        self.write_blocks([copy_kernels.ArrayBlock(block, origin)])

    def write_blocks(self, blocks: Iterable[copy_kernels.ArrayBlock]) -> None:
        """Send blocks; those for ranks on this node in one pass.

        Parameters
        ----------
        blocks : iterable of (ndarray of shape (m, n), (int, int))
            Each of the matrix's dtype or one that casts to it, with any strides, possibly
            read-only, and with the global row and column of its first element.

        Raises
        ------
        Failure
            TransferError naming the rank; ShapeError if a block is partly outside the matrix.

        Notes
        -----
        A block costs about 10 us for each rank that holds a part of it: join blocks first that
        `is_small` reports.
        """
        self._move(
            blocks, lambda connection, region, array: connection.put(self._target, region, array)
        )

    def is_small(self, shape: Shape) -> bool:
        """Whether copying a block of this shape together with its neighbours beats sending it.

        True if it is small for each rank, and if it has few rows: ranks store columns, and only
        few elements of each would be contiguous.
        """
        m, n = shape
        itemsize = self._target.dtype.itemsize
        if self._far:
            return m * n * itemsize < MIN_STREAM_BYTES
        stride = max((part.local_indices.rows.step for part in self._near), default=1)
        return (
            m * n * itemsize < MIN_BYTES_PER_RANK * len(self._near)
            or m * itemsize < MIN_COLUMN_BYTES * stride
        )

    def _finish_streams(self) -> None:
        def finish(connection: RankConnection) -> None:
            received, placed = attribute_errors(connection, connection.sync)
            self.times[connection.rank].receive_s += received
            self.times[connection.rank].deserialize_s += placed

        for connection, _ in self._far:
            self._start(finish, connection)
        self._join()


class MatrixReader(_Transfer):
    """Fetches regions of a sealed matrix (a context manager)."""

    write = False

    def _select(self) -> Iterator[RankConnection]:
        for group in self._target.distribution.owners():
            found = [self._ranks.connection(rank) for rank in group[:MAX_COPIES]]
            yield next((connection for connection in found if connection.near), found[0])

    def read_block(self, out: Array, origin: tuple[int, int]) -> None:
        """Fill `out` with the region of the matrix whose first element is at `origin`.

        Raises
        ------
        Failure
            TransferError naming the rank; ShapeError if the region is partly outside the matrix.
        """
        block = copy_kernels.ArrayBlock(out, origin)
        self._move(
            [block], lambda connection, region, array: connection.get(self._target, region, array)
        )
