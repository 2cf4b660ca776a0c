"""Sources of Spark: rows in Spark's order, which are counted first; rows and blocks with numbers.

One task per core sends its rows or blocks to the gang's nodes from the JVM (`jvm.py`).
"""

from __future__ import annotations

import base64
import contextlib
import json
import math
import zlib
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from py4j.protocol import Py4JError

from alchemist_ray.clients.spark import jobs, jvm
from alchemist_ray.errors import IncompleteMatrixError, TransferError
from alchemist_ray.gang.connection import GangConnection
from mpi_workers.data.description import NodeTimes, TransferTarget
from mpi_workers.data.transfers import MatrixWriter, Progress
from mpi_workers.failures import Failure
from mpi_workers.matrix.layout import Shape

PANEL = 16 << 20  # 16 MiB of zeros, sent for missing rows
MIN_BATCH = 256 << 10  # 256 KiB: smaller batches of columns are sent as rows, in blocks
BATCH_ROWS_OF_CACHE = 10_000  # Spark's default
SCALAR, VECTOR, LIST = "scalar", "vector", "list"  # kinds of columns

# Of a column of Spark: name, kind, width (columns of the matrix), type (dtype of its elements).
Column = dict[str, Any]
Reports = list[dict[str, Any]]  # of the tasks


class SparkSource:
    """A matrix in Spark's executors.

    Parameters
    ----------
    spark : SparkSession
    kind : str
        The type that the user sent.
    rdd : JavaRDD, optional
        The rows or blocks of one of MLlib's matrices, which the JVM sends without a DataFrame.
    """

    columns: Sequence[str] = ()

    def __init__(
        self, spark: Any, kind: str, shape: Shape, dtype: np.dtype[Any], rdd: Any = None
    ) -> None:
        self._spark = spark
        self._rdd = rdd
        self._kind = kind
        self.shape = shape
        self.dtype = dtype

    def provenance(self) -> dict[str, Any]:
        context = self._spark.sparkContext
        return {
            "from": "spark",
            "kind": self._kind,
            "application": context.applicationId,
            "shape": list(self.shape),
        }

    def send(
        self, connection: GangConnection, target: TransferTarget, progress: Progress | None
    ) -> dict[int, NodeTimes]:
        """Send every element from the executors; missing rows and blocks are zero."""
        if 0 in self.shape:
            return {}
        sender = jvm.sender(self._spark)
        described = jvm.description(connection.endpoints, target)
        reports: Reports = jobs.run(
            self._spark,
            f"send a {self._kind}",
            lambda: json.loads(self._sent(sender, described, _cores(self._spark))),
            connection.ping,
        )
        _check(reports)
        times: dict[int, NodeTimes] = {}
        for part in (NodeTimes(**fields) for each in reports for fields in each["times"]):
            times.setdefault(part.node, NodeTimes(part.node, part.route)).add(part)
        self._complete(connection, target, reports)
        if progress is not None:
            progress(self.shape[0] * self.shape[1] * self.dtype.itemsize)
        return times

    def _sent(self, sender: Any, description: dict[str, Any], cores: int) -> str:
        """Send the elements; the reports of the tasks, as JSON."""
        raise NotImplementedError

    def _complete(
        self, connection: GangConnection, target: TransferTarget, reports: Reports
    ) -> None:
        """Check what was sent, and send zeros for missing rows and blocks."""
        raise NotImplementedError


def _cores(spark: Any) -> int:
    cores: int = spark.sparkContext.defaultParallelism
    return max(1, cores)


def _check(reports: Reports) -> None:
    for each in reports:
        if "failure" in each:
            raise Failure.from_map(each["failure"])
    for number, each in enumerate(reports):
        if "again" in each:
            raise TransferError(
                f"Spark repeated task {number} of the transfer (attempt {each['again']}), because "
                "its executor or a shuffle file was lost or spark.speculation is on; the matrix "
                "was freed: send it again"
            )


class OrderedSource(SparkSource):
    """Rows without numbers, ordered by partition and then within each; they are counted here."""

    def __init__(
        self,
        spark: Any,
        kind: str,
        columns: list[Column],
        dtype: np.dtype[Any],
        connection: GangConnection,
        *,
        frame: Any = None,
        rdd: Any = None,
    ) -> None:
        width = sum(column["width"] for column in columns)
        if width == len(columns):  # a vector has more than its name
            self.columns = [column["name"] for column in columns]
        self._described = columns
        self._scalars = all(column["kind"] == SCALAR for column in columns)
        self._sender = jvm.sender(spark)
        self._stored: Any = None  # the batches of Spark's cache, if the frame is made of them
        self._rows = rdd  # in the form in which they were counted, if it is that of sending
        self._frame: Any = None  # else the frame, with the same partitions in each job

        def count() -> list[Any]:
            if frame is not None and self._scalars:
                self._stored = self._sender.stored(frame._jdf)
                self._rows = self._stored and self._stored.rdd()
            if self._rows is None:
                self._frame = self._sender.fixed(frame._jdf)
            rows = self._frame if self._rows is None else self._rows
            pairs: list[Any] = json.loads(self._sender.count(rows, _cores(spark)))
            return pairs

        counts = dict(jobs.run(spark, f"count the rows of a {kind}", count, connection.ping))
        sizes = [counts.get(part, 0) for part in range(max(counts, default=-1) + 1)]
        self._starts = [0, *np.cumsum(sizes, dtype=np.int64).tolist()]
        super().__init__(spark, kind, (self._starts[-1], width), dtype, rdd)

    def _sent(self, sender: Any, description: dict[str, Any], cores: int) -> str:
        columns = self._described
        batches, rows = self._stored, self._rows
        if rows is None:
            batches = sender.batches(self._frame) if self._in_batches() else None
            rows = sender.rows(self._frame) if batches is None else batches.rdd()
        if batches is not None:
            ordinals = json.loads(batches.ordinals())
            columns = [
                column | {"ordinal": ordinal}
                for column, ordinal in zip(columns, ordinals, strict=True)
            ]
        spec = json.dumps(description | {"columns": columns, "starts": self._starts})
        reports: str = sender.ordered(rows, cores, spec)
        return reports

    def send(
        self, connection: GangConnection, target: TransferTarget, progress: Progress | None
    ) -> dict[int, NodeTimes]:
        """Send every element; the number of rows is not trusted again after an error."""
        try:
            return super().send(connection, target, progress)
        except TransferError:
            if self._rows is not None:
                with contextlib.suppress(Py4JError, OSError):
                    self._sender.forget(self._rows)
            raise

    def _in_batches(self) -> bool:
        """Whether the frame may have batches that are worth a message each."""
        rows = min(BATCH_ROWS_OF_CACHE, self.shape[0] // max(1, len(self._starts) - 1))
        return self._scalars and rows * self.shape[1] * self.dtype.itemsize >= MIN_BATCH

    def _complete(
        self, connection: GangConnection, target: TransferTarget, reports: Reports
    ) -> None:
        seen = {int(part): rows for each in reports for part, rows in each["seen"].items()}
        for part, (start, stop) in enumerate(pairwise(self._starts)):
            if seen.get(part, 0) != stop - start:
                raise TransferError(
                    f"partition {part} had {stop - start} rows when it was counted and "
                    f"{seen.get(part, 0)} when it was sent, so its rows change between jobs: "
                    "df.cache() or df.checkpoint() it first"
                )


class NumberedSource(SparkSource):
    """Rows with numbers; missing rows are zero."""

    def _sent(self, sender: Any, description: dict[str, Any], cores: int) -> str:
        column = {"name": "vector", "kind": VECTOR, "width": self.shape[1], "type": "float64"}
        reports: str = sender.numbered(
            self._rdd, cores, json.dumps(description | {"columns": [column]})
        )
        return reports

    def _complete(
        self, connection: GangConnection, target: TransferTarget, reports: Reports
    ) -> None:
        m, n = self.shape
        there = np.zeros(m, bool)
        for each in reports:  # a task refuses its own duplicates
            bits = np.frombuffer(zlib.decompress(base64.b64decode(each["bits"])), np.uint8)
            rows = np.flatnonzero(np.unpackbits(bits, bitorder="little")) + each["first"]
            if there[rows].any():
                raise IncompleteMatrixError(
                    f"row {rows[there[rows]][0]} appears twice: drop duplicates, or add them up"
                )
            there[rows] = True
        missing = np.flatnonzero(~there)
        if not len(missing):
            return
        panel = max(1, PANEL // (n * self.dtype.itemsize))
        zeros = np.zeros((min(panel, len(missing)), n), self.dtype)
        with MatrixWriter(connection.nodes, target) as writer:
            for start in range(0, len(missing), panel):
                rows = missing[start : start + panel]
                writer.write_rows(zeros[: len(rows)], rows)


class BlocksSource(SparkSource):
    """Blocks with numbers; missing blocks are zero."""

    def __init__(
        self, spark: Any, kind: str, shape: Shape, dtype: np.dtype[Any], rdd: Any, block: Shape
    ) -> None:
        self._block = block
        super().__init__(spark, kind, shape, dtype, rdd)

    def _sent(self, sender: Any, description: dict[str, Any], cores: int) -> str:
        spec = json.dumps(description | {"block": self._block})
        reports: str = sender.blocks(self._rdd, cores, spec)
        return reports

    def _complete(
        self, connection: GangConnection, target: TransferTarget, reports: Reports
    ) -> None:
        seen: set[tuple[int, int]] = set()
        for i, j in (place for each in reports for place in each["blocks"]):
            if (i, j) in seen:
                raise IncompleteMatrixError(
                    f"block {(i, j)} appears twice: drop duplicates, or add them up"
                )
            seen.add((i, j))
        with MatrixWriter(connection.nodes, target) as writer:
            for (i, j), shape in self._blocks():
                if (i, j) not in seen:
                    origin = (i * self._block[0], j * self._block[1])
                    writer.write_block(np.zeros(shape, self.dtype), origin)

    def _blocks(self) -> Iterator[tuple[tuple[int, int], Shape]]:
        (m, n), (down, across) = self.shape, self._block
        for i in range(math.ceil(m / down)):
            for j in range(math.ceil(n / across)):
                yield (i, j), (min(down, m - i * down), min(across, n - j * across))
