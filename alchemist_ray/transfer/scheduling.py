"""Sends pieces of a matrix as they are ready, each from the node that holds it; then lets go.

The node's agent sends them, several in one job; of a matrix that is not large this process sends
what lies on its own node, which saves the way to the agent. Not the task that made a piece: Ray may
run a task twice, and a piece that is written twice would break the matrix.
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
from mpi_workers.data.rank_connections import RankTimes, TransferTarget
from mpi_workers.data.transfers import Progress

JOB_BYTES = 64 << 20  # 64 MiB: what one job sends; the store gets it back when it is over
JOBS = 2  # of a node at a time: the next is there when one ends
END_S = 2.0  # for jobs under way, where a transfer has failed


class BlockSender:
    """Sends pieces that are there, or will be.

    Parameters
    ----------
    connection : GangConnection
        The gang; it is watched whenever nothing moves.
    target : TransferTarget
        The matrix.
    reader : BlockDecoder
        What the pieces' objects are.
    progress : callable(nbytes), optional

    Notes
    -----
    Used as a context manager: at its end all has been sent, or, after an error, nothing is under
    way any more. Not thread-safe, but its calls may come from different threads, one after the
    other.
    """

    def __init__(
        self,
        connection: GangConnection,
        target: TransferTarget,
        reader: BlockDecoder,
        progress: Progress | None,
    ) -> None:
        self._connection = connection
        self._target = target
        self._reader = reader
        self._progress = progress
        m, n = target.distribution.shape
        self._helps = m * n * target.dtype.itemsize <= OWN_BYTES
        self._making: defaultdict[Any, list[SourceBlock]] = defaultdict(list)  # by object
        self._ready: defaultdict[str, deque[SourceBlock]] = defaultdict(deque)  # by node
        self._near: deque[SourceBlock] = deque()  # on this node, or open in this process
        self._jobs: dict[Any, tuple[str, list[SourceBlock]]] = {}
        self._running: defaultdict[str, int] = defaultdict(int)
        self._over = False
        self.in_flight = 0  # bytes that were added and have not yet arrived
        self.times: dict[int, RankTimes] = {}

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

    def add(self, piece: SourceBlock) -> None:
        """Take a piece; it is sent by later calls."""
        self.in_flight += self._nbytes(piece)
        if isinstance(piece.source, ray.ObjectRef):
            self._making[piece.source].append(piece)
        else:
            self._near.append(piece)

    def down_to(self, nbytes: int) -> None:
        """Send until no more than `nbytes` are in flight. Raises what went wrong."""
        while self.in_flight > nbytes:
            self.step(1.0)

    def _finish(self) -> None:
        """Send all."""
        while self._making or self._jobs or self._near or any(self._ready.values()):
            self.step(1.0)

    def _stop(self) -> None:
        """Nothing more is wanted: wait for what is being sent.

        Tasks that were submitted run to their end, and what they make is let go. To cancel them
        may cost this process: Ray 2.60 aborts on one that ends at that moment ("Tried to
        complete task that was not pending").
        """
        self._over = True
        making, jobs = list(self._making), list(self._jobs)
        deadline = time.monotonic() + END_S
        for ref in jobs:  # they write into memory that is about to be freed
            with contextlib.suppress(Exception):
                ray.get(ref, timeout=max(0.0, deadline - time.monotonic()))
        for ref in self._ready_now(making, 0.0):  # an error that is seen is not printed
            with contextlib.suppress(Exception):
                ray.get(ref, timeout=0)

    def step(self, timeout_s: float) -> None:
        """Note what is ready, start the jobs that are possible, send a part of what is near.

        If nothing was, waits for something to do.
        """
        if self._over:
            raise TransferError("the transfer was given up", cause=NODE_FAILED)
        self._note(self._ready_now(list(self._making), 0.0))
        self._start()
        if self._near:
            self._send_near()
            timeout_s = 0.0
        done = self._ready_now([*self._jobs, *self._making], timeout_s)
        if not done:
            if timeout_s:
                self._connection.ping()  # raises if the gang is lost
            return
        self._collect([ref for ref in done if ref in self._jobs])

    @staticmethod
    def _ready_now(refs: list[Any], timeout_s: float) -> list[Any]:
        """Those that are there; waits for the first of them."""
        if not refs:
            return []
        ready, _ = ray.wait(refs, num_returns=1, timeout=timeout_s, fetch_local=False)
        if ready and len(refs) > 1:
            ready, _ = ray.wait(refs, num_returns=len(refs), timeout=0, fetch_local=False)
        return list(ready)

    def _note(self, refs: list[Any]) -> None:
        for ref, held in zip(refs, locate_objects(refs) if refs else [], strict=True):
            near = self._helps and held.here
            (self._near if near else self._ready[held.node]).extend(self._making.pop(ref))

    def _start(self) -> None:
        for node, waiting in self._ready.items():
            while waiting and self._running[node] < JOBS:
                pieces = self._taken(waiting, JOB_BYTES)
                job = SendJob(
                    self._connection.address.incarnation,
                    self._connection.rank_endpoints,
                    self._target,
                    self._reader,
                    tuple(piece.origin for piece in pieces),
                    tuple(piece.shape for piece in pieces),
                    tuple(piece.label for piece in pieces),
                )
                ref = agent_of(node).run.remote(job, [piece.source for piece in pieces])
                self._jobs[ref] = (node, pieces)
                self._running[node] += 1

    def _taken(self, waiting: deque[SourceBlock], most: int) -> list[SourceBlock]:
        """The pieces of one job."""
        pieces, nbytes = [], 0
        while waiting and nbytes < most:
            pieces.append(waiting.popleft())
            nbytes += self._nbytes(pieces[-1])
        return pieces

    def _send_near(self) -> None:
        pieces = self._taken(self._near, OWN_BYTES)
        ranks = self._connection.ranks
        self._add_times(write(ranks, self._target, self._reader, pieces, self._progress))
        self.in_flight -= sum(map(self._nbytes, pieces))

    def _collect(self, jobs: list[Any]) -> None:
        for ref in jobs:
            node, pieces = self._jobs.pop(ref)
            self._running[node] -= 1
            self._add_times(answer_of(ref))
            nbytes = sum(map(self._nbytes, pieces))
            self.in_flight -= nbytes
            if self._progress is not None:
                self._progress(nbytes)

    def _add_times(self, times: dict[int, RankTimes]) -> None:
        for rank, part in times.items():
            self.times.setdefault(rank, RankTimes(rank, part.route)).add(part)

    def _nbytes(self, piece: SourceBlock) -> int:
        return piece.shape[0] * piece.shape[1] * self._target.dtype.itemsize
