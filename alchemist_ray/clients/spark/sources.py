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
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
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

# Partitions must be the same in both jobs.
FIXED_PARTITIONS = {"spark.sql.adaptive.enabled": "false"}

# Of each task, its report, and the numbers of the rows or blocks that it has sent.
Answers = list[tuple[Any, NDArray[np.int64]]]


class Sent(NamedTuple):
    """The reports of all tasks, and the numbers of all rows or blocks that were sent."""

    reports: list[Any]
    places: NDArray[np.int64]


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

    ndim = 2
    columns: Sequence[str] = ()

    def __init__(
        self,
        spark: Any,
        kind: str,
        shape: Shape,
        dtype: np.dtype[Any],
        rdd: Any = None,
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
        spark = self._spark
        sender = jvm.sender(spark)
        described = jvm.description(connection.endpoints, target)

        def action() -> Answers:
            return self._answers(sender, described)

        answers = jobs.run(spark, f"send a {self._kind}", action, partial(_watch, connection))
        reports = [report for report, _ in answers]
        _check(reports)
        times: dict[int, NodeTimes] = {}
        for part in (NodeTimes(**fields) for each in reports for fields in each["times"]):
            times.setdefault(part.node, NodeTimes(part.node, part.route)).add(part)
        places = np.concatenate([np.empty(0, np.int64), *(its for _, its in answers)])
        self._complete(connection, target, Sent(reports, places))
        if progress is not None:
            progress(self.shape[0] * self.shape[1] * self.dtype.itemsize)
        return times

    def _answers(self, sender: Any, description: dict[str, Any]) -> Answers:
        """The report of each task, and the numbers of what it has sent."""
        raise NotImplementedError

    def _complete(self, connection: GangConnection, target: TransferTarget, sent: Sent) -> None:
        """Check what was sent, and send zeros for missing rows and blocks."""
        raise NotImplementedError


def _cores(spark: Any) -> int:
    cores: int = spark.sparkContext.defaultParallelism
    return max(1, cores)


def _watch(connection: GangConnection) -> None:
    connection.ping()  # raises if the gang is lost


def _check(reports: Sequence[dict[str, Any]]) -> None:
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
    """Rows without numbers, ordered by partition and then within each."""

    def __init__(
        self,
        spark: Any,
        frame: Any,
        kind: str,
        names: list[str],
        kinds: list[str],
        widths: list[int],
        elements: Sequence[np.dtype[Any]],
        dtype: np.dtype[Any],
        connection: GangConnection,
        rdd: Any = None,
    ) -> None:
        self._names, self._kinds, self._widths = names, kinds, widths
        self._elements = elements  # of each column, before they are converted to `dtype`
        self.columns = names if sum(widths) == len(names) else ()  # a vector has more than its name
        self._spark, self._frame = spark, frame  # None, if the rows are those of `rdd`
        sender = self._sender = jvm.sender(spark)
        self._stored: Any = None  # the batches of Spark's cache, if the frame is made of them
        self._rows = rdd  # in the form in which they were counted, if it is that of sending

        def action() -> list[Any]:
            if rdd is None and all(each == SCALAR for each in kinds):
                self._stored = sender.stored(self._frame._jdf)
                if self._stored is not None:
                    self._rows = self._stored.rdd()
            if self._rows is not None:
                pairs: list[Any] = json.loads(sender.count(self._rows, _cores(spark)))
                return pairs
            with jobs.settings(spark, FIXED_PARTITIONS):
                rows = sender.rows(self._frame.select()._jdf)
                pairs = json.loads(sender.count(rows, _cores(spark)))
                return pairs

        counted = jobs.run(
            spark, f"count the rows of a {kind}", action, partial(_watch, connection)
        )
        counts = dict(counted)
        sizes = [counts.get(part, 0) for part in range(max(counts, default=-1) + 1)]
        self._starts = [0, *np.cumsum(sizes, dtype=np.int64).tolist()]
        super().__init__(spark, kind, (self._starts[-1], sum(widths)), dtype, rdd)

    def _answers(self, sender: Any, description: dict[str, Any]) -> Answers:
        columns = [
            {"name": name, "kind": kind, "width": width, "type": element.name}
            for name, kind, width, element in zip(
                self._names, self._kinds, self._widths, self._elements, strict=True
            )
        ]
        batches, rows = self._stored, self._rows
        if rows is None:
            with jobs.settings(self._spark, FIXED_PARTITIONS):
                if self._in_batches():
                    batches = sender.batches(self._frame._jdf)
                rows = sender.rows(self._frame._jdf) if batches is None else batches.rdd()
        if batches is not None:
            for column, ordinal in zip(columns, json.loads(batches.ordinals()), strict=True):
                column["ordinal"] = ordinal
        spec = json.dumps(description | {"columns": columns, "starts": self._starts})
        reports = json.loads(sender.ordered(rows, _cores(self._spark), spec))
        return [(report, np.empty(0, np.int64)) for report in reports]

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
        if any(kind != SCALAR for kind in self._kinds):
            return False
        rows = min(BATCH_ROWS_OF_CACHE, self.shape[0] // max(1, len(self._starts) - 1))
        return rows * self.shape[1] * self.dtype.itemsize >= MIN_BATCH

    def _complete(self, connection: GangConnection, target: TransferTarget, sent: Sent) -> None:
        seen = {int(part): rows for each in sent.reports for part, rows in each["seen"].items()}
        for part, (start, stop) in enumerate(pairwise(self._starts)):
            if seen.get(part, 0) != stop - start:
                raise TransferError(
                    f"partition {part} had {stop - start} rows when it was counted and "
                    f"{seen.get(part, 0)} when it was sent, so its rows change between jobs: "
                    "df.cache() or df.checkpoint() it first"
                )


class NumberedSource(SparkSource):
    """Rows with numbers; missing rows are zero."""

    def _answers(self, sender: Any, description: dict[str, Any]) -> Answers:
        column = {"name": "vector", "kind": "vector", "width": self.shape[1], "type": "float64"}
        spec = json.dumps(description | {"columns": [column]})
        answers = []
        for report in json.loads(sender.numbered(self._rdd, _cores(self._spark), spec)):
            sent = np.empty(0, np.int64)
            if (places := report.pop("places", None)) is not None:
                bits = np.frombuffer(zlib.decompress(base64.b64decode(places["bits"])), np.uint8)
                sent = np.flatnonzero(np.unpackbits(bits, bitorder="little")) + places["first"]
            answers.append((report, sent))
        return answers

    def _complete(self, connection: GangConnection, target: TransferTarget, sent: Sent) -> None:
        m, n = self.shape
        there = np.zeros(m, bool)
        there[sent.places] = True
        if np.count_nonzero(there) != len(sent.places):
            ordered = np.sort(sent.places)
            row = ordered[:-1][np.diff(ordered) == 0][0]
            raise IncompleteMatrixError(f"row {row} appears twice: drop duplicates, or add them up")
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
        self,
        spark: Any,
        kind: str,
        shape: Shape,
        dtype: np.dtype[Any],
        rdd: Any,
        block: Shape,
    ) -> None:
        self._block = block
        super().__init__(spark, kind, shape, dtype, rdd)

    def _answers(self, sender: Any, description: dict[str, Any]) -> Answers:
        spec = json.dumps(description | {"block": self._block})
        reports = json.loads(sender.blocks(self._rdd, _cores(self._spark), spec))
        return [(each, np.array(each.pop("blocks", []), np.int64).reshape(-1)) for each in reports]

    def _complete(self, connection: GangConnection, target: TransferTarget, sent: Sent) -> None:
        seen: set[tuple[int, int]] = set()
        for i, j in sent.places.reshape(-1, 2).tolist():
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
