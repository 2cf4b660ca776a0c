"""Dask arrays under a `distributed.Client`: its workers send the chunks that they hold.

Dask computes each chunk as usual and then, on the same worker, a task that writes it into the
ranks' memory. On the way back the task that uses a chunk fetches it. Workers need no Ray: they
get the addresses and the token of the gang in their tasks.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from dask.base import get_scheduler
from dask.core import flatten
from dask.delayed import delayed
from numpy.typing import NDArray

from alchemist_ray.errors import AlchemistError, TransferError
from alchemist_ray.gang.connection import GangConnection
from alchemist_ray.transfer.node_jobs import ArrayDecoder, SendJob, SourceBlock
from mpi_workers.data.description import DataEndpoints, NodeTimes, TransferTarget, add_times
from mpi_workers.data.node_connections import NodeConnections
from mpi_workers.data.transfers import MatrixReader, Progress
from mpi_workers.failures import Failure

POLL_INTERVAL_S = 0.02  # between looks for finished tasks
WATCH_S = 1.0  # between checks of the gang

_DECODER = ArrayDecoder()


def client() -> Any:
    """The Client that dask computes with in this process, or None."""
    if "distributed" not in sys.modules:
        return None
    owner = getattr(get_scheduler(), "__self__", None)
    return owner if isinstance(owner, sys.modules["distributed"].Client) else None


def has_client() -> bool:
    """Whether this process has a Client, also on the thread of its event loop."""
    if "distributed" not in sys.modules:
        return False
    try:
        sys.modules["distributed"].default_client()
    except ValueError:
        return False
    return True


def known(array: Any, computing: Any) -> Any:
    """The array with the sizes of its chunks, which Dask computes; the chunks stay on workers."""
    return computing.persist(array).compute_chunk_sizes()


def send(
    array: Any,
    blocks: Sequence[SourceBlock],
    computing: Any,
    connection: GangConnection,
    target: TransferTarget,
    progress: Progress | None,
) -> dict[int, NodeTimes]:
    """Have Dask's workers compute the chunks and write them.

    Raises
    ------
    TransferError
        If a chunk cannot be computed. A task that Dask repeats, because its worker was lost, may
        write elements twice: the gang counts them, and refuses the matrix.
    """
    gang = connection.address.gang
    itemsize = target.dtype.itemsize
    tasks, sizes = [], []
    for chunk, block in zip(flatten(array.to_delayed().tolist()), blocks, strict=True):
        if not block.shape[0] or not block.shape[1]:
            continue
        job = SendJob(gang, connection.endpoints, target, _DECODER, (block,))
        tasks.append(delayed(_write, pure=False)(job, chunk))  # not merged with an equal one
        sizes.append(block.shape[0] * block.shape[1] * itemsize)
    futures = computing.compute(tasks, retries=0)
    nbytes = dict(zip((future.key for future in futures), sizes, strict=True))
    times: dict[int, NodeTimes] = {}
    try:
        for future in _finished(futures, connection):
            add_times(times, _result(future))
            if progress is not None:
                progress(nbytes[future.key])
    except BaseException:
        computing.cancel(futures, force=True)
        raise
    return times


def _write(job: SendJob, chunk: Any) -> dict[int, NodeTimes]:
    return job.run([chunk])


def _finished(futures: Sequence[Any], connection: GangConnection) -> Any:
    """Futures in the order in which they end, while the gang is watched."""
    pending = sys.modules["distributed"].as_completed(futures)
    watched = time.monotonic()
    while not pending.is_empty():
        batch = pending.next_batch(block=False)
        yield from batch
        if not batch:
            time.sleep(POLL_INTERVAL_S)
        if time.monotonic() - watched > WATCH_S:
            connection.ping()
            watched = time.monotonic()


def _result(future: Any) -> dict[int, NodeTimes]:
    error = future.exception() if future.status != "finished" else None
    if future.status == "cancelled":
        raise TransferError("Dask cancelled the transfer's tasks: was the Client closed?")
    if isinstance(error, AlchemistError | Failure):
        raise error
    if error is not None:
        raise TransferError(
            f"Dask could not compute and send a chunk: {type(error).__name__}: {error}"
        ) from error
    found: dict[int, NodeTimes] = future.result()
    return found


class LostMatrix:
    """A matrix that is gone: tasks that use it raise the reason, which pickling must not."""

    def __init__(self, shape: tuple[int, ...], dtype: np.dtype[Any], reason: Exception) -> None:
        self.shape = shape
        self.dtype = dtype
        self.reason = reason

    def fetch(self, rows: slice, cols: slice = slice(None)) -> NDArray[Any]:
        raise self.reason


class AttachedMatrix:
    """A matrix in a process that knows the gang's nodes only; fetches through them."""

    def __init__(
        self, endpoints: DataEndpoints, target: TransferTarget, shape: tuple[int, ...]
    ) -> None:
        self._endpoints = endpoints
        self._target = target
        self.shape = shape
        self.dtype = target.dtype

    def fetch(self, rows: slice, cols: slice = slice(None)) -> NDArray[Any]:
        """The elements of slices with positive steps; cost: the range that they span."""
        m, n = self._target.distribution.shape
        chosen = range(m)[rows], range(n)[cols]
        bounds = [(part[0], part[-1] + 1) if part else (0, 0) for part in chosen]
        (row0, row1), (col0, col1) = bounds
        out = np.empty((row1 - row0, col1 - col0), self.dtype)
        if out.size:
            nodes = NodeConnections(self._endpoints, threads=1)  # Dask uses the other cores
            try:
                with MatrixReader(nodes, self._target) as reader:
                    reader.read_block(out, (row0, col0))
            except Failure as failure:
                raise TransferError(
                    "a part of the matrix of a dask array could not be fetched; it was freed, or "
                    f"its gang has ended: {failure.message}"
                ) from failure
            finally:
                nodes.close()
        found = out[:: chosen[0].step, :: chosen[1].step]
        return found.reshape(found.shape[: len(self.shape)])
