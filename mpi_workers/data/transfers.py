"""Sending to and fetching from a gang: the client side of `mpi_workers.data.endpoint`.

Transfers have steps, small enough to report progress in time. Rows may come in any order.

Needs NumPy and a socket only: it runs in the user's process, in agents and in Ray tasks; Spark's
JVMs have their own in Java. On the same node one pass of copies serves the mapped memory of all
ranks that hold a part. To other nodes there are a few streams each, all at the same time.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import CancelledError, Future, wait
from functools import cached_property, partial
from queue import Empty, SimpleQueue
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from mpi_workers.data.description import NodeTimes, TransferTarget
from mpi_workers.data.node_connections import (
    NodeConnection,
    NodeConnections,
    attribute_errors,
    closed,
)
from mpi_workers.data.streams import IN_PLACE_BYTES, Step, stackable, stacked, steps_of
from mpi_workers.failures import Failure
from mpi_workers.matrix import copy_kernels
from mpi_workers.matrix.copy_kernels import Array
from mpi_workers.matrix.layout import Shape, selector, spacing, taken
from mpi_workers.matrix.node_shares import Region

__all__ = ["MatrixReader", "MatrixWriter", "Progress"]

MIN_BYTES_PER_RANK = 64 << 10  # 64 KiB: takes as long to copy as a rank's overhead
MIN_COLUMN_BYTES = 256  # of a column for a rank: 32 elements
MAX_COPIES = 64  # ranks to look at for a near copy
WATCH_S = 1.0  # between calls of the watch
MIN_STREAM_BYTES = 8 << 20  # 8 MiB of a block: several messages for each of its nodes
POPULATED_SHARE = 0.25  # of a matrix: larger fetches map all pages at once
UNMAPPED_BYTES = 1 << 20  # 1 MiB: up to this size a fetch from this node does not map memory

Progress = Callable[[int], None]  # called with bytes moved, from several threads
Action = Callable[[NodeConnection, list[int], Region, Array, int], NodeTimes]


class _Transfer:
    """The base of sending and fetching: the connections for one matrix, locked.

    Another transfer with the same nodes waits for this one: do not start it on the same thread.
    After an error the transfer is over: leave the context.
    """

    write: bool

    def __init__(
        self,
        nodes: NodeConnections,
        target: TransferTarget,
        progress: Progress | None = None,
        buffer_bytes: int | None = None,
    ) -> None:
        self._nodes = nodes
        self._target = target
        self._progress = progress
        self._buffer_bytes = buffer_bytes  # moved in one step; None: `steps_of` chooses
        self._near: list[tuple[NodeConnection, list[int]]] = []
        self._far: list[tuple[NodeConnection, list[int]]] = []
        self._mapped: dict[int, tuple[NodeConnection, copy_kernels.RankPart]] = {}  # by rank
        self._locked: list[NodeConnection] = []
        self._running: list[Future[None]] = []
        self._done: SimpleQueue[Future[None]] = SimpleQueue()
        self._written: dict[int, int] = {}  # elements, by mapped rank
        self._adding = threading.Lock()
        self.times: dict[int, NodeTimes] = {}  # by node

    def _select(self) -> Iterator[int]:
        """The ranks that the transfer needs."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        by_node: defaultdict[int, list[int]] = defaultdict(list)
        for rank in self._select():
            if self._target.distribution.local_indices(rank).size:
                by_node[self._nodes.endpoints.node_of(rank)].append(rank)
        try:
            for node in sorted(by_node):  # in the same order, so that two cannot deadlock
                connection = self._nodes.connection(node)
                connection.lock.acquire()
                self._locked.append(connection)
                self.times[node] = NodeTimes(node, connection.route)
                side = self._near if connection.near else self._far
                side.append((connection, sorted(by_node[node])))
        except BaseException:
            self._abandon()
            raise
        return self

    def __exit__(self, kind: object, *_error: object) -> None:
        if kind is not None:
            self._abandon()
            return
        try:
            mapped, self._mapped = {r: c for r, (c, _) in self._mapped.items()}, {}
            for connection, _ in self._near:
                ranks = [rank for rank, its in mapped.items() if its is connection]
                if ranks:
                    written = {r: self._written[r] for r in ranks if r in self._written}
                    unmapping = partial(connection.unmap, self._target, written)
                    attribute_errors(connection, unmapping)
            self._finish_streams()
        except BaseException:
            self._abandon()
            raise
        self._release()

    def _finish_streams(self) -> None:
        """Wait until the nodes have stored what was streamed."""

    def _abandon(self) -> None:
        """Close the connections, which tells the nodes that the transfer has failed.

        First waits for the threads that use them: a closed file descriptor may be reused.
        """
        self._mapped.clear()
        for connection in self._locked:
            connection.hang_up()
        running = [future for future in self._running if not future.cancel()]
        try:
            wait(running)
        except BaseException:  # a second Ctrl-C
            threading.Thread(target=self._end, args=(running,), daemon=True).start()
            raise
        self._end(running)

    def _end(self, running: Sequence[Future[None]]) -> None:
        wait(running)
        for connection in self._locked:
            connection.close()
        self._release()

    def _release(self) -> None:
        locked, self._locked = self._locked, []
        for connection in locked:
            connection.lock.release()
        if locked:
            self._nodes.trim_later()

    def _start(self, action: Callable[..., None], *arguments: Any) -> None:
        """Run an action on a thread; `_join` waits for it."""
        try:
            future = self._nodes.streams.submit(action, *arguments)
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
                if self._nodes.watch is not None:
                    self._nodes.watch()

    def _move(self, blocks: Iterable[copy_kernels.ArrayBlock], action: Action) -> None:
        """Copy the shares of this node's ranks, and stream those of others with `action`."""
        shape = self._target.distribution.shape
        watched = self._progress is not None
        for steps in steps_of(blocks, shape, watched=watched, buffer_bytes=self._buffer_bytes):
            self._stream(self._far, steps, action)
            if self._near:
                self._move_near(steps, action)
            self._join()

    def _move_near(self, steps: Sequence[Step], action: Action) -> None:
        """Copy the shares of this node's ranks."""
        if not self.write and sum(step.array.nbytes for step in steps) <= UNMAPPED_BYTES:
            for connection, ranks in self._near:
                for step in steps:
                    self._run(connection, step.holders(self._target, ranks), step, action, 0)
            return
        m, n = self._target.distribution.shape
        nbytes = sum(step.array.nbytes for step in steps)
        most = POPULATED_SHARE * m * n * self._target.dtype.itemsize
        for connection, ranks in self._near:
            missing = {rank for rank in ranks if rank not in self._mapped}
            held: set[int] = set()
            for step in steps:
                if held == missing:
                    break
                held.update(step.holders(self._target, missing - held))
            self._map(connection, sorted(held), populate=self.write or nbytes >= most)
            connection.check()
        large = nbytes > 1 << 20
        try:
            copied = copy_kernels.exchange(
                [
                    copy_kernels.ArrayBlock(array, (region.row0, region.col0))
                    for array, region in steps
                ],
                [part for _, part in self._mapped.values()],
                into_parts=self.write,
                executor=self._nodes.copiers,
                threads=self._nodes.threads if large else 1,
            )
        except (RuntimeError, CancelledError):
            raise closed() from None
        itemsize = self._target.dtype.itemsize
        for rank, (elements, seconds) in copied.items():
            times = self.times[self._mapped[rank][0].node]
            times.nbytes += elements * itemsize
            if self.write:
                self._written[rank] = self._written.get(rank, 0) + elements
                times.send_s += seconds
            else:
                times.receive_s += seconds
        if self._progress is not None:
            self._progress(sum(elements for elements, _ in copied.values()) * itemsize)

    def _map(self, connection: NodeConnection, ranks: Iterable[int], *, populate: bool) -> None:
        """Map the blocks of ranks that are not mapped yet."""
        missing = [rank for rank in ranks if rank not in self._mapped]
        if missing:
            mapping = partial(
                connection.map, self._target, missing, write=self.write, populate=populate
            )
            found = attribute_errors(connection, mapping)
            # No local variable must hold a part: a traceback would keep its memory.
            self._mapped.update({part.rank: (connection, part) for part in found})
            del found

    def _stream(
        self,
        nodes: Sequence[tuple[NodeConnection, list[int]]],
        steps: Sequence[Step],
        action: Action,
    ) -> None:
        """Start streams with every node that has a share of the regions."""

        def run(
            connection: NodeConnection, ranks: list[int], parts: Sequence[Step], stream: int
        ) -> None:
            for part in parts:
                self._run(connection, part.holders(self._target, ranks), part, action, stream)

        if not nodes:
            return
        steps = stacked(steps, self._target.dtype)
        nbytes = sum(step.array.nbytes for step in steps)
        for connection, ranks in nodes:
            streams = connection.streams if nbytes >= MIN_STREAM_BYTES * len(nodes) else 1
            parts = [list(step.cut(streams)) for step in steps]
            for stream in range(streams):
                mine = [some[stream] for some in parts if stream < len(some)]
                if mine:
                    self._start(run, connection, ranks, mine, stream)

    def _run(
        self, connection: NodeConnection, ranks: list[int], step: Step, action: Action, stream: int
    ) -> None:
        if not ranks:
            return
        moving = partial(action, connection, ranks, step.region, step.array, stream)
        times = attribute_errors(connection, moving)
        with self._adding:
            self.times[connection.node].add(times)
        if self._progress is not None:
            self._progress(times.nbytes)


class MatrixWriter(_Transfer):
    """Sends blocks of an array into a matrix that is not sealed yet (a context manager)."""

    write = True

    def _select(self) -> Iterator[int]:
        for group in self._target.distribution.owners():
            if len(group) > 1:
                raise Failure(
                    "LayoutError",
                    f"{self._target.distribution.layout} has copies of elements: send in another "
                    "layout, then use to_layout",
                )
            yield group[0]

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
            TransferError naming the node; ShapeError if a block is partly outside the matrix.

        Notes
        -----
        A block costs about 10 us for each rank that holds a part of it: join blocks first that
        `is_small` reports.
        """
        self._move(
            blocks,
            lambda connection, ranks, region, array, stream: connection.put(
                self._target, ranks, region, array, stream
            ),
        )

    def is_small(self, array: Array) -> bool:
        """Whether copying such a block together with its neighbours beats sending it.

        True if it is small for each rank, and if it has few rows: ranks store columns, and only
        few elements of each would be contiguous. False if the compiled kernel copies its rows.
        To other nodes, blocks of the same columns are streamed as one, from where they are.
        """
        m, n = map(int, array.shape)
        itemsize = self._target.dtype.itemsize
        if self._far and not (self._near and stackable(array, self._target.dtype)):
            least = IN_PLACE_BYTES if stackable(array, self._target.dtype) else MIN_STREAM_BYTES
            return m * n * itemsize < least
        if n * itemsize >= copy_kernels.KERNEL_ROW_BYTES and copy_kernels.stackable(
            array, self._target.dtype
        ):
            return False
        return m * n * itemsize < self._least_bytes or m * itemsize < self._least_column_bytes

    @cached_property
    def _near_ranks(self) -> list[int]:
        return [rank for _, ranks in self._near for rank in ranks]

    @cached_property
    def _least_bytes(self) -> int:
        return MIN_BYTES_PER_RANK * len(self._near_ranks)

    @cached_property
    def _least_column_bytes(self) -> int:
        indices = map(self._target.distribution.local_indices, self._near_ranks)
        return MIN_COLUMN_BYTES * max((spacing(its.rows) for its in indices), default=1)

    def _finish_streams(self) -> None:
        def finish(connection: NodeConnection) -> None:
            self.times[connection.node].add(attribute_errors(connection, connection.sync))

        for connection, _ in self._far:
            self._start(finish, connection)
        self._join()


class MatrixReader(_Transfer):
    """Fetches regions of a sealed matrix (a context manager)."""

    write = False

    def _select(self) -> Iterator[int]:
        """One rank of each group that holds the same part: on this node if there is one."""
        endpoints = self._nodes.endpoints
        near: dict[int, bool] = {}
        for group in self._target.distribution.owners():
            chosen = group[0]
            for node in dict.fromkeys(map(endpoints.node_of, group[:MAX_COPIES])):
                if node not in near:
                    near[node] = self._nodes.connection(node).near
                if near[node]:
                    chosen = next(rank for rank in group if endpoints.node_of(rank) == node)
                    break
            yield chosen

    def read_block(self, out: Array, origin: tuple[int, int]) -> None:
        """Fill `out` with the region of the matrix whose first element is at `origin`.

        Raises
        ------
        Failure
            TransferError naming the node; ShapeError if the region is partly outside the matrix.
        """
        self._move(
            [copy_kernels.ArrayBlock(out, origin)],
            lambda connection, ranks, region, array, stream: connection.get(
                self._target, ranks, region, array, stream
            ),
        )


FRAME_BYTES = 8 << 20  # 8 MiB of rows in one frame: the node receives it before it places them


class RowWriter(MatrixWriter):
    """Sends whole rows, in any order, into a matrix that is not sealed yet."""

    @property
    def shape(self) -> Shape:
        """Shape of the whole matrix."""
        return self._target.distribution.shape

    def write_rows(self, block: Array, rows: NDArray[np.int64]) -> None:
        """Send rows of the matrix.

        Parameters
        ----------
        block : ndarray, shape (k, n)
            As for `write_block`, with n the columns of the matrix.
        rows : ndarray of int64, shape (k,)
            The global number of each; ascending, without repetition.

        Raises
        ------
        Failure
            TransferError naming the node; ShapeError for a row outside the matrix.

        Notes
        -----
        Same node: one copy of every element. Other node: one more on each side.
        """
        m, n = self._target.distribution.shape
        if not len(rows):
            return
        if block.shape != (len(rows), n) or rows[0] < 0 or rows[-1] >= m:
            raise Failure(
                "ShapeError",
                f"rows {rows[0]} to {rows[-1]} of {block.shape[1]} elements do not fit into a "
                f"{m} x {n} matrix",
            )
        if rows[-1] - rows[0] == len(rows) - 1:
            self.write_block(block, (int(rows[0]), 0))
            return
        for connection, ranks in self._far:
            self._start(self._put_rows, connection, ranks, rows, block)
        for connection, ranks in self._near:
            self._map(connection, ranks, populate=False)
            connection.check()
            for rank in ranks:
                self._copy_rows(rank, rows, block)
        self._join()

    def _copy_rows(self, rank: int, rows: Array, block: Array) -> None:
        connection, part = self._mapped[rank]
        its = self._target.distribution.runs(rank)
        share = np.flatnonzero(its[0].holds(rows)) if its is not None else rows[:0]
        if its is not None and len(share):
            local = its[0].positions(rows[share])
            cols = selector(part.local_indices.cols)
            part.local[local] = taken(block, share, cols)
            elements = len(share) * len(part.local_indices.cols)
            self._written[rank] = self._written.get(rank, 0) + elements
            self.times[connection.node].nbytes += elements * self._target.dtype.itemsize

    def _put_rows(
        self, connection: NodeConnection, ranks: list[int], rows: Array, block: Array
    ) -> None:
        most = max(1, FRAME_BYTES // (block.shape[1] * self._target.dtype.itemsize))
        for start in range(0, len(rows), most):
            some = slice(start, start + most)
            sending = partial(connection.put_rows, self._target, ranks, rows[some], block[some])
            times = attribute_errors(connection, sending)
            with self._adding:
                self.times[connection.node].add(times)
