"""`to_spark`: a matrix as a lazy DataFrame or MLlib matrix; Spark's tasks fetch the rows."""

from __future__ import annotations

import json
import math
from typing import Any

from pyspark.mllib.linalg.distributed import (
    BlockMatrix,
    CoordinateMatrix,
    IndexedRowMatrix,
    RowMatrix,
)
from pyspark.sql import DataFrame, SparkSession

from alchemist_ray.attached.matrix_ref import MatrixRef
from alchemist_ray.attached.registry import gang_of
from alchemist_ray.clients.spark import jvm
from alchemist_ray.errors import BadArgumentError, DtypeError, ShapeError
from mpi_workers.data.description import TransferTarget
from mpi_workers.matrix.layout import Distribution

# Of each kind, MLlib's class and the method of `Matrices.scala`.
MLLIB_BLOCK = 1024  # rows and columns of a block, as MLlib's own default
MLLIB: dict[str, tuple[Any, str]] = {
    "RowMatrix": (RowMatrix, "rows"),
    "IndexedRowMatrix": (IndexedRowMatrix, "indexedRows"),
    "CoordinateMatrix": (CoordinateMatrix, "entries"),
    "BlockMatrix": (BlockMatrix, "blocks"),
}
KINDS = ("DataFrame", *MLLIB)
PARTITION = 64 << 20  # 64 MiB: approximate maximum of a partition


def to_spark(
    handle: MatrixRef,
    spark: Any = None,
    kind: str = "DataFrame",
    *,
    block: tuple[int, int] | None = None,
) -> Any:
    """The matrix as a DataFrame or as one of MLlib's distributed matrices.

    Parameters
    ----------
    handle : MatrixRef
    spark : SparkSession, optional
        Default: the session of this process.
    kind : {"DataFrame", "RowMatrix", "IndexedRowMatrix", "CoordinateMatrix", "BlockMatrix"}
        A DataFrame has columns with the matrix's dtype, named as the handle's, or ``c0``, ``c1``,
        ... if it has no names; use it for up to a few hundred columns. The others are MLlib's,
        with float64; a CoordinateMatrix has the nonzero elements.
    block : (int, int), optional
        Rows and columns of a BlockMatrix's blocks. Default: (1024, 1024).

    Returns
    -------
    DataFrame or distributed matrix
        Lazy: each use fetches the data again, so ``.cache()`` a result that is used twice or
        must outlive the gang. It refers to the matrix as a handle does, until Java has collected
        it and all that Spark derives of it, and until the next use of Spark here. Rows are in
        order, partition by partition. A query of a DataFrame fetches the columns that it uses and
        the rows of its limit; a count fetches nothing.

    Raises
    ------
    DtypeError
        If the matrix is complex: Spark has no complex type.
    ShapeError
        If the matrix has no columns, no rows for one of MLlib's, or more than two axes.
    StaleHandleError
        If the gang has ended.
    TransferError
        If Spark has no jar of Alchemist, and none can be built.
    BadArgumentError
        If `kind` is not one of these.

    Notes
    -----
    The tasks fetch from the gang's nodes directly, with one connection per task and node: no data
    passes through this process or through Python workers. If the gang has ended, the tasks fail.
    """
    if kind not in KINDS:
        raise BadArgumentError(f"kind must be one of {', '.join(KINDS)}; got {kind!r}")
    if handle.dtype.kind == "c":
        raise DtypeError(
            f"{handle.name} has dtype {handle.dtype}, and Spark has no complex numbers"
        )
    connection = gang_of(handle)
    connection.check(handle)
    if len(handle.shape) > 2:
        raise ShapeError(
            f"{handle.name} has the shape {handle.shape}: to_spark takes vectors and matrices; "
            "A.reshape(len(A), -1) makes a matrix of it"
        )
    m, n = handle.stored_shape
    if not n or (not m and kind != "DataFrame"):
        raise ShapeError(
            f"{handle.name} has shape {handle.shape}: MLlib's matrices need at least one row "
            "and column, a DataFrame a column"
        )
    spark = spark or SparkSession.builder.getOrCreate()
    target = TransferTarget(
        handle.id, Distribution(handle.layout, handle.stored_shape, connection.grid), handle.dtype
    )
    readers = jvm.readers(spark)
    described = json.dumps(jvm.description(connection.endpoints, target))
    nbytes = m * n * target.dtype.itemsize
    rows = _partitions(spark, m, nbytes)
    java, context = spark._jvm.alchemist.spark, spark.sparkContext._jsc
    if kind == "DataFrame":
        names = json.dumps(handle.columns)  # py4j would ask for each name
        made = java.MatrixSource.frame(spark._jsparkSession, described, rows, names)
        readers.add(made, handle)
        return DataFrame(made, spark)
    matrix, method = MLLIB[kind]
    make = getattr(java.Matrices, method)
    sides: tuple[int, ...] = ()
    if kind == "BlockMatrix":
        sides = down, across = tuple(map(int, block or (MLLIB_BLOCK, MLLIB_BLOCK)))
        rows = _partitions(spark, math.ceil(m / down) * math.ceil(n / across), nbytes)
    made = make(context, described, rows, *sides)
    readers.add(made, handle)
    return matrix(made, *sides, m, n)


def _partitions(spark: Any, count: int, nbytes: int) -> int:
    cores: int = spark.sparkContext.defaultParallelism
    return max(1, min(count, max(cores, nbytes // PARTITION)))
