"""Sending to and fetching from a gang: the client side of `mpi_workers.data.endpoint`.

Transfers have steps, small enough to report progress in time.

Needs NumPy and a socket only: it runs in the user's process, in agents and in Ray tasks; Spark's
JVMs have their own in Java. On the same node one pass of copies serves the mapped memory of all
ranks that hold a part. To other nodes there are a few streams each, all at the same time.
"""

from __future__ import annotations

import contextlib
import math
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, CancelledError, Future, wait
from functools import cached_property
from itertools import chain
from typing import Any, Self

import numpy as np

from mpi_workers.data.description import NodeTimes, TransferTarget
from mpi_workers.data.node_connections import NodeConnection, NodeConnections, attributed, closed
from mpi_workers.data.streams import IN_PLACE_BYTES, Step, stackable, stacked, steps_of
from mpi_workers.matrix import copy_kernels
from mpi_workers.matrix.copy_kernels import Array, ArrayBlock
from mpi_workers.matrix.layout import positions, spacing
from mpi_workers.matrix.node_shares import Region

__all__ = ["MatrixReader", "MatrixWriter", "Progress"]

MIN_BYTES_PER_RANK = 64 << 10  # 64 KiB: takes as long to copy as a rank's overhead
MIN_COLUMN_BYTES = 256  # of a column for a rank: 32 elements
MAX_COPIES = 64  # ranks to look at for a near copy
WATCH_S = 1.0  # between calls of the watch
MIN_STREAM_BYTES = 8 << 20  # 8 MiB of a block: several messages for each of its nodes
POPULATED_SHARE = 0.25  # of a matrix: larger fetches map all pages at once
PANEL_BYTES = 8 << 20  # 8 MiB are read, then written, between nodes
UNMAPPED_BYTES = 1 << 20  # 1 MiB: up to this size a fetch from this node does not map memory

Progress = Callable[[int], None]  # called with bytes moved, from several threads
_Share = tuple[Step, list[int]]  # a step, and the ranks of one node that hold elements of it


class _Transfer:
    """The base of sending and fetching: the connections for one matrix, locked.

    Another transfer with the same nodes waits for this one: do not start it on the same thread.
    After an error the transfer is over: leave the context.

    Its work grows with the ranks and nodes that hold elements of `region`, not with the gang.
    """

    write: bool

    def __init__(
        self,
        nodes: NodeConnections,
        target: TransferTarget,
        progress: Progress | None = None,
        buffer_bytes: int | None = None,
        region: Region | None = None,
    ) -> None:
        self._nodes = nodes
        self._target = target
        m, n = target.distribution.shape
        self._region = region or Region(0, m, 0, n)
        self._progress = progress
        self._buffer_bytes = buffer_bytes  # moved in one step; None: `steps_of` chooses
        self._near: dict[NodeConnection, list[int]] = {}  # with the ranks that hold a part
        self._far: dict[int, NodeConnection] = {}  # by node
        self._mapped: dict[int, tuple[NodeConnection, copy_kernels.RankPart]] = {}  # by rank
        self._locked: list[NodeConnection] = []
        self._running: list[Future[None]] = []
        self._streamed: dict[NodeConnection, None] = {}
        self._written: dict[int, int] = {}  # elements, by mapped rank
        self._adding = threading.Lock()
        self.times: dict[int, NodeTimes] = {}  # by node

    def _select(self, groups: Iterable[tuple[int, ...]]) -> Iterator[int]:
        """The ranks that the transfer needs, of groups that hold the same part."""
        raise NotImplementedError

    def _by_node(self, region: Region) -> dict[int, list[int]]:
        """The ranks that the transfer needs for a region, by node; both ascend."""
        found: defaultdict[int, list[int]] = defaultdict(list)
        for rank in sorted(self._select(self._target.distribution.holders(*region))):
            found[self._nodes.endpoints.node_of(rank)].append(rank)
        return found

    def __enter__(self) -> Self:
        try:
            # In the same order, so that two cannot deadlock.
            for node, ranks in self._by_node(self._region).items():
                connection = self._nodes.connection(node)
                connection.lock.acquire()
                self._locked.append(connection)
                self.times[node] = NodeTimes(node, connection.route)
                if connection.near:
                    self._near[connection] = ranks
                else:
                    self._far[node] = connection
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
            for connection in self._near:
                ranks = [rank for rank, its in mapped.items() if its is connection]
                if ranks:
                    written = {r: self._written[r] for r in ranks if r in self._written}
                    with attributed(connection):
                        connection.unmap(self._target, written)
            if self.write:
                for connection in self._streamed:
                    self._start(self._sync, connection)
                self._join()
        except BaseException:
            self._abandon()
            raise
        self._release()

    def _sync(self, connection: NodeConnection) -> None:
        """Wait until a node has stored what was streamed."""
        with attributed(connection):
            times = connection.sync()
        self.times[connection.node].add(times)

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
        self._running.append(self._nodes.submit(action, *arguments))

    def _join(self) -> None:
        """Wait for the running streams; raises the first error at once."""
        left = set(self._running)
        while left:
            done, left = wait(left, WATCH_S, FIRST_EXCEPTION)
            if not done:
                self._nodes.watch()
            try:
                for future in done:
                    future.result()
            except CancelledError:
                raise closed() from None
        self._running.clear()

    def _move(self, blocks: Iterable[ArrayBlock]) -> None:
        """Copy the shares of this node's ranks, and stream those of others."""
        shape = self._target.distribution.shape
        watched = self._progress is not None
        for steps in steps_of(blocks, shape, watched=watched, buffer_bytes=self._buffer_bytes):
            for step in steps:
                step.region.check_within(self._region)
            self._move_far(steps)
            if self._near:
                self._move_near(steps)
            self._join()

    def _move_near(self, steps: Sequence[Step]) -> None:
        nbytes = sum(step.array.nbytes for step in steps)
        if not self.write and nbytes <= UNMAPPED_BYTES:
            for connection, ranks in self._near.items():
                shares = ((step, step.holders(self._target, ranks)) for step in steps)
                self._stream(connection, ((step, its) for step, its in shares if its), 0)
            return
        m, n = self._target.distribution.shape
        itemsize = self._target.dtype.itemsize
        populate = self.write or nbytes >= POPULATED_SHARE * m * n * itemsize
        for connection, ranks in self._near.items():
            missing = {rank for rank in ranks if rank not in self._mapped}
            held: set[int] = set()
            for step in steps:
                if held == missing:
                    break
                held.update(step.holders(self._target, missing - held))
            self._map(connection, held, populate=populate)
        with self._copying():
            copied = copy_kernels.exchange(
                [ArrayBlock(array, (region.row0, region.col0)) for array, region in steps],
                [part for _, part in self._mapped.values()],
                into_parts=self.write,
                executor=self._nodes.copiers,
                threads=self._nodes.threads if nbytes > 1 << 20 else 1,
            )
        self._count(copied)

    def _map(self, connection: NodeConnection, ranks: Iterable[int], *, populate: bool) -> None:
        """Map the blocks of ranks on this node that are not mapped yet."""
        if ranks := sorted(rank for rank in ranks if rank not in self._mapped):
            with attributed(connection):
                # No local variable may hold a part: a traceback would keep its memory.
                self._mapped.update(
                    (part.rank, (connection, part))
                    for part in connection.map(
                        self._target, ranks, write=self.write, populate=populate
                    )
                )
        connection.check()

    @contextlib.contextmanager
    def _copying(self) -> Iterator[None]:
        """While the threads for copies work: they end when the connections are closed."""
        try:
            yield
        except (RuntimeError, CancelledError):
            raise closed() from None

    def _count(self, copied: dict[int, copy_kernels.Copied]) -> None:
        """Count what was copied from or to the mapped blocks of ranks."""
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

    def _move_far(self, steps: Sequence[Step]) -> None:
        """Start streams with every node that has a share of the regions."""
        if not self._far:
            return
        steps = stacked(steps, self._target.dtype)
        nodes = self._far.values()
        nbytes = sum(step.array.nbytes for step in steps)
        many = nbytes >= MIN_STREAM_BYTES * len(nodes)
        count = min(node.streams for node in nodes) if many else 1
        shares: defaultdict[tuple[int, int], list[_Share]] = defaultdict(list)
        for step in steps:
            for stream, part in enumerate(step.cut(count)):
                for node, ranks in self._by_node(part.region).items():
                    if node in self._far:
                        shares[node, stream].append((part, ranks))
        for (node, stream), some in shares.items():
            self._streamed[self._far[node]] = None
            self._start(self._stream, self._far[node], some, stream)

    def _stream(self, connection: NodeConnection, shares: Iterable[_Share], stream: int) -> None:
        move = connection.put if self.write else connection.get
        for step, ranks in shares:
            with attributed(connection):
                times = move(self._target, ranks, step.region, step.array, stream)
            with self._adding:
                self.times[times.node].add(times)
            if self._progress is not None:
                self._progress(times.nbytes)


class MatrixWriter(_Transfer):
    """Sends blocks of an array into a matrix that is not sealed yet (a context manager)."""

    write = True
    _panels = np.empty((2, 0), np.uint8)

    def _select(self, groups: Iterable[tuple[int, ...]]) -> Iterator[int]:
        return chain.from_iterable(groups)  # all copies

    def write_block(self, block: Array, origin: tuple[int, int]) -> None:
        """Send a block whose first element is global `origin`: `write_blocks` of one."""
        self._move([ArrayBlock(block, origin)])

    def write_blocks(self, blocks: Iterable[ArrayBlock]) -> None:
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
        self._move(blocks)

    def copy_from(
        self,
        reader: MatrixReader,
        region: Region,
        check: Callable[[Array], object] = lambda part: None,
    ) -> None:
        """Copy a region of another matrix, of the same shape, into this one.

        Parameters
        ----------
        reader : MatrixReader
            Of the other matrix, perhaps of another gang; entered.
        region : Region
        check : callable(array), optional
            Called with all elements, in parts, before they are copied; what it raises is raised.

        Raises
        ------
        Failure
            As of `write_block`.

        Notes
        -----
        Where all ranks are on this node, one copy of every element from rank to rank. Else
        through two panels of `PANEL_BYTES`, one of which is read while the other is written.
        """
        if self._far or reader._far:
            self._copy_panels(reader, region, check)
            return
        for transfer in (reader, self):
            ranks = transfer._by_node(region)
            for connection in transfer._near:
                transfer._map(connection, ranks.get(connection.node, ()), populate=True)
        for _, part in reader._mapped.values():
            rows, cols = region.of(part.local_indices)
            check(part.local[
                positions(part.local_indices.rows, rows), positions(part.local_indices.cols, cols)
            ])  # fmt: skip
        with self._copying():
            copied = copy_kernels.copy_between(
                [part for _, part in reader._mapped.values()],
                [part for _, part in self._mapped.values()],
                region,
                executor=self._nodes.copiers,
                threads=self._nodes.threads,
            )
        for connection in (*reader._near, *self._near):
            connection.check()  # a rank that is gone now was perhaps there before
        self._count(copied)

    def _copy_panels(
        self, reader: MatrixReader, region: Region, check: Callable[[Array], object]
    ) -> None:
        dtype = reader._target.dtype
        panels = list(region.parts(PANEL_BYTES // dtype.itemsize))
        if not self._panels.size:
            self._panels = np.empty((2, PANEL_BYTES), np.uint8)

        def read(i: int) -> Array:
            size = math.prod(panels[i].shape)
            memory = self._panels[i % 2, : size * dtype.itemsize].view(dtype)
            array = memory.reshape(panels[i].shape)
            reader.read_block(array, (panels[i].row0, panels[i].col0))
            check(array)
            return array

        arrays = self._nodes.run_ahead(read, range(len(panels)))
        for panel, array in zip(panels, arrays, strict=True):
            self.write_block(array, (panel.row0, panel.col0))

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
        if n * itemsize >= copy_kernels.KERNEL_ROW_BYTES and copy_kernels.copied_by_kernel(
            array, self._target.dtype
        ):
            return False
        least, least_of_column = self._least_bytes
        return m * n * itemsize < least or m * itemsize < least_of_column

    @cached_property
    def _least_bytes(self) -> tuple[int, int]:
        """Bytes of a block and of a column that are not small for the ranks of this node."""
        ranks = list(chain.from_iterable(self._near.values()))
        indices = map(self._target.distribution.local_indices, ranks)
        apart = max((spacing(its.rows) for its in indices), default=1)
        return MIN_BYTES_PER_RANK * len(ranks), MIN_COLUMN_BYTES * apart


class MatrixReader(_Transfer):
    """Fetches regions of a sealed matrix (a context manager)."""

    write = False

    def _select(self, groups: Iterable[tuple[int, ...]]) -> Iterator[int]:
        """One rank of each group: on this node if there is one."""
        endpoints = self._nodes.endpoints
        for group in groups:
            near = (
                rank
                for rank in group[:MAX_COPIES]
                if len(group) > 1 and self._nodes.connection(endpoints.node_of(rank)).near
            )
            yield next(near, group[0])

    def read_block(self, out: Array, origin: tuple[int, int]) -> None:
        """Fill `out` with the region of the matrix whose first element is at `origin`.

        Raises
        ------
        Failure
            TransferError naming the node; ShapeError if the region is partly outside the matrix.
        """
        self._move([ArrayBlock(out, origin)])
