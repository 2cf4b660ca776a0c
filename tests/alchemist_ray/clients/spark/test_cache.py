"""Columns of Spark's cache, sent from where they are stored: which are, and all others' values."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from alchemist_ray import AlchemistSession
from alchemist_ray.errors import DtypeError, TransferError
from tests.alchemist_ray.clients.spark.conftest import Reports
from tests.alchemist_ray.conftest import refused
from tests.support import traces
from tests.support.sparks import SPARK

pytest.importorskip("pyspark", reason="needs alchemist-on-ray[spark]")

from pyspark import StorageLevel
from pyspark.mllib.linalg.distributed import RowMatrix

pytestmark = SPARK

ROWS, COLS = 30_001, 12
BATCH = "spark.sql.inMemoryColumnarStorage.batchSize"
COMPRESSED = "spark.sql.inMemoryColumnarStorage.compressed"


def values(dtype: str) -> np.ndarray[Any, Any]:
    """Values that no encoding makes smaller, but those of bool."""
    drawn = np.random.default_rng(4).integers(-(1 << 31), 1 << 31, (ROWS, COLS))
    return drawn > 0 if dtype == "bool" else drawn.astype(dtype)


@contextmanager
def settings(spark: Any, **wanted: Any) -> Iterator[None]:
    for key, value in wanted.items():
        spark.conf.set(key, value)
    try:
        yield
    finally:
        for key in wanted:
            spark.conf.unset(key)


@contextmanager
def cached(frame: Any, level: Any = None) -> Iterator[Any]:
    kept = frame.cache() if level is None else frame.persist(level)
    try:
        yield kept
    finally:
        kept.unpersist(True)


@pytest.mark.parametrize("dtype", ["float64", "float32", "int64", "int32", "bool"])
@pytest.mark.parametrize("layout", ["VC_STAR", "MC_MR", "BLOCK_CYCLIC:7"])
def test_columns_are_sent_from_the_cache(
    als: AlchemistSession, spark: Any, reports: Reports, dtype: str, layout: str
) -> None:
    """Batches of an odd number of rows; Spark decodes bits."""
    X = values(dtype)
    with (
        settings(spark, **{BATCH: 7001}),
        cached(als.send_matrix(X).to_spark(spark).coalesce(1)) as frame,
    ):
        A = als.send_matrix(frame, layout=layout)
    np.testing.assert_array_equal(A.fetch(), X)
    assert A.dtype == dtype
    assert reports.routes() == {"shared memory"}
    assert reports.columns() == (0 if dtype == "bool" else 5 * COLS)


def test_columns_of_the_cache_go_to_another_node(
    als: AlchemistSession, spark: Any, jvm: Any, reports: Reports, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jvm, "MAPPED", False)
    X = np.random.default_rng(0).random((5000, 400))  # a batch has 4 MiB
    with cached(als.send_matrix(X).to_spark(spark).coalesce(1)) as frame:
        np.testing.assert_array_equal(als.send_matrix(frame).fetch(), X)
    assert reports.routes() == {"TCP"}
    assert reports.columns() == 4 * 400


@pytest.mark.parametrize("compressed", [True, False])
def test_encoded_columns_are_decoded_by_spark(
    als: AlchemistSession, spark: Any, reports: Reports, compressed: bool
) -> None:
    """Runs, a dictionary and small differences; without compression nothing is encoded."""
    k = np.arange(30_000)
    with np.errstate(over="ignore"):
        mixed = (k + 1) * np.int64(711900370497862593)
    X = np.column_stack([k // 9000, k * k % 5, k, mixed])
    frame = spark.sql(
        "select id div 9000 a, id * id % 5 b, id c, (id + 1) * 711900370497862593 d"
        " from range(0, 30000, 1, 1)"
    )
    with settings(spark, **{COMPRESSED: compressed}), cached(frame) as kept:
        np.testing.assert_array_equal(als.send_matrix(kept).fetch(), X)
    assert reports.columns() == (3 if compressed else 12)


@pytest.mark.parametrize("level", ["MEMORY_ONLY", "MEMORY_AND_DISK_DESER", "DISK_ONLY"])
def test_every_storage_level_is_read(
    als: AlchemistSession, spark: Any, reports: Reports, level: str
) -> None:
    X = values("float64")
    frame = als.send_matrix(X).to_spark(spark).repartition(3)
    with cached(frame, getattr(StorageLevel, level)) as kept:
        wanted = np.array(kept.collect())
        np.testing.assert_array_equal(als.send_matrix(kept).fetch(), wanted)
    assert reports.columns() >= 3 * COLS


@pytest.mark.parametrize("columns", [["c0", "c0", "c2", "c1"], [f"c{j}" for j in range(150)]])
def test_a_column_twice_and_a_frame_that_spark_reads_by_rows(
    als: AlchemistSession, spark: Any, reports: Reports, columns: list[str]
) -> None:
    X = np.random.default_rng(1).random((4000, 150))
    with cached(als.send_matrix(X).to_spark(spark).select(*columns).coalesce(1)) as frame:
        B = als.send_matrix(frame)
    assert reports.columns() >= len(columns)
    assert B.columns == tuple(columns)
    np.testing.assert_array_equal(B.fetch(), X[:, [int(name[1:]) for name in columns]])


def test_columns_are_chosen_and_renamed_and_others_may_have_nulls(
    als: AlchemistSession, spark: Any, reports: Reports
) -> None:
    X = values("float64")
    nulls = "if(c3 > 0, null, c3) n"
    with cached(als.send_matrix(X).to_spark(spark).coalesce(1).selectExpr("*", nulls)) as frame:
        chosen = frame.select("c7", frame.c2.alias("a b"), "c11", "c2")
        A = als.send_matrix(chosen)
        np.testing.assert_array_equal(A.fetch(), X[:, [7, 2, 11, 2]])
        assert A.columns == ("c7", "a b", "c11", "c2")
        assert reports.columns() == 4 * 4
        refused(als, frame.select("c1", "n"), DtypeError, "'n' has nulls")


def test_columns_of_several_types_are_converted(
    als: AlchemistSession, spark: Any, reports: Reports
) -> None:
    kinds = ["float", "double", "bigint", "boolean", "smallint", "tinyint", "int"]
    names = {f"c{j}": kind for j, kind in enumerate(kinds)}
    X = values("float64")
    X[:, 4] = np.arange(ROWS) % 1000
    X[:, 5] = np.arange(ROWS) % 100
    of = als.send_matrix(X).to_spark(spark).coalesce(1)
    with cached(of.selectExpr(*(f"cast({c} as {kind}) {c}" for c, kind in names.items()))) as frame:
        found = als.send_matrix(frame).fetch()
        wanted = X[:, :7].copy()
        wanted[:, 0] = X[:, 0].astype(np.float32)
        wanted[:, 3] = X[:, 3] != 0
        np.testing.assert_array_equal(found, wanted)
        assert reports.columns() == 4
        narrow = als.send_matrix(frame.select("c1", "c0"), dtype="float32")
        np.testing.assert_array_equal(narrow.fetch(), X[:, [1, 0]].astype(np.float32))


def test_frames_that_spark_computes_are_not_read_from_the_cache(
    als: AlchemistSession, spark: Any, reports: Reports
) -> None:
    X = values("float64")
    with cached(als.send_matrix(X).to_spark(spark).coalesce(1)) as frame:
        for made, wanted in (
            (frame.limit(17), X[:17]),
            (frame.where("c0 > 0"), X[X[:, 0] > 0]),
            (frame.selectExpr("c0 + 1 as a", "c1"), X[:, :2] + [1, 0]),
        ):
            np.testing.assert_array_equal(als.send_matrix(made).fetch(), wanted)
            assert reports.columns() == 0


def test_an_empty_cache_has_no_rows(als: AlchemistSession, spark: Any, reports: Reports) -> None:
    with cached(spark.range(0, 9, 1, 3).selectExpr("id * 0.5D a", "id b").where("b > 9")) as frame:
        assert als.send_matrix(frame).shape == (0, 2)


def test_rows_that_changed_after_they_were_counted_are_refused_once(
    als: AlchemistSession, spark: Any, reports: Reports, tmp_path: Path
) -> None:
    """The number of rows of a cached RDD is remembered."""
    java, file = spark._jvm.org.apache.spark.mllib, tmp_path / "rows"
    file.write_text("[1.0,2.0]\n" * 8)
    vectors = java.util.MLUtils.loadVectors(spark._jsc.sc(), str(file), 2)
    rows = vectors.toJavaRDD().cache()
    matrix = RowMatrix(java.linalg.distributed.RowMatrix(rows.rdd()))
    for _ in range(2):
        assert als.send_matrix(matrix).shape == (8, 2)
    rows.unpersist(True)
    file.write_text("[1.0,2.0]\n" * 6 + "[1.0000000,2.00000]\n")  # of the same length
    rows.cache()
    refused(als, matrix, TransferError, "rows change between jobs")
    np.testing.assert_array_equal(als.send_matrix(matrix).fetch(), [[1.0, 2.0]] * 7)
    rows.unpersist(True)


def test_the_jvm_drops_unused_memory_of_ranks(
    als: AlchemistSession, spark: Any, reports: Reports
) -> None:
    maps = Path(f"/proc/{spark._jvm.java.lang.ProcessHandle.current().pid()}/maps")

    def mapped() -> bool:
        return "memfd:alchemist " in maps.read_text()

    als.send_matrix(spark.range(1000).selectExpr("id * 0.5D a"))
    assert mapped()
    assert traces.wait_until(lambda: not mapped(), 60.0, 0.5) is not None
