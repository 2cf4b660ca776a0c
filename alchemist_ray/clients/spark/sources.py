"""Sources of Spark: inspects data, counts its rows, and sends it, all in the executors' JVMs.

No row is pickled by Python. Rows of a DataFrame or RowMatrix have no numbers: they are counted
first, and ordered by partition. One task per core sends its rows or blocks to the gang's nodes.
"""

from __future__ import annotations

import base64
import contextlib
import json
import math
import zlib
from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
from py4j.protocol import Py4JError, Py4JJavaError
from pyspark import RDD
from pyspark.ml.linalg import VectorUDT as MLVectorUDT
from pyspark.mllib.linalg import VectorUDT
from pyspark.mllib.linalg.distributed import (
    BlockMatrix,
    CoordinateMatrix,
    IndexedRowMatrix,
    RowMatrix,
)
from pyspark.sql import DataFrame, SparkSession, types
from pyspark.sql import functions as F

from alchemist_ray.attached.connection import GangConnection
from alchemist_ray.clients.spark import jvm
from alchemist_ray.clients.spark.results import MLLIB_BLOCK
from alchemist_ray.dtypes import chosen_dtype, refusals
from alchemist_ray.errors import DtypeError, IncompleteMatrixError, ShapeError, TransferError
from alchemist_ray.transfer.sources import NumPySource, SendAgainError
from mpi_workers.columns.missing import ERROR, Missing, dtype_with_missing, element_for
from mpi_workers.data.description import NodeTimes, TransferTarget, add_times
from mpi_workers.data.transfers import MatrixWriter, Progress
from mpi_workers.failures import Failure
from mpi_workers.matrix.layout import Shape

MAX_NUMBERED = 1 << 31  # rows and blocks with numbers: a task keeps a bit for each
SCALAR, VECTOR, LIST = "scalar", "vector", "list"  # kinds of columns
FLOAT64 = np.dtype(np.float64)
NO_ROWS = (
    "the data has no rows, so the widths of its vectors are not known: send numpy.empty((0, n)) "
    "for a matrix without rows"
)

_DTYPES: dict[type[types.DataType], np.dtype[Any]] = {
    types.BooleanType: np.dtype(np.bool_),
    types.ByteType: np.dtype(np.int8),
    types.ShortType: np.dtype(np.int16),
    types.IntegerType: np.dtype(np.int32),
    types.LongType: np.dtype(np.int64),
    types.FloatType: np.dtype(np.float32),
    types.DoubleType: FLOAT64,
    types.DecimalType: FLOAT64,
}

# A date or time as a count, in Spark's SQL, and the dtype that makes dates of the counts.
_COUNTS: dict[type[types.DataType], tuple[str, str]] = {
    types.DateType: ("bigint(unix_date({0}))", "M8[D]"),
    types.TimestampType: ("unix_micros({0})", "M8[us]"),
}

# Of a column of Spark: name, kind, width (columns of the matrix), type (dtype of its elements).
Column = dict[str, Any]
Reports = list[dict[str, Any]]  # of the tasks


def inspect(source: Any, dtype: Any, missing: Missing, connection: GangConnection) -> Any:
    """A source for data of Spark; the rules are in ``docs/transfer.md``.

    Parameters
    ----------
    source : DataFrame, RowMatrix, IndexedRowMatrix, CoordinateMatrix, BlockMatrix
        Or a local vector or matrix of `pyspark.ml.linalg` or `pyspark.mllib.linalg`.
    dtype : dtype, optional
        Convert to it while sending.
    connection : GangConnection
        The gang that it will be sent to.

    Raises
    ------
    DtypeError, ShapeError
        If it cannot become a matrix.
    TransferError
        If Spark cannot count its rows, or has no jar of Alchemist (`jvm`).

    Notes
    -----
    The rows of a DataFrame or RowMatrix are counted first, without their elements: cache a
    source that is expensive to compute. A CoordinateMatrix is shuffled into blocks.
    """
    match source:
        case DataFrame():
            return _of_frame(source, dtype, missing, connection)
        case RowMatrix():
            return _of_rows(source, dtype, connection)
        case IndexedRowMatrix() | BlockMatrix():
            return _of_numbered(source, type(source).__name__, dtype, connection)
        case CoordinateMatrix():
            work = partial(source.toBlockMatrix, MLLIB_BLOCK, MLLIB_BLOCK)
            what = "put a CoordinateMatrix into blocks"
            blocks = jvm.run(_session(), what, work, connection.ping)
            return _of_numbered(blocks, "CoordinateMatrix", dtype, connection)
        case RDD():
            raise DtypeError("an RDD cannot be sent: send RowMatrix(rdd) or IndexedRowMatrix(rdd)")
    if hasattr(source, "toArray"):  # a local vector or matrix
        return NumPySource.inspect(source.toArray(), dtype)
    raise DtypeError(
        f"cannot send a {type(source).__name__} of Spark: send a DataFrame or a matrix of "
        "pyspark.mllib.linalg.distributed"
    )


def _session() -> Any:
    return SparkSession.builder.getOrCreate()


def _of_frame(frame: Any, wanted: Any, missing: Missing, connection: GangConnection) -> SparkSource:
    fields = frame.schema.fields
    if not fields:
        raise ShapeError("the DataFrame has no columns: there is nothing to send")
    columns = [_column(field) for field in fields]
    if missing != ERROR or any(isinstance(field.dataType, types.DecimalType) for field in fields):
        frame = _converted(frame, fields, columns, missing)
    dtype = chosen_dtype(np.result_type(*(column["type"] for column in columns)), wanted)
    scalars = all(column["kind"] == SCALAR for column in columns)
    if not scalars:
        _measure(frame, columns, connection)
    rows = (frame._jdf, scalars)
    return OrderedSource(frame.sparkSession, "DataFrame", columns, dtype, connection, rows)


def _converted(
    frame: Any, fields: list[types.StructField], columns: list[Column], missing: Missing
) -> Any:
    """The frame with decimals as doubles and, in columns of numbers, something for each null."""
    numbered = frame.toDF(*(f"c{i}" for i in range(len(fields))))  # names may occur twice

    def converted(i: int) -> Any:
        found = F.col(f"c{i}")
        column = columns[i]
        kind = type(fields[i].dataType)
        name = "double" if kind is types.DecimalType else fields[i].dataType.simpleString()
        if kind is types.DecimalType:
            found = found.cast(name)
        if missing == ERROR or column["kind"] != SCALAR:
            return found
        dtype = dtype_with_missing(np.dtype(column["type"]), missing)
        if dtype.name != column["type"]:
            name = "float" if dtype.itemsize == 4 else "double"
            column["type"] = dtype.name
            wide = found.cast(name)
            if kind is types.LongType:
                words = F.lit(f"column {column['name']!r} has integers that {dtype} would round")
                rounds = wide.cast("long") != found
                wide = F.when(rounds, F.raise_error(words).cast(name)).otherwise(wide)
            found = wide
        with refusals():
            element = element_for(missing, dtype, f"column {column['name']!r}")
        return F.coalesce(found, F.lit(element.item()).cast(name))

    return numbered.select(*(converted(i).alias(f"c{i}") for i in range(len(fields))))


def _column(field: types.StructField) -> Column:
    """A column, as far as its type says what it is. Raises `DtypeError`."""
    kind = field.dataType
    if type(kind) in _DTYPES:
        return {"name": field.name, "kind": SCALAR, "width": 1, "type": _DTYPES[type(kind)].name}
    if isinstance(kind, MLVectorUDT | VectorUDT):
        return {"name": field.name, "kind": VECTOR, "type": "float64"}
    if isinstance(kind, types.ArrayType) and type(kind.elementType) in _DTYPES:
        if isinstance(kind.elementType, types.DecimalType):
            raise DtypeError(f"column {field.name!r} is {kind.simpleString()}: cast it to double")
        return {"name": field.name, "kind": LIST, "type": _DTYPES[type(kind.elementType)].name}
    if type(kind) in _COUNTS:
        count, dtype = _COUNTS[type(kind)]
        name = field.name.replace("`", "``")
        raise DtypeError(
            f"column {field.name!r} is {kind.simpleString()}, and frames of Spark are sent as "
            f"numbers: select dates alone, as F.expr({count.format(f'`{name}`')!r}), and "
            f".astype({dtype!r}) of the handle makes dates of them; or load_matrix from Parquet"
        )
    raise DtypeError(
        f"column {field.name!r} is {kind.simpleString()}, which is neither numeric nor a vector: "
        "drop it (df.drop), or select numbers that are made of it"
    )


def _measure(frame: Any, columns: list[Column], connection: GangConnection) -> None:
    """Set the widths of vectors and lists: the lengths in the first row."""
    first = jvm.run(frame.sparkSession, "read the first row", frame.head, connection.ping)
    if first is None:
        raise ShapeError(NO_ROWS)
    for column, value in zip(columns, first, strict=True):
        if column["kind"] == SCALAR:
            continue
        if value is None:
            raise DtypeError(
                f"column {column['name']!r} has nulls, which a matrix cannot represent: drop their "
                "rows first (df.na.drop)"
            )
        column["width"] = len(value)


def _of_rows(matrix: RowMatrix, wanted: Any, connection: GangConnection) -> SparkSource:
    def width() -> int | None:
        try:
            return int(matrix.numCols())  # MLlib keeps it
        except Py4JJavaError as error:
            if "Cannot determine the number of cols" in str(error.java_exception):
                return None
            raise

    session = _session()
    columns = jvm.run(session, "read the first row", width, connection.ping)
    if columns is None:
        raise ShapeError(NO_ROWS)
    column = {"name": "value", "kind": VECTOR, "width": columns, "type": "float64"}
    dtype = chosen_dtype(FLOAT64, wanted)
    rows = (_java(matrix).rows().toJavaRDD(),)
    return OrderedSource(session, "RowMatrix", [column], dtype, connection, rows)


def _of_numbered(
    matrix: IndexedRowMatrix | BlockMatrix, kind: str, wanted: Any, connection: GangConnection
) -> SparkSource:
    def count() -> tuple[int, int]:
        return int(matrix.numRows()), int(matrix.numCols())

    session = _session()
    dtype = chosen_dtype(FLOAT64, wanted)
    shape = jvm.run(session, f"count the rows of a {kind}", count, connection.ping)
    if isinstance(matrix, IndexedRowMatrix):
        return NumberedSource(session, kind, shape, dtype, _java(matrix).rows().toJavaRDD())
    block = (int(matrix.rowsPerBlock), int(matrix.colsPerBlock))
    return NumberedSource(session, kind, shape, dtype, _java(matrix).blocks().toJavaRDD(), block)


def _java(matrix: Any) -> Any:
    return matrix._java_matrix_wrapper._java_model


class SparkSource:
    """A matrix in Spark's executors.

    Parameters
    ----------
    spark : SparkSession
    kind : str
        The type that the user sent.
    """

    columns: Sequence[str] = ()

    def __init__(self, spark: Any, kind: str, shape: Shape, dtype: np.dtype[Any]) -> None:
        self._spark = spark
        self._sender = jvm.sender(spark)
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
        described = jvm.description(connection.endpoints, target)
        reports: Reports = jvm.run(
            self._spark,
            f"send a {self._kind}",
            lambda: json.loads(self._sent(described, _cores(self._spark))),
            connection.ping,
        )
        _check(reports)
        times: dict[int, NodeTimes] = {}
        for part in (NodeTimes(**fields) for each in reports for fields in each["times"]):
            add_times(times, {part.node: part})
        self._complete(connection, target, reports)
        if progress is not None:
            progress(self.shape[0] * self.shape[1] * self.dtype.itemsize)
        return times

    def _sent(self, description: dict[str, Any], cores: int) -> str:
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
            raise SendAgainError(
                f"Spark repeated task {number} of the transfer (attempt {each['again']}), because "
                "its executor or a shuffle file was lost or spark.speculation is on; the matrix "
                "was freed: send it again"
            )


class OrderedSource(SparkSource):
    """Rows without numbers, ordered by partition and then within each; they are counted here.

    Parameters
    ----------
    rows : tuple
        As `Sender.rows` takes them.
    """

    def __init__(
        self,
        spark: Any,
        kind: str,
        columns: list[Column],
        dtype: np.dtype[Any],
        connection: GangConnection,
        rows: tuple[Any, ...],
    ) -> None:
        width = sum(column["width"] for column in columns)
        if width == len(columns):  # a vector has more than its name
            self.columns = [column["name"] for column in columns]
        self._described = columns
        self._rows: Any = None
        sender = jvm.sender(spark)

        def count() -> list[Any]:
            self._rows = sender.rows(*rows)
            pairs: list[Any] = json.loads(sender.count(self._rows, _cores(spark)))
            return pairs

        counts = dict(jvm.run(spark, f"count the rows of a {kind}", count, connection.ping))
        sizes = [counts.get(part, 0) for part in range(max(counts, default=-1) + 1)]
        self._starts = [0, *np.cumsum(sizes, dtype=np.int64).tolist()]
        super().__init__(spark, kind, (self._starts[-1], width), dtype)

    def _sent(self, description: dict[str, Any], cores: int) -> str:
        spec = json.dumps(description | {"columns": self._described, "starts": self._starts})
        reports: str = self._sender.ordered(self._rows, cores, spec)
        return reports

    def send(
        self, connection: GangConnection, target: TransferTarget, progress: Progress | None
    ) -> dict[int, NodeTimes]:
        """Send every element; the number of rows is not trusted again after an error."""
        try:
            return super().send(connection, target, progress)
        except TransferError:
            with contextlib.suppress(Py4JError, OSError):
                self._sender.forget(self._rows)
            raise

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
    """Rows or blocks with numbers; missing ones are zero.

    Parameters
    ----------
    rdd : JavaRDD
    block : (int, int), optional
        Rows and columns of a block. Default: rows.
    """

    def __init__(
        self,
        spark: Any,
        kind: str,
        shape: Shape,
        dtype: np.dtype[Any],
        rdd: Any,
        block: Shape | None = None,
    ) -> None:
        super().__init__(spark, kind, shape, dtype)
        self._rdd = rdd
        self._block = block
        self._grid = (shape[0], 1)
        if block is not None:
            self._grid = math.ceil(shape[0] / block[0]), math.ceil(shape[1] / block[1])
        if (count := math.prod(self._grid)) >= MAX_NUMBERED:
            raise ShapeError(
                f"the {kind} has {count} {'rows' if block is None else 'blocks'}, and less than "
                f"{MAX_NUMBERED} can be sent: send parts of it"
            )

    def _sent(self, description: dict[str, Any], cores: int) -> str:
        if self._block is None:
            column = {"name": "vector", "kind": VECTOR, "width": self.shape[1], "type": "float64"}
            send: Any = self._sender.numbered
            form: dict[str, Any] = {"columns": [column]}
        else:
            send, form = self._sender.blocks, {"block": self._block}
        reports: str = send(self._rdd, cores, json.dumps(description | form))
        return reports

    def _complete(
        self, connection: GangConnection, target: TransferTarget, reports: Reports
    ) -> None:
        there = np.zeros(math.prod(self._grid), bool)
        for each in reports:  # a task refuses its own duplicates
            bits = np.frombuffer(zlib.decompress(base64.b64decode(each["bits"])), np.uint8)
            found = np.flatnonzero(np.unpackbits(bits, bitorder="little")) + each["first"]
            if there[found].any():
                number = int(found[there[found]][0])
                name = "row" if self._block is None else "block"
                which = number if self._block is None else divmod(number, self._grid[1])
                raise IncompleteMatrixError(
                    f"{name} {which} appears twice: drop duplicates, or add them up"
                )
            there[found] = True
        missing = np.flatnonzero(~there)
        if not len(missing):
            return
        if self._block is None:
            spec = json.dumps(jvm.description(connection.endpoints, target))
            work = partial(self._sender.zeros, missing.astype(">i8").tobytes(), spec)
            what = f"send the missing rows of a {self._kind}"
            _check([json.loads(jvm.run(self._spark, what, work, connection.ping))])
            return
        with MatrixWriter(connection.nodes, target) as writer:
            for number in missing.tolist():
                place = np.array(divmod(number, self._grid[1])) * self._block
                shape = np.minimum(self._block, np.array(self.shape) - place)
                writer.write_block(np.zeros(shape, self.dtype), tuple(place.tolist()))
