"""Schedules the sending of blocks: each as soon as it exists, from the node that holds it.

Agents send the blocks of their nodes, several per job. Of a matrix up to 256 MiB this process
sends its local blocks, which saves a call of the agent. The task that makes a block never sends
it: Ray may run a task twice, and a block that is written twice would break the matrix.
"""

from __future__ import annotations

import contextlib
import time
from collections import defaultdict, deque
from typing import Any, Self

import ray

from alchemist_ray.errors import TransferError
from alchemist_ray.gang.connection import NODE_FAILED, GangConnection
from alchemist_ray.transfer.node_jobs import BlockDecoder, SendJob, SourceBlock, write
from alchemist_ray.transfer.object_location import OWN_BYTES, agent_of, answer_of, locate_objects
from mpi_workers.data.description import NodeTimes, TransferTarget, add_times
from mpi_workers.data.transfers import Progress

JOB_BYTES = 64 << 20  # 64 MiB sent by one job; the store can free them afterwards
JOBS_PER_NODE = 2  # at a time: the next one waits when one ends
STOP_TIMEOUT_S = 2.0  # for running jobs after a transfer has failed


class BlockSender:
    """Sends blocks that exist, or that tasks are still computing.

    Parameters
    ----------
    connection : GangConnection
        The gang; it is pinged while nothing moves.
    target : TransferTarget
        The matrix.
    decoder : BlockDecoder
        Makes arrays of the objects.
    progress : callable(nbytes), optional

    Notes
    -----
    A context manager: at its end all blocks have been sent, or, after an error, no job runs any
    more. Not thread-safe, but different threads may call it one after the other.
    """

    def __init__(
        self,
        connection: GangConnection,
        target: TransferTarget,
        decoder: BlockDecoder,
        progress: Progress | None,
    ) -> None:
        self._connection = connection
        self._target = target
        self._decoder = decoder
        self._progress = progress
        m, n = target.distribution.shape
        self._sends_local = m * n * target.dtype.itemsize <= OWN_BYTES
        self._computing: defaultdict[Any, list[SourceBlock]] = defaultdict(list)  # by object
        self._ready: defaultdict[str, deque[SourceBlock]] = defaultdict(deque)  # by node
        self._local: deque[SourceBlock] = deque()  # on this node, or open in this process
        self._jobs: dict[Any, tuple[str, list[SourceBlock]]] = {}
        self._running: defaultdict[str, int] = defaultdict(int)
        self._over = False
        self.in_flight = 0  # bytes that were added and have not arrived
        self.times: dict[int, NodeTimes] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        done = False
        try:
            if kind is None:
                self._finish()
                done = True
        finally:
            if not done:
                self._stop()

    def add(self, block: SourceBlock) -> None:
        """Take a block; later calls send it."""
        self.in_flight += self._nbytes(block)
        if isinstance(block.source, ray.ObjectRef):
            self._computing[block.source].append(block)
        else:
            self._local.append(block)

    def down_to(self, nbytes: int) -> None:
        """Send until no more than `nbytes` are in flight. Raises the error of a transfer."""
        while self.in_flight > nbytes:
            self.step(1.0)

    def _finish(self) -> None:
        """Send all."""
        while self._computing or self._jobs or self._local or any(self._ready.values()):
            self.step(1.0)

    def _stop(self) -> None:
        """Stop after an error: wait for the jobs that write now.

        Submitted tasks run to their end, and their results are dropped. Cancelling them is not
        safe: Ray 2.60 aborts this process if a task ends at that moment ("Tried to complete
        task that was not pending").
        """
        self._over = True
        making, jobs = list(self._computing), list(self._jobs)
        deadline = time.monotonic() + STOP_TIMEOUT_S
        for ref in jobs:  # they write into memory that is freed next
            with contextlib.suppress(Exception):
                ray.get(ref, timeout=max(0.0, deadline - time.monotonic()))
        for ref in self._ready_now(making, 0.0):  # Ray prints errors that are not retrieved
            with contextlib.suppress(Exception):
                ray.get(ref, timeout=0)

    def step(self, timeout_s: float) -> None:
        """Find blocks that are ready, start jobs, and send a part of the local blocks.

        Waits for something to do if there is nothing.
        """
        if self._over:
            raise TransferError(
                "the transfer was stopped, because another part of it failed or the gang ended: "
                "send the matrix again",
                cause=NODE_FAILED,
            )
        self._note(self._ready_now(list(self._computing), 0.0))
        self._start()
        if self._local:
            self._send_local()
            timeout_s = 0.0
        done = self._ready_now([*self._jobs, *self._computing], timeout_s)
        if not done:
            if timeout_s:
                self._connection.ping()  # raises if the gang is lost
            return
        self._collect([ref for ref in done if ref in self._jobs])

    @staticmethod
    def _ready_now(refs: list[Any], timeout_s: float) -> list[Any]:
        """The refs that are ready; waits for the first one."""
        if not refs:
            return []
        ready, _ = ray.wait(refs, num_returns=1, timeout=timeout_s, fetch_local=False)
        if ready and len(refs) > 1:
            ready, _ = ray.wait(refs, num_returns=len(refs), timeout=0, fetch_local=False)
        return list(ready)

    def _note(self, refs: list[Any]) -> None:
        for ref, location in zip(refs, locate_objects(refs) if refs else [], strict=True):
            near = self._sends_local and location.here
            (self._local if near else self._ready[location.node]).extend(self._computing.pop(ref))

    def _start(self) -> None:
        for node, waiting in self._ready.items():
            while waiting and self._running[node] < JOBS_PER_NODE:
                blocks = self._taken(waiting, JOB_BYTES)
                job = SendJob(
                    self._connection.address.incarnation,
                    self._connection.endpoints,
                    self._target,
                    self._decoder,
                    tuple(block._replace(source=None) for block in blocks),
                )
                ref = agent_of(node).run.remote(job, [block.source for block in blocks])
                self._jobs[ref] = (node, blocks)
                self._running[node] += 1

    def _taken(self, waiting: deque[SourceBlock], most: int) -> list[SourceBlock]:
        """The blocks of one job."""
        blocks, nbytes = [], 0
        while waiting and nbytes < most:
            blocks.append(waiting.popleft())
            nbytes += self._nbytes(blocks[-1])
        return blocks

    def _send_local(self) -> None:
        blocks = self._taken(self._local, OWN_BYTES)
        nodes = self._connection.nodes
        add_times(self.times, write(nodes, self._target, self._decoder, blocks, self._progress))
        self.in_flight -= sum(map(self._nbytes, blocks))

    def _collect(self, jobs: list[Any]) -> None:
        for ref in jobs:
            node, blocks = self._jobs.pop(ref)
            self._running[node] -= 1
            add_times(self.times, answer_of(ref, node))
            nbytes = sum(map(self._nbytes, blocks))
            self.in_flight -= nbytes
            if self._progress is not None:
                self._progress(nbytes)

    def _nbytes(self, block: SourceBlock) -> int:
        return block.shape[0] * block.shape[1] * self._target.dtype.itemsize
