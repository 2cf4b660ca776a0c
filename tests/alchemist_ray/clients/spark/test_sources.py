"""All matrix types of Spark are sent to a gang: values, order, and refused input."""

# ruff: noqa: PLC0415 - what runs in executors imports for itself

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from alchemist_ray import AlchemistSession
from alchemist_ray.errors import (
    DtypeError,
    IncompleteMatrixError,
    MatrixError,
    ShapeError,
    TransferError,
)
from tests.alchemist_ray.clients.spark.conftest import Reports, X
from tests.alchemist_ray.conftest import refused
from tests.support.sparks import SPARK

pytest.importorskip("pyspark", reason="needs alchemist-on-ray[spark]")

from pyspark.ml.linalg import Vectors as MLVectors
from pyspark.mllib.linalg import DenseMatrix, Matrices, SparseMatrix, Vectors
from pyspark.mllib.linalg.distributed import (
    BlockMatrix,
    CoordinateMatrix,
    IndexedRow,
    IndexedRowMatrix,
    RowMatrix,
)
from pyspark.sql.types import LongType

pytestmark = SPARK

LAYOUTS = ["VC_STAR", "STAR_VC", "MC_MR", "STAR_STAR", "CIRC_CIRC", "BLOCK", "BLOCK_CYCLIC:7"]


def rows_of(array: np.ndarray[Any, Any]) -> list[tuple[float, ...]]:
    return [tuple(map(float, row)) for row in array]


@pytest.mark.parametrize("partitions", [1, 5, 40])
def test_rows_of_a_dataframe_are_in_its_order(
    als: AlchemistSession, spark: Any, partitions: int
) -> None:
    frame = spark.createDataFrame(rows_of(X), [f"x{j}" for j in range(7)])
    frame = frame.repartition(partitions).cache()
    A = als.send_matrix(frame, name="frame", print_times=True)
    assert A.name == "frame"
    assert A.dtype == np.float64
    np.testing.assert_array_equal(A.fetch(), np.array(frame.collect()))
    frame.unpersist()


def test_a_sorted_frame_is_sent_in_its_order(als: AlchemistSession, spark: Any) -> None:
    """Also with adaptive execution, which joins partitions as it likes from job to job."""
    assert spark.conf.get("spark.sql.adaptive.enabled") == "true"
    frame = spark.range(0, 500, 1, 5).selectExpr("(id * 7919) % 503 as k", "id").orderBy("k")
    A = als.send_matrix(frame)
    assert spark.conf.get("spark.sql.adaptive.enabled") == "true"
    want = np.array(sorted(((i * 7919) % 503, i) for i in range(500)))
    np.testing.assert_array_equal(A.fetch(), want)


def test_bounds_that_spark_draws_are_the_same_when_rows_are_sent(
    als: AlchemistSession, spark: Any
) -> None:
    """Each plan with `orderBy` draws its own, from more rows than this."""
    frame = spark.range(0, 50_000, 1, 4).selectExpr("(id * 7919) % 50021 as k", "id").cache()
    found = als.send_matrix(frame.orderBy("k")).fetch()
    ids = np.arange(50_000)
    np.testing.assert_array_equal(found[:, 0], np.sort(ids * 7919 % 50021))
    np.testing.assert_array_equal(np.sort(found[:, 1]), ids)
    frame.unpersist()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_kind_in_every_layout(als: AlchemistSession, spark: Any, layout: str) -> None:
    context = spark.sparkContext
    order = np.random.default_rng(1).permutation(len(X))
    indexed = IndexedRowMatrix(
        context.parallelize([IndexedRow(int(i), X[i]) for i in order], 4), *X.shape
    )
    kinds = [
        RowMatrix(context.parallelize([Vectors.dense(row) for row in X], 4)),
        indexed,
        indexed.toBlockMatrix(20, 3),
        indexed.toCoordinateMatrix(),
    ]
    for matrix in kinds:
        A = als.send_matrix(matrix, layout=layout)
        assert A.layout == layout
        np.testing.assert_array_equal(A.fetch(), X)


def test_vectors_dense_and_sparse_and_lists(als: AlchemistSession, spark: Any) -> None:
    for maker in (MLVectors, Vectors):
        rows = [
            (1, maker.dense([1.0, 0.0, 2.0]), [7.0, 8.0]),
            (2, maker.sparse(3, [2], [5.0]), [9.0, float("nan")]),
            (3, maker.sparse(3, [], []), [0.0, float("inf")]),
        ]
        frame = spark.createDataFrame(rows, ["a.b", "v", "l"]).coalesce(1)
        want = [[1, 1, 0, 2, 7, 8], [2, 0, 0, 5, 9, np.nan], [3, 0, 0, 0, 0, np.inf]]
        np.testing.assert_array_equal(als.send_matrix(frame).fetch(), want)
        np.testing.assert_array_equal(
            als.send_matrix(frame.select("v")).fetch(), np.array(want)[:, 1:4]
        )


def test_dtypes(als: AlchemistSession, spark: Any) -> None:
    frame = spark.createDataFrame([(1, 2.5, 3)], "i int, f float, l long").coalesce(1)
    assert als.send_matrix(frame.select("i")).dtype == np.int32
    assert als.send_matrix(frame.select("f")).dtype == np.float32
    assert als.send_matrix(frame.select("i", "l")).dtype == np.int64
    mixed = als.send_matrix(frame)
    assert mixed.dtype == np.float64
    np.testing.assert_array_equal(mixed.fetch(), [[1, 2.5, 3]])
    assert als.send_matrix(frame, dtype="float32").dtype == np.float32
    decimal = spark.sql("select cast(1.25 as decimal(5, 2)) as d")
    np.testing.assert_array_equal(als.send_matrix(decimal).fetch(), [[1.25]])
    flags = spark.sql("select true as b, false as c")
    mask = als.send_matrix(flags)
    assert (mask.dtype, mask.columns) == (np.bool_, ("b", "c"))
    np.testing.assert_array_equal(mask.fetch(), [[True, False]])
    np.testing.assert_array_equal(als.send_matrix(flags, dtype="int32").fetch(), [[1, 0]])
    short = als.send_matrix(spark.sql("select cast(-300 as short) as s, cast(7 as byte) as b"))
    assert short.dtype == np.int16
    np.testing.assert_array_equal(short.fetch(), [[-300, 7]])
    refused(als, frame.select("i"), DtypeError, "columns of dtype uint8", dtype="uint8")
    refused(als, frame, DtypeError, "'f' has the value 2.5, which int64", dtype="int64")
    assert als.send_matrix(mixed.fetch()[:, ::2], dtype="int64").fetch().tolist() == [[1, 3]]


def test_numbers_that_a_narrower_dtype_cannot_hold_are_refused(
    als: AlchemistSession, spark: Any
) -> None:
    rows = spark.sparkContext.parallelize([IndexedRow(0, [1.0, 1e300])], 1)
    one = IndexedRowMatrix(rows, 1, 2)
    for large, dtype in (
        (spark.createDataFrame([(1, 2), (3, 2**40)], "a long, b long"), "int32"),
        (spark.createDataFrame([([1, 2**40],)], "l array<long>"), "int32"),
        (spark.createDataFrame([(1.0, 1e300)], "a double, b double"), "float32"),
        (spark.createDataFrame([(Vectors.dense([1e300]),)], ["v"]), "float32"),
        (one, "float32"),
        (one.toBlockMatrix(2, 2), "float32"),
    ):
        refused(als, large, DtypeError, rf"(1e\+300|1.0E300|{2**40}).*{dtype}", dtype=dtype)
    small = spark.createDataFrame([(1, float("inf")), (2**24 + 1, 0.1)], "a long, b double")
    want = np.array([[1, np.inf], [2**24 + 1, 0.1]], np.float32)  # rounded
    np.testing.assert_array_equal(als.send_matrix(small, dtype="float32").fetch(), want)


def test_columns_that_are_no_numbers_are_named(als: AlchemistSession, spark: Any) -> None:
    frame = spark.createDataFrame([(1.0, "x")], ["a", "city"])
    refused(als, frame, DtypeError, "'city'", "string")
    none = als.send_matrix(frame.select("a").where("a > 5"))
    assert none.fetch().shape == (0, 1)
    none.free()
    refused(als, spark.createDataFrame([([["x"]],)], ["n"]), DtypeError, "'n'", "array")
    refused(als, frame.rdd, DtypeError, r"RowMatrix\(rdd\)")


def test_dates_are_refused_with_the_expression_that_sends_them(
    als: AlchemistSession, spark: Any
) -> None:
    frame = spark.range(1).selectExpr(
        "date'1969-12-31' `a day`", "timestamp_micros(-1) at", "timestamp_ntz'2024-01-01' local"
    )
    refused(als, frame.select("local"), DtypeError, "'local' is timestamp_ntz")
    for name, want in (("a day", "1969-12-31"), ("at", "1969-12-31T23:59:59.999999")):
        with pytest.raises(DtypeError, match=f"{name!r} is ") as refusal:
            als.send_matrix(frame.select(name))
        found = re.search(r'F.expr\([\'"](.*)[\'"]\).*astype\(\'(.*)\'\)', str(refusal.value))
        assert found is not None
        counts = als.send_matrix(frame.selectExpr(found[1]))
        assert counts.astype(found[2]).fetch().tolist() == [[np.datetime64(want).item()]]


def test_nulls_are_refused_by_their_column(als: AlchemistSession, spark: Any) -> None:
    frame = spark.createDataFrame([(1.0, 2.0), (3.0, None)], ["a", "b.c"])
    refused(als, frame, DtypeError, "'b.c'", "nulls", "missing=")
    lists = spark.createDataFrame([([1.0, 2.0],), ([1.0, None],)], ["l"])
    refused(als, lists, DtypeError, "'l'", "nulls", "inside of lists")
    none = spark.createDataFrame([([1.0],), (None,)], "l array<double>").coalesce(1)
    refused(als, none, DtypeError, "'l'", "nulls")


def test_something_stands_for_a_null(als: AlchemistSession, spark: Any) -> None:
    rows = [(1, 2.0, True), (None, None, None)]
    frame = spark.createDataFrame(rows, "a bigint, `b.c` double, d boolean").coalesce(1)
    A = als.send_matrix(frame, missing="nan")
    assert (A.dtype, A.columns) == (np.float64, ("a", "b.c", "d"))
    np.testing.assert_array_equal(A.fetch(), [[1, 2, 1], [np.nan] * 3])
    A = als.send_matrix(frame.select("a"), missing=-1)
    assert (A.dtype, A.fetch().tolist()) == (np.int64, [[1], [-1]])
    refused(als, frame, DtypeError, "missing=0.5 is no element of column 'a'", missing=0.5)
    large = spark.createDataFrame([(2**53 + 1,), (None,)], "a bigint").coalesce(1)
    refused(als, large, TransferError, "'a' has integers that float64 would round", missing="nan")


def test_rows_of_several_lengths_are_refused(als: AlchemistSession, spark: Any) -> None:
    frame = spark.createDataFrame([([1.0, 2.0],), ([1.0],)], ["l"])
    refused(als, frame, ShapeError, "'l'", "1 elements", "2")
    vectors = [(Vectors.dense([1.0, 2.0]),), (Vectors.sparse(3, [1], [1.0]),)]
    refused(als, spark.createDataFrame(vectors, ["v"]).coalesce(1), ShapeError, "'v'", "3 elements")


def test_a_source_that_changes_is_detected(
    als: AlchemistSession, spark: Any, tmp_path: Any
) -> None:
    """Its rows are counted, and are more when they are sent."""
    counter = tmp_path / "looked"

    def more(batches: Any) -> Any:
        import pyarrow as pa

        for _ in batches:
            seen = counter.stat().st_size if counter.exists() else 0
            with counter.open("a") as file:
                file.write("x")
            yield pa.RecordBatch.from_pydict({"k": list(range(10 + seen))})

    frame = spark.range(0, 1, 1, 1).mapInArrow(more, "k long")
    assert frame.schema[0].dataType == LongType()
    refused(als, frame, TransferError, "partition 0", "cache")


def test_a_matrix_whose_stage_spark_runs_again_is_sent_once_more(
    als: AlchemistSession, spark: Any, tmp_path: Any
) -> None:
    """A task finds no shuffle file, and the tasks of the second attempt have number 0 again."""
    folders = list(spark._jvm.org.apache.spark.SparkEnv.get().blockManager()
                   .diskBlockManager().localDirsString())  # fmt: skip
    counter = tmp_path / "partitions"

    def lose(batches: Any) -> Any:
        with counter.open("a") as file:
            file.write("x")
        if counter.stat().st_size == 5:  # the first 4 are counted
            for folder in folders:
                for path in Path(folder).rglob("shuffle_*"):
                    path.unlink()
        yield from batches

    frame = spark.range(0, 4000, 1, 3).repartition(4).mapInArrow(lose, "id long")
    np.testing.assert_array_equal(np.sort(als.send_matrix(frame).fetch()[:, 0]), np.arange(4000))
    assert counter.stat().st_size > 8


def test_more_rows_than_a_task_can_mark_are_refused(als: AlchemistSession, spark: Any) -> None:
    rows = spark.sparkContext.parallelize([IndexedRow(1, [1.0])], 1)
    refused(als, IndexedRowMatrix(rows, 2**31, 1), ShapeError, "2147483648 rows", "send parts")


def test_missing_rows_are_zero(als: AlchemistSession, spark: Any) -> None:
    rows = [IndexedRow(6, [1.0, 2.0]), IndexedRow(1, Vectors.sparse(2, [1], [3.0]))]
    matrix = IndexedRowMatrix(spark.sparkContext.parallelize(rows, 2), 9, 2)
    want = np.zeros((9, 2))
    want[6], want[1] = [1, 2], [0, 3]
    for layout in LAYOUTS[:3]:
        np.testing.assert_array_equal(als.send_matrix(matrix, layout=layout).fetch(), want)
    np.testing.assert_array_equal(als.send_matrix(matrix.toBlockMatrix(2, 1)).fetch(), want)
    np.testing.assert_array_equal(als.send_matrix(matrix.toCoordinateMatrix()).fetch(), want)


@pytest.mark.parametrize("partitions", [1, 3])
def test_duplicate_row_numbers_are_refused(
    als: AlchemistSession, spark: Any, partitions: int
) -> None:
    context = spark.sparkContext
    rows = [IndexedRow(i, [1.0]) for i in (0, 2, 2)]
    refused(
        als, IndexedRowMatrix(context.parallelize(rows, partitions), 3, 1),
        IncompleteMatrixError, "row 2", "twice",
    )  # fmt: skip
    block = Matrices.dense(1, 1, [1.0])
    blocks = context.parallelize([((0, 0), block), ((1, 0), block), ((1, 0), block)], partitions)
    refused(als, BlockMatrix(blocks, 1, 1, 3, 1), IncompleteMatrixError, r"block \(1, 0\)", "twice")


def test_rows_and_blocks_outside_the_matrix_are_refused(als: AlchemistSession, spark: Any) -> None:
    context = spark.sparkContext
    rows = context.parallelize([IndexedRow(5, [1.0])], 1)
    refused(als, IndexedRowMatrix(rows, 3, 1), ShapeError, "5", "outside of a 3 x 1")
    blocks = context.parallelize([((0, 0), Matrices.dense(1, 2, [1.0, 2.0]))], 1)
    refused(als, BlockMatrix(blocks, 2, 2, 4, 2), ShapeError, r"block \(0, 0\)", r"\(1, 2\)")


def test_duplicate_entries_are_added_as_in_mllib(als: AlchemistSession, spark: Any) -> None:
    entries = [(0, 0, 1.0), (2, 1, 2.0), (2, 1, 0.5)]
    matrix = CoordinateMatrix(spark.sparkContext.parallelize(entries, 2), 4, 2)
    mllib = matrix.toBlockMatrix().toLocalMatrix().toArray()
    sent = als.send_matrix(matrix).fetch()
    np.testing.assert_array_equal(sent, mllib)
    assert sent[2, 1] == 2.5


def test_blocks_of_all_forms(als: AlchemistSession, spark: Any) -> None:
    """Dense, sparse, and both as MLlib keeps a transposed one."""
    blocks = [
        ((0, 0), DenseMatrix(2, 2, [1, 2, 3, 4])),
        ((0, 1), DenseMatrix(2, 1, [5, 6], True)),
        ((1, 0), SparseMatrix(1, 2, [0, 0, 1], [0], [7])),
    ]
    matrix = BlockMatrix(spark.sparkContext.parallelize(blocks, 2), 2, 2, 3, 3)
    want = np.array([[1.0, 3, 5], [2, 4, 6], [0, 7, 0]])
    np.testing.assert_array_equal(als.send_matrix(matrix).fetch(), want)
    np.testing.assert_array_equal(als.send_matrix(matrix.transpose()).fetch(), want.T)


def test_local_vectors_and_matrices(als: AlchemistSession, spark: Any) -> None:
    local = als.send_matrix(DenseMatrix(2, 3, range(6)))
    np.testing.assert_array_equal(local.fetch(), np.arange(6.0).reshape(3, 2).T)
    np.testing.assert_array_equal(als.send_matrix(Vectors.sparse(3, [1], [2.0])), [0, 2, 0])


def test_an_error_in_user_code_is_reported(als: AlchemistSession, spark: Any) -> None:
    def bad(batches: Any) -> Any:
        for batch in batches:
            if batch.num_rows:
                raise ZeroDivisionError("my own mistake")
            yield batch

    frame = spark.range(10).mapInArrow(bad, "id long")
    refused(als, frame, TransferError, "my own mistake")
    refused(als, spark, MatrixError)


@settings(max_examples=6, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    m=st.integers(1, 60),
    n=st.integers(1, 9),
    partitions=st.integers(1, 12),
    layout=st.sampled_from(LAYOUTS),
    seed=st.integers(0, 99),
)
def test_any_shape_in_any_partitions_is_returned_unchanged(
    als: AlchemistSession, spark: Any, m: int, n: int, partitions: int, layout: str, seed: int
) -> None:
    random = np.random.default_rng(seed)
    rows = random.random((m, n))
    there = random.permutation(m)[: max(1, m - seed % 3)]
    want = np.zeros((m, n))
    want[there] = rows[there]
    listed = spark.sparkContext.parallelize(
        [IndexedRow(int(i), rows[i]) for i in there], partitions
    )
    A = als.send_matrix(IndexedRowMatrix(listed, m, n), layout=layout)
    np.testing.assert_array_equal(A.fetch(), want)
    A.free()


def test_many_partitions_share_few_tasks(
    als: AlchemistSession, spark: Any, reports: Reports
) -> None:
    """As many connections to each rank as Spark has cores, not as there are partitions."""
    A = als.send_matrix(spark.range(0, 1000, 1, 200))
    assert reports.tasks == [spark.sparkContext.defaultParallelism]
    np.testing.assert_array_equal(A.fetch()[:, 0], np.arange(1000))
