"""Looks at what a user has in Spark: which plan it takes, of which shape and dtype.

Where an MLlib matrix lives in the JVM, the JVM makes a DataFrame of it: no row passes through
Python's pickle.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
from pyspark import RDD
from pyspark.ml.linalg import VectorUDT as MLVectorUDT
from pyspark.mllib.common import callMLlibFunc
from pyspark.mllib.linalg import VectorUDT
from pyspark.mllib.linalg.distributed import (
    BlockMatrix,
    CoordinateMatrix,
    IndexedRowMatrix,
    RowMatrix,
)
from pyspark.sql import DataFrame, SparkSession, types
from pyspark.sql import functions as F

from alchemist_ray.clients.spark import jobs
from alchemist_ray.clients.spark.arrow import LIST, SCALAR, VECTOR
from alchemist_ray.clients.spark.sources import (
    BlocksSource,
    NumberedSource,
    OrderedSource,
    SparkSource,
)
from alchemist_ray.dtypes import chosen_dtype
from alchemist_ray.errors import DtypeError, ShapeError
from alchemist_ray.gang.connection import GangConnection
from alchemist_ray.transfer.numpy_source import NumPySource

BLOCK = 1024  # MLlib's own default, for entries that are put into blocks
FLOAT64 = np.dtype(np.float64)

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
    """A source for data of Spark; see `alchemist_ray/clients/README.md`.

    Parameters
    ----------
    source : DataFrame, RowMatrix, IndexedRowMatrix, CoordinateMatrix, BlockMatrix
        Or a local vector or matrix of `pyspark.ml.linalg` or `pyspark.mllib.linalg`.
    dtype : dtype, optional
        Convert to it on the way.
    connection : GangConnection
        The gang that it will be sent to.

    Raises
    ------
    DtypeError, ShapeError
        If no matrix can be made of it.
    TransferError
        If Spark cannot count its rows.

    Notes
    -----
    A DataFrame's and a RowMatrix's rows are counted first, without their elements: a
    source that is costly to compute is best cached. A CoordinateMatrix is shuffled into blocks.
    """
    match source:
        case DataFrame():
            return _of_frame(source, "DataFrame", dtype, connection)
        case RowMatrix():
            return _of_frame(_frame_of_rows(source), "RowMatrix", dtype, connection)
        case IndexedRowMatrix():
            return _of_indexed(source, dtype, connection)
        case CoordinateMatrix():
            watch = connection.ping
            work = partial(source.toBlockMatrix, BLOCK, BLOCK)
            blocks = jobs.run(_session(), "put a CoordinateMatrix into blocks", work, watch)
            return _of_blocks(blocks, "CoordinateMatrix", dtype, connection)
        case BlockMatrix():
            return _of_blocks(source, "BlockMatrix", dtype, connection)
        case RDD():
            raise DtypeError(
                "an RDD is no matrix yet: send RowMatrix(rdd) or IndexedRowMatrix(rdd)"
            )
    if hasattr(source, "toArray"):  # a local vector or matrix
        return NumPySource.inspect(source.toArray(), dtype)
    raise DtypeError(
        f"a {type(source).__name__} of Spark's cannot be sent: give a DataFrame or one of "
        "pyspark.mllib.linalg.distributed"
    )


def _session() -> Any:
    return SparkSession.builder.getOrCreate()


# --- DataFrames, and RowMatrix as one -----------------------------------------------------


def _of_frame(frame: Any, kind: str, wanted: Any, connection: GangConnection) -> SparkSource:
    fields = frame.schema.fields
    if not fields:
        raise ShapeError("a DataFrame without columns is no matrix")
    names = [field.name for field in fields]
    kinds, dtypes = zip(*(_column(field) for field in fields), strict=True)
    dtype = chosen_dtype(np.result_type(*dtypes), wanted)
    plain = frame.toDF(*(f"c{i}" for i in range(len(names))))  # names may hold dots, or be twice
    plain = plain.select(
        *(
            F.col(f"c{i}").cast("double") if isinstance(field.dataType, types.DecimalType)
            else F.col(f"c{i}")
            for i, field in enumerate(fields)
        )
    ).toDF(*plain.columns)  # fmt: skip
    widths = _widths(plain, list(kinds), names, connection)
    return OrderedSource(plain, kind, names, list(kinds), widths, dtype, connection)


def _column(field: types.StructField) -> tuple[str, np.dtype[Any]]:
    """What a column holds. Raises `DtypeError`."""
    kind = field.dataType
    if type(kind) in _DTYPES:
        return SCALAR, _DTYPES[type(kind)]
    if isinstance(kind, MLVectorUDT | VectorUDT):
        return VECTOR, FLOAT64
    if isinstance(kind, types.ArrayType) and type(kind.elementType) in _DTYPES:
        if isinstance(kind.elementType, types.DecimalType):
            raise DtypeError(f"column {field.name!r} is {kind.simpleString()}: cast it to double")
        return LIST, _DTYPES[type(kind.elementType)]
    raise DtypeError(
        f"column {field.name!r} is {kind.simpleString()}: a matrix has columns of numbers, or of "
        "vectors; leave it out (df.drop) or cast it"
    )


def _widths(
    frame: Any, kinds: list[str], names: list[str], connection: GangConnection
) -> list[int]:
    """How many columns of the matrix each column is; wide ones as their first row is."""
    if all(kind == SCALAR for kind in kinds):
        return [1] * len(kinds)
    wide = [c for c, kind in zip(frame.columns, kinds, strict=True) if kind != SCALAR]
    watch = connection.ping
    first = jobs.run(frame.sparkSession, "read the first row", frame.select(*wide).head, watch)
    if first is None:
        raise ShapeError("a DataFrame without rows is no matrix")
    widths = []
    for c, kind, name in zip(frame.columns, kinds, names, strict=True):
        if kind != SCALAR and first[c] is None:
            raise DtypeError(f"column {name!r} has nulls, and a matrix has none: drop them first")
        widths.append(1 if kind == SCALAR else len(first[c]))
    return widths


def _frame_of_rows(matrix: RowMatrix) -> DataFrame:
    """A RowMatrix's rows as a DataFrame, made in the JVM."""
    spark = _session()
    encoders = spark._jvm.org.apache.spark.sql.catalyst.encoders
    udt = spark._jvm.org.apache.spark.mllib.linalg.VectorUDT()
    plain = getattr(encoders, "AgnosticEncoders$UDTEncoder")(udt, udt.getClass())
    encoder = encoders.ExpressionEncoder.apply(plain)
    rows = spark._jsparkSession.createDataset(_java(matrix).rows(), encoder)
    return DataFrame(rows.toDF(), spark)


def _java(matrix: Any) -> Any:
    return matrix._java_matrix_wrapper._java_model


# --- matrices whose rows or blocks have numbers --------------------------------------------


def _shape(matrix: Any, what: str, connection: GangConnection) -> tuple[int, int]:
    def count() -> tuple[int, int]:
        return int(matrix.numRows()), int(matrix.numCols())

    watch = connection.ping
    return jobs.run(_session(), f"count the rows of a {what}", count, watch)


def _of_indexed(matrix: IndexedRowMatrix, wanted: Any, connection: GangConnection) -> SparkSource:
    shape = _shape(matrix, "IndexedRowMatrix", connection)
    frame = callMLlibFunc("getIndexedRows", _java(matrix))
    return NumberedSource(frame, "IndexedRowMatrix", shape, chosen_dtype(FLOAT64, wanted))


def _of_blocks(
    matrix: BlockMatrix, kind: str, wanted: Any, connection: GangConnection
) -> SparkSource:
    shape = _shape(matrix, kind, connection)
    block = (int(matrix.rowsPerBlock), int(matrix.colsPerBlock))
    frame = callMLlibFunc("getMatrixBlocks", _java(matrix))
    return BlocksSource(frame, kind, shape, chosen_dtype(FLOAT64, wanted), block)
