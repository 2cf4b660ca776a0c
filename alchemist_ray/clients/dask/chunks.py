"""From dask collections to matrices: Dask computes chunks, which are sent when finished.

With Dask-on-Ray each chunk gets one more task in the graph, its mark. When the scheduler reaches a
mark, the chunk has been submitted: its ObjectRef goes to a `BlockSender`, and no task is submitted
for the mark, so that the scheduler drops its reference. Submission pauses while too much is in
flight.

Under a `distributed.Client` Dask computes each chunk as usual and then, on the same worker, a task
that writes it into the ranks' memory. Workers need no Ray: they get the addresses and the token of
the gang in their tasks.
"""

from __future__ import annotations

import itertools
import math
import sys
import time
import uuid
from collections.abc import Callable, Sequence
from multiprocessing.pool import ThreadPool
from typing import Any

import dask.array as da
import numpy as np
import ray
from dask.array.core import slices_from_chunks
from dask.base import get_scheduler, optimize
from dask.core import flatten
from dask.delayed import Delayed, delayed
from dask.highlevelgraph import HighLevelGraph
from ray.util.dask import ray_dask_get
from ray.util.dask.callbacks import CBS, RayCallback

from alchemist_ray.attached.connection import GangConnection
from alchemist_ray.attached.matrix_ref import MatrixRef
from alchemist_ray.clients import pandas
from alchemist_ray.clients.ray_tasks import wait_for_cpu
from alchemist_ray.cluster.node_jobs import ArrayDecoder, SendJob, SourceBlock
from alchemist_ray.dtypes import chosen_dtype, refusals
from alchemist_ray.errors import (
    AlchemistError,
    DtypeError,
    SessionError,
    ShapeError,
    TransferError,
)
from alchemist_ray.transfer.object_store import BlockSender, inspect_objects
from mpi_workers.columns.arrow_columns import Column
from mpi_workers.columns.arrow_memory import read_schema
from mpi_workers.columns.missing import Missing
from mpi_workers.columns.pandas_columns import labels_of, names_of
from mpi_workers.data.description import NodeTimes, TransferTarget, add_times
from mpi_workers.data.transfers import Progress
from mpi_workers.failures import Failure
from mpi_workers.matrix.layout import MAX_AXES, ArrayShape, Shape, stored_shape

STORE_SHARE = 4  # at most a quarter of the object store is in flight
IN_FLIGHT = 1 << 30  # and at most 1 GiB
POLL_INTERVAL_S = 0.02  # between looks for finished tasks of a Client
WATCH_S = 1.0  # between checks of the gang meanwhile

UNKNOWN_CATEGORIES = "__UNKNOWN_CATEGORIES__"  # of dask.dataframe.utils


class ChunksSource:
    """A dask array with known chunks.

    Parameters
    ----------
    array : dask.array.Array, shape (m, n)
    dtype : numpy.dtype
        Of the matrix.
    values : list, optional
        The chunks' objects, if they have been computed.
    columns : sequence of str
        Column names, if it was a data frame.
    inner : tuple of int, optional
        The lengths of all axes but the first, of what is no matrix.
    decoder : ArrayDecoder, optional
        Of the chunks.
    """

    def __init__(
        self,
        array: Any,
        dtype: np.dtype[Any],
        values: Sequence[Any] | None = None,
        columns: Sequence[str] = (),
        inner: ArrayShape | None = None,
        decoder: ArrayDecoder | None = None,
    ) -> None:
        self._array = array
        self._decoder = decoder or ArrayDecoder()
        self.columns = columns
        self._chunks = tuple(tuple(map(int, sizes)) for sizes in array.chunks)
        self._values = values
        self.dtype = dtype
        self.shape: Shape = (sum(self._chunks[0]), sum(self._chunks[1]))
        self.array_shape: ArrayShape = self.shape if inner is None else (self.shape[0], *inner)

    def provenance(self) -> dict[str, Any]:
        return {"from": "dask", "array": self._array.name, "dtype": str(self._array.dtype)}

    def send(
        self, connection: GangConnection, target: TransferTarget, progress: Progress | None
    ) -> dict[int, NodeTimes]:
        """Compute the chunks and send each when it is finished."""
        values, self._values = self._values, None  # each is released when it has been sent
        blocks = self._blocks()
        computing = _client()
        if computing is not None:
            return _send_by_client(
                self._array, blocks, self._decoder, computing, connection, target, progress
            )
        with BlockSender(connection, target, self._decoder, progress) as sender:
            if values is not None:
                for i, value in enumerate(values):
                    _add(sender, blocks[i]._replace(source=value))
                values = value = None
            else:
                wait_for_cpu("Dask", "persist")
                largest = max(math.prod(block.shape) for block in blocks)
                limit = _in_flight_limit(largest * self.dtype.itemsize)
                compute(
                    self._array,
                    lambda i, value: _add(sender, blocks[i]._replace(source=value)),
                    lambda: sender.down_to(limit),
                )
        return sender.times

    def _blocks(self) -> list[SourceBlock]:
        indices = itertools.product(*(range(len(sizes)) for sizes in self._chunks))
        return [
            SourceBlock(
                None, (rows.start, cols.start), (rows.stop - rows.start, cols.stop - cols.start),
                f"chunk {index} (rows {rows.start} to {rows.stop}) of the dask array "
                f"{self._array.name}",
            )
            for (rows, cols), index in zip(slices_from_chunks(self._chunks), indices, strict=True)
        ]  # fmt: skip


def _add(sender: BlockSender, block: SourceBlock) -> None:
    if block.shape[0] and block.shape[1]:
        sender.add(block)


def inspect(source: Any, wanted: Any, missing: Missing, connection: GangConnection) -> ChunksSource:
    """A source for a dask collection. Raises `DtypeError`, `ShapeError`, `SessionError`."""
    computing = _client()
    if computing is None and not ray.is_initialized():
        raise SessionError(
            "chunks of a dask array are computed by Ray tasks, and this program, whose session "
            "goes through a gateway, has joined no Ray: send array.compute(), or compute on "
            "workers of your own by a dask.distributed.Client"
        )
    columns: list[str] = []
    series = False
    if _is_frame(source):
        series = source.ndim == 1
        columns = pandas.kept_names(source, _known_columns(source))
        source = _as_array(source, missing)
    if not isinstance(source, da.Array):
        raise DtypeError(
            f"cannot send a {type(source).__name__} of dask: send an array or a data frame "
            "(dask.array.from_delayed turns a Delayed into an array)"
        )
    if isinstance(source._meta, MatrixRef):  # a fetch would wait for this transfer, without end
        raise DtypeError(
            "the chunks of this dask array are handles, which are on ranks already: "
            "handle.to_dask() makes a dask array of one"
        )
    inner = () if series else source.shape[1:]
    if not 1 <= source.ndim <= MAX_AXES:
        raise ShapeError(
            f"a dask array of shape {source.shape} cannot be sent: it must have 1 to {MAX_AXES} "
            "axes"
        )
    if source.ndim == 1:
        source = source[:, np.newaxis]
    elif source.ndim > 2:  # rows of all axes but the first
        whole = source.rechunk(dict.fromkeys(range(1, source.ndim), -1))
        source = whole.map_blocks(
            _as_rows, dtype=source.dtype, chunks=(whole.chunks[0], (math.prod(inner),)),
            drop_axis=list(range(2, source.ndim)),
        )  # fmt: skip
    dtype = chosen_dtype(source.dtype, wanted)
    values = None
    decoder = ArrayDecoder(missing=missing)
    if any(math.isnan(size) for sizes in source.chunks for size in sizes):
        if computing is not None:
            source = computing.persist(source).compute_chunk_sizes()  # they stay on workers
        else:
            source, values = _with_known_chunks(source, decoder)
    if values is None and computing is None:
        values = _computed(source)
    whole_shape = None if len(inner) == 1 else tuple(inner)
    return ChunksSource(source, dtype, values, columns, whole_shape, decoder)


def _as_rows(chunk: Any) -> Any:
    return chunk.reshape(len(chunk), math.prod(chunk.shape[1:]))


def _is_frame(source: Any) -> bool:
    """Whether the source is a data frame or a series. (A Delayed has every attribute.)"""
    return not isinstance(source, Delayed | da.Array) and hasattr(source, "dtypes")


def _known_columns(frame: Any) -> dict[int, Sequence[str]]:
    """The categories of each column that has some.

    Raises `DtypeError` for a column whose categories or lengths partitions alone know.
    """
    found: dict[int, Sequence[str]] = {}
    for j, name in enumerate(names_of(frame)):
        dtype = frame.dtypes.iloc[j] if frame.ndim == 2 else frame.dtype
        if str(getattr(dtype, "pyarrow_dtype", "")).startswith(("list", "large_list", "fixed")):
            raise DtypeError(
                f"column {name!r} has lists, whose lengths are not known before it is computed: "
                "send frame.compute(), or the lists as a dask array"
            )
        arrow = getattr(dtype, "pyarrow_dtype", None)
        if arrow is not None and Column(name, read_schema(arrow)).coded:
            raise DtypeError(
                f"column {name!r} has categories that differ between partitions: "
                f"astype({{{name!r}: 'category'}}) and frame.categorize() make them one set"
            )
        if hasattr(dtype, "categories"):
            if UNKNOWN_CATEGORIES in dtype.categories:
                raise DtypeError(
                    f"the categories of column {name!r} are not known before it is computed: "
                    "frame.categorize() computes them"
                )
            with refusals():
                its = labels_of(name, dtype.categories)
            if isinstance(its, list):
                found[j] = its
    return found


def _as_array(frame: Any, missing: Missing) -> Any:
    """The partitions of a data frame or series as an array with unknown chunk sizes."""
    dtype = pandas.common_dtype(frame, missing)
    columns = names_of(frame)
    to_matrix = delayed(pandas.partition, pure=True)
    parts = [
        da.from_delayed(to_matrix(part, columns, dtype, missing), (math.nan, len(columns)), dtype)
        for part in frame.to_delayed()
    ]
    return da.concatenate(parts, allow_unknown_chunksizes=True)


def _with_known_chunks(array: Any, decoder: ArrayDecoder) -> tuple[Any, list[Any]]:
    """Compute the sizes of the chunks: the array with known chunks, and the chunks' objects."""
    values: list[Any] = _computed(array) or []
    if not values:
        wait_for_cpu("Dask", "persist")
        values = [None] * math.prod(array.numblocks)
        compute(array, values.__setitem__)
    labels = [f"chunk {i} of the dask array {array.name}" for i in np.ndindex(*array.numblocks)]
    objects = [value if isinstance(value, ray.ObjectRef) else ray.put(value) for value in values]
    found = inspect_objects(objects, labels, decoder)
    shapes = [stored_shape(shape) for (shape, _), _ in found]
    grid = np.array(shapes, int).reshape(*array.numblocks, 2)
    rows, cols = grid[:, 0, 0], grid[0, :, 1]
    wrong = np.argwhere((grid[..., 0] != rows[:, None]) | (grid[..., 1] != cols))
    if len(wrong):
        index = tuple(map(int, wrong[0]))
        raise ShapeError(
            f"chunk {index} of the dask array {array.name} has shape {tuple(grid[index].tolist())}"
            f", but the array declares {(int(rows[index[0]]), int(cols[index[1]]))} for this chunk"
        )
    known = da.Array(
        array.__dask_graph__(), array.name, (tuple(rows.tolist()), tuple(cols.tolist())),
        dtype=array.dtype,
    )  # fmt: skip
    return known, [source for _, source in found]


def _computed(array: Any) -> list[Any] | None:
    """The chunks' objects if all have been computed, as after ``persist``."""
    graph = array.__dask_graph__()
    values = []
    for key in flatten(array.__dask_keys__()):
        value = graph.get(key)
        if not isinstance(value, ray.ObjectRef | np.ndarray):
            return None
        values.append(value)
    return values


def compute(
    array: Any,
    on_chunk: Callable[[int, Any], None],
    before_task: Callable[[], None] = lambda: None,
) -> None:
    """Have Dask-on-Ray compute an array's chunks.

    Parameters
    ----------
    array : dask.array.Array
    on_chunk : callable(i, value)
        Called with the ObjectRef of chunk `i` (in C order) when its task has been submitted, or
        with its array if the graph contains it.
    before_task : callable()
        Called before each task is submitted; may wait.
    """
    (best,) = optimize(array)
    name = f"alchemist-mark-{uuid.uuid4().hex}"
    keys = list(flatten(best.__dask_keys__()))
    marks: Any = {(name, i): (_mark, key) for i, key in enumerate(keys)}
    graph = HighLevelGraph.from_collections(name, marks, dependencies=[best])
    del best

    def presubmit(task: Any, key: Any, deps: dict[Any, Any]) -> Any:
        if isinstance(key, tuple) and key[0] == name:
            on_chunk(key[1], deps[keys[key[1]]])
            return True  # submits no task
        before_task()
        return None

    callback: Any = RayCallback(*[presubmit if cb == "ray_presubmit" else None for cb in CBS])
    # One thread is enough: every task comes after the tasks that it depends on.
    pool = ThreadPool(1)
    try:
        ray_dask_get(graph, list(marks), pool=pool, ray_callbacks=[callback])
    finally:
        pool.close()


def _mark(chunk: Any) -> None:
    """A place in the graph; never runs."""


def _in_flight_limit(chunk: int) -> int:
    """Bytes that may be in flight before another task is submitted."""
    store = ray.cluster_resources().get("object_store_memory", 0)
    return max(chunk, min(IN_FLIGHT, int(store) // STORE_SHARE) - chunk)


# --- under a distributed.Client -------------------------------------------------------------


def _client() -> Any:
    """The Client that dask computes with in this process, or None."""
    if "distributed" not in sys.modules:
        return None
    owner = getattr(get_scheduler(), "__self__", None)
    return owner if isinstance(owner, sys.modules["distributed"].Client) else None


def _send_by_client(
    array: Any,
    blocks: Sequence[SourceBlock],
    decoder: ArrayDecoder,
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
        job = SendJob(gang, connection.endpoints, target, decoder, (block,))
        tasks.append(delayed(SendJob.run, pure=False)(job, [chunk]))  # not merged with an equal one
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
