"""Spark Connect, and Databricks Connect: a DataFrame whose Spark is reached by gRPC alone.

Such a client has no JVM. The frame's rows go from Python workers of the executors to the ranks
(`mapInArrow`) where this package is installed there; else through this process, if it has room.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import numpy as np

from alchemist_ray import errors
from alchemist_ray.attached.connection import GangConnection
from alchemist_ray.dtypes import chosen_dtype, open_table, refusals
from alchemist_ray.errors import (
    AlchemistError,
    DtypeError,
    LibraryLoadError,
    ResourceError,
    ShapeError,
    TransferError,
)
from alchemist_ray.transfer.sources import MatrixSource
from alchemist_ray.transfer.tables import TableSource
from mpi_workers.columns import arrow_columns, arrow_memory
from mpi_workers.columns.missing import Missing
from mpi_workers.data.description import DataEndpoints, NodeTimes, TransferTarget, add_times
from mpi_workers.data.node_connections import NodeConnections
from mpi_workers.data.transfers import MatrixWriter, Progress
from mpi_workers.matrix import dtypes
from mpi_workers.matrix.available_memory import available_bytes
from mpi_workers.matrix.layout import Shape
from mpi_workers.matrix.node_shares import Region
from mpi_workers.matrix.sizes import readable

COPIES = 3  # of the table in this process: as it is received, decoded, and cut by layout
COUNTED = "partition int, rows long, ready boolean"
OURS = re.compile(r"^alchemist_ray\.errors\.(\w+): (.*)$", re.M)  # raised by an executor
SENT = "node int, route string, nbytes long, seconds double"


def inspect(source: Any, wanted: Any, missing: Missing, connection: GangConnection) -> MatrixSource:
    """A source for a DataFrame of Spark Connect.

    Raises
    ------
    DtypeError, ShapeError
        If it cannot become a matrix.
    ResourceError
        If executors do not have this package, and this process not the memory for the rows.
    TransferError
        If Spark cannot count its rows.
    """
    if not hasattr(source, "mapInArrow"):
        raise DtypeError(f"cannot send a {type(source).__name__} of Spark Connect: a DataFrame")
    columns = _columns(source)
    with refusals():
        kinds = [column.dtype(missing) for column in columns]
        dtype = dtypes.common_dtype(kinds, [column.name for column in columns])
    if lists := [column.name for column in columns if column.inner != ()]:
        raise DtypeError(f"column {lists[0]!r} has lists: select their elements, col[0], col[1]")
    try:
        counted = sorted(_run("count its rows", lambda: source.mapInArrow(_counter(), COUNTED)))
    except TransferError as error:
        if "ModuleNotFoundError" not in str(error):
            raise
        counted = [(0, _run("count its rows", source.count, rows=False), False)]  # no pyarrow there
    rows = [count for _, count, _ in counted]
    if all(ready for _, count, ready in counted if count):
        return ConnectSource(
            source, [column.name for column in columns], (sum(rows), len(columns)),
            chosen_dtype(dtype, wanted), missing,
            {part: start for (part, *_), start in zip(counted, _starts(rows), strict=True)},
        )  # fmt: skip
    need = COPIES * sum(rows) * len(columns) * dtype.itemsize
    if need > available_bytes():
        raise ResourceError(
            f"the executors do not have alchemist-on-ray, and this process needs {readable(need)} "
            f"for the rows and has {readable(available_bytes())}: install the package in the "
            "executors' Python, or write the frame to Parquet and load_matrix(path)"
        )
    return TableSource(_run("send its rows here", source.toArrow, rows=False), wanted, missing)


def _starts(rows: Sequence[int]) -> list[int]:
    return [0, *accumulate(rows)][: len(rows)]


def _columns(frame: Any) -> list[arrow_columns.Column]:
    try:
        from pyspark.sql.pandas.types import to_arrow_schema  # noqa: PLC0415 - the client's own
    except ImportError as error:
        raise LibraryLoadError(f"Spark Connect needs pyarrow and pandas ({error})") from error
    try:
        schema = to_arrow_schema(frame.schema)
    except Exception as error:  # of pyspark: a type that Arrow does not have, such as vectors
        raise DtypeError(
            f"a column cannot be sent through Arrow ({error}): "
            "pyspark.ml.functions.vector_to_array makes a list of a vector"
        ) from None
    found = arrow_columns.columns_of(arrow_memory.read_schema(schema)).columns
    if not found:
        raise ShapeError("the DataFrame has no columns: there is nothing to send")
    return found


def _run(what: str, work: Callable[[], Any], *, rows: bool = True) -> Any:
    """Have Spark compute something. Raises `TransferError`."""
    try:
        return [tuple(row) for row in work().collect()] if rows else work()
    except AlchemistError:
        raise
    except Exception as error:  # of pyspark or gRPC
        if ours := OURS.search(str(error)):
            raise getattr(errors, ours[1])(ours[2]) from error
        raise TransferError(f"Spark could not {what}: {type(error).__name__}: {error}") from error


def _counter() -> Callable[[Any], Iterator[Any]]:
    """A function of a partition that needs nothing of this package, which may not be there."""

    def count(batches: Any) -> Iterator[Any]:
        import importlib.util  # noqa: PLC0415 - on an executor

        import pyarrow  # noqa: PLC0415
        from pyspark import TaskContext  # noqa: PLC0415

        task: Any = TaskContext.get()
        rows = sum(batch.num_rows for batch in batches)
        ready = importlib.util.find_spec("alchemist_ray") is not None
        yield pyarrow.RecordBatch.from_arrays(
            [
                pyarrow.array([task.partitionId()], pyarrow.int32()),
                pyarrow.array([rows]),
                pyarrow.array([ready]),
            ],
            ["partition", "rows", "ready"],
        )

    return count


@dataclass(eq=False)
class ConnectSource:
    """The rows of a frame, sent by Python workers of the executors.

    Attributes
    ----------
    starts : dict
        The first row of each partition.
    """

    frame: Any
    columns: Sequence[str]
    shape: Shape
    dtype: np.dtype[Any]
    missing: Missing
    starts: dict[int, int] = field(repr=False)

    def provenance(self) -> dict[str, Any]:
        return {"from": "spark connect", "columns": ", ".join(self.columns[:8])}

    def send(
        self, connection: GangConnection, target: TransferTarget, progress: Progress | None
    ) -> dict[int, NodeTimes]:
        """Every partition from its executor; Spark repeats a task, and elements arrive twice, at
        most as an error."""
        send = _sender(connection.endpoints, target, self.missing, self.starts)
        times: dict[int, NodeTimes] = {}
        sent = _run("send its rows", lambda: self.frame.mapInArrow(send, SENT))
        for node, route, nbytes, seconds in sent:
            add_times(times, {node: NodeTimes(node, route, nbytes, send_s=seconds)})
            if progress is not None:
                progress(nbytes)
        return times


def _sender(*given: Any) -> Callable[[Any], Iterator[Any]]:
    def send(batches: Any) -> Iterator[Any]:
        from alchemist_ray.clients.spark_connect import send_partition  # noqa: PLC0415

        yield from send_partition(batches, *given)

    return send


def send_partition(
    batches: Any,
    endpoints: DataEndpoints,
    target: TransferTarget,
    missing: Missing,
    starts: dict[int, int],
) -> Iterator[Any]:
    """Write the rows of a partition to the ranks, on an executor."""
    import pyarrow  # noqa: PLC0415 - Spark's own on an executor
    from pyspark import TaskContext  # noqa: PLC0415

    task: Any = TaskContext.get()
    nodes = NodeConnections(endpoints)
    row = starts.get(task.partitionId(), 0)
    times: dict[int, NodeTimes] = {}
    try:
        for batch in batches:
            with refusals():
                rows = arrow_columns.gathered(open_table(batch, missing), target.dtype)
            region = Region(row, row + batch.num_rows, 0, rows.shape[1])
            with MatrixWriter(nodes, target, None, None, region) as writer:
                writer.write_block(rows, (row, 0))
            add_times(times, writer.times)
            row += batch.num_rows
    finally:
        nodes.close()
    found = list(times.values())
    yield pyarrow.RecordBatch.from_arrays(
        [
            pyarrow.array([one.node for one in found], pyarrow.int32()),
            pyarrow.array([one.route for one in found], pyarrow.string()),
            pyarrow.array([one.nbytes for one in found], pyarrow.int64()),
            pyarrow.array([one.send_s for one in found], pyarrow.float64()),
        ],
        ["node", "route", "nbytes", "seconds"],
    )
