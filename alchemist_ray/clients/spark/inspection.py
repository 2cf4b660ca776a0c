"""Inspects data of Spark: its shape and dtype, and how it is sent.

No row is pickled by Python: the JVM counts and sends them.
"""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import numpy as np
from py4j.protocol import Py4JJavaError
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

from alchemist_ray.clients.spark import jobs, jvm
from alchemist_ray.clients.spark.sources import (
    LIST,
    SCALAR,
    VECTOR,
    BlocksSource,
    Column,
    NumberedSource,
    OrderedSource,
    SparkSource,
)
from alchemist_ray.dtypes import chosen_dtype
from alchemist_ray.errors import DtypeError, ShapeError
from alchemist_ray.gang.connection import GangConnection
from alchemist_ray.transfer.sources import NumPySource

BLOCK = 1024  # rows and columns of a CoordinateMatrix's blocks, as MLlib's default
FLOAT64 = np.dtype(np.float64)
NO_ROWS = (
    "the data has no rows, so the widths of its vectors are not known: send numpy.empty((0, n)) "
    "for a matrix without rows"
)
PLAIN = re.compile(r"\w+").fullmatch  # names that mean themselves in `select`

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


def inspect(source: Any, dtype: Any, connection: GangConnection) -> Any:
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
            return _of_frame(source, "DataFrame", dtype, connection)
        case RowMatrix():
            return _of_rows(source, dtype, connection)
        case IndexedRowMatrix():
            return _of_indexed(source, dtype, connection)
        case CoordinateMatrix():
            work = partial(source.toBlockMatrix, BLOCK, BLOCK)
            what = "put a CoordinateMatrix into blocks"
            blocks = jobs.run(_session(), what, work, connection.ping)
            return _of_blocks(blocks, "CoordinateMatrix", dtype, connection)
        case BlockMatrix():
            return _of_blocks(source, "BlockMatrix", dtype, connection)
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


# --- DataFrames, and RowMatrix as one -----------------------------------------------------


def _of_frame(frame: Any, kind: str, wanted: Any, connection: GangConnection) -> SparkSource:
    fields = frame.schema.fields
    if not fields:
        raise ShapeError("the DataFrame has no columns: there is nothing to send")
    columns = [_column(field) for field in fields]
    dtype = chosen_dtype(np.result_type(*(column["type"] for column in columns)), wanted)
    plain = _plain(frame, fields)
    _measure(plain, columns, connection)
    return OrderedSource(frame.sparkSession, kind, columns, dtype, connection, frame=plain)


def _plain(frame: Any, fields: list[types.StructField]) -> Any:
    """The frame without decimals, and with columns that can be selected by their names.

    A frame that is so is not changed: each column of another one costs several calls to the JVM.
    """
    names = {field.name.lower() for field in fields}
    decimals = [isinstance(field.dataType, types.DecimalType) for field in fields]
    if len(names) == len(fields) and all(map(PLAIN, names)) and not any(decimals):
        return frame
    numbered = frame.toDF(*(f"c{i}" for i in range(len(fields))))
    columns = map(F.col, numbered.columns)
    return numbered.select(
        *(
            column.cast("double").alias(name) if decimal else column
            for name, column, decimal in zip(numbered.columns, columns, decimals, strict=True)
        )
    )


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
    raise DtypeError(
        f"column {field.name!r} is {kind.simpleString()}, which is neither numeric nor a vector: "
        "drop it (df.drop) or cast it"
    )


def _measure(frame: Any, columns: list[Column], connection: GangConnection) -> None:
    """Set the widths of vectors and lists: the lengths in the first row."""
    wide = {
        name: column
        for name, column in zip(frame.columns, columns, strict=True)
        if column["kind"] != SCALAR
    }
    if not wide:
        return
    head = frame.select(*wide).head
    first = jobs.run(frame.sparkSession, "read the first row", head, connection.ping)
    if first is None:
        raise ShapeError(NO_ROWS)
    for name, column in wide.items():
        if first[name] is None:
            raise DtypeError(
                f"column {column['name']!r} has nulls, which a matrix cannot represent: drop them "
                "first"
            )
        column["width"] = len(first[name])


def _of_rows(matrix: RowMatrix, wanted: Any, connection: GangConnection) -> SparkSource:
    def width() -> int | None:
        try:
            return int(matrix.numCols())  # MLlib keeps it
        except Py4JJavaError as error:
            if "Cannot determine the number of cols" in str(error.java_exception):
                return None
            raise

    session = _session()
    columns = jobs.run(session, "read the first row", width, connection.ping)
    if columns is None:
        raise ShapeError(NO_ROWS)
    column = {"name": "value", "kind": VECTOR, "width": columns, "type": "float64"}
    dtype = chosen_dtype(FLOAT64, wanted)
    rows = _java(matrix).rows().toJavaRDD()
    return OrderedSource(session, "RowMatrix", [column], dtype, connection, rdd=rows)


def _java(matrix: Any) -> Any:
    return matrix._java_matrix_wrapper._java_model


# --- matrices whose rows or blocks have numbers --------------------------------------------


def _shape(matrix: Any, what: str, connection: GangConnection) -> tuple[int, int]:
    def count() -> tuple[int, int]:
        return int(matrix.numRows()), int(matrix.numCols())

    return jobs.run(_session(), f"count the rows of a {what}", count, connection.ping)


def _of_indexed(matrix: IndexedRowMatrix, wanted: Any, connection: GangConnection) -> SparkSource:
    shape = _shape(matrix, "IndexedRowMatrix", connection)
    rdd = _java(matrix).rows().toJavaRDD()
    if shape[0] >= jvm.MAX_NUMBERED:
        raise ShapeError(
            f"an IndexedRowMatrix of {shape[0]} rows cannot be sent, those of less than "
            f"{jvm.MAX_NUMBERED} can: send parts of it"
        )
    dtype = chosen_dtype(FLOAT64, wanted)
    return NumberedSource(_session(), "IndexedRowMatrix", shape, dtype, rdd)


def _of_blocks(
    matrix: BlockMatrix, kind: str, wanted: Any, connection: GangConnection
) -> SparkSource:
    shape = _shape(matrix, kind, connection)
    block = (int(matrix.rowsPerBlock), int(matrix.colsPerBlock))
    rdd = _java(matrix).blocks().toJavaRDD()
    return BlocksSource(_session(), kind, shape, chosen_dtype(FLOAT64, wanted), rdd, block)
