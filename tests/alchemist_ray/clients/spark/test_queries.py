"""Matrices of a gang as Spark's; of a query only the rows and columns that it needs are fetched."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import pytest

from alchemist_ray import AlchemistSession
from alchemist_ray.errors import BadArgumentError, DtypeError, ShapeError
from tests.alchemist_ray.clients.spark.conftest import X as SMALL
from tests.support.sparks import SPARK

pytest.importorskip("pyspark", reason="needs alchemist-on-ray[spark]")

from pyspark.errors import IllegalArgumentException

from alchemist_ray.clients.spark import results

pytestmark = SPARK

ROWS, COLS = 3001, 150
LAYOUTS = ["VC_STAR", "STAR_VC", "MC_MR", "STAR_STAR", "BLOCK_CYCLIC:7"]
FEW = [7, 140, 8, 30]  # runs of columns, and others
OFTEN = list(range(1, COLS, 2))  # columns between them are read too, where they are streamed


def values(dtype: str = "float64") -> np.ndarray[Any, Any]:
    drawn = 100 * np.random.default_rng(3).standard_normal((ROWS, COLS))
    return drawn > 0 if dtype == "bool" else drawn.astype(dtype)


@pytest.fixture(params=["shared memory", "TCP"])
def route(request: pytest.FixtureRequest, jvm: Any, monkeypatch: pytest.MonkeyPatch) -> str:
    """Executors on the ranks' node, and as on another one."""
    monkeypatch.setattr(jvm, "MAPPED", request.param != "TCP")
    return str(request.param)


def plan(frame: Any) -> str:
    return str(frame._jdf.queryExecution().executedPlan().toString())


def scanned(frame: Any) -> int:
    """The columns that Spark asks for."""
    leaves = frame._jdf.queryExecution().sparkPlan().collectLeaves()
    return int(leaves.head().output().size())


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("chosen", [FEW, OFTEN], ids=["few", "often"])
def test_only_the_chosen_columns_are_read(
    als: AlchemistSession, spark: Any, route: str, layout: str, chosen: list[int]
) -> None:
    X = values()
    frame = als.send_matrix(X).to_layout(layout).to_spark(spark)
    some = frame.select(*(f"c{j}" for j in chosen))
    assert scanned(some) == len(chosen)
    np.testing.assert_array_equal(np.array(some.collect()), X[:, chosen])


@pytest.mark.parametrize("dtype", ["float32", "int16", "int32", "int64", "bool"])
def test_chosen_columns_of_every_dtype(
    als: AlchemistSession, spark: Any, route: str, dtype: str
) -> None:
    X = values(dtype)
    frame = als.send_matrix(X, layout="MC_MR").to_spark(spark)
    for chosen in (FEW, OFTEN):
        some = frame.select(*(f"c{j}" for j in chosen))
        np.testing.assert_array_equal(np.array(some.collect()), X[:, chosen])


def test_a_condition_needs_its_own_columns_too(als: AlchemistSession, spark: Any, jvm: Any) -> None:
    X = values()
    some = als.send_matrix(X).to_spark(spark).where("c9 > c100").select("c3")
    assert scanned(some) == 3
    np.testing.assert_array_equal(np.array(some.collect())[:, 0], X[X[:, 9] > X[:, 100], 3])


def test_columns_of_a_matrix_with_names(als: AlchemistSession, spark: Any, jvm: Any) -> None:
    pd = pytest.importorskip("pandas")
    X = values()[:, :4]
    named = als.send_matrix(pd.DataFrame(X, columns=["a", "b.c", "é", "A1"]))
    frame = named.to_spark(spark)
    assert frame.columns == ["a", "b.c", "é", "A1"]
    assert als.send_matrix(frame).columns == ("a", "b.c", "é", "A1")
    some = frame.select("é", "`b.c`")
    assert scanned(some) == 2
    np.testing.assert_array_equal(np.array(some.collect()), X[:, [2, 1]])


def test_a_count_fetches_nothing(als: AlchemistSession, spark: Any, jvm: Any) -> None:
    A = als.send_matrix(values())
    frame = A.to_spark(spark)
    A.free()
    assert frame.count() == ROWS
    assert scanned(frame.selectExpr("count(c3)")) == 0
    with pytest.raises(IllegalArgumentException, match=r"holds no matrix.*Was it freed") as caught:
        frame.select("c0").collect()
    assert len(str(caught.value).splitlines()) < 3  # 180 lines of Java, from the tasks


@pytest.mark.parametrize("start", [0, 5, ROWS - 1, ROWS + 1])
@pytest.mark.parametrize("limit", [0, 1, 40, ROWS + 9])
def test_a_limit_is_the_source_s(
    als: AlchemistSession, spark: Any, jvm: Any, start: int, limit: int
) -> None:
    X = values()
    frame = als.send_matrix(X).to_spark(spark).select("c1", "c4")
    X = X[:, [1, 4]]
    for some, wanted in (
        (frame.limit(limit), X[:limit]),
        (frame.offset(start).limit(limit), X[start:][:limit]),
        (frame.limit(limit).offset(start), X[:limit][start:]),
    ):
        if limit:  # Spark reads nothing for 0
            assert "Limit" not in plan(some)
        assert some.count() == len(wanted)
        found = np.array(some.collect()).reshape(-1, 2)
        np.testing.assert_array_equal(found, wanted)


def test_what_is_counted_is_what_is_sent(
    als: AlchemistSession, spark: Any, jvm: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows are counted by partitions in a query without columns."""
    monkeypatch.setattr(results, "PARTITION", 100_000)
    X = values()
    frame = als.send_matrix(X).to_spark(spark)
    assert frame.rdd.getNumPartitions() == X.nbytes // 100_000
    for some, wanted in (
        (frame, X),
        (frame.select("c5", "c3"), X[:, [5, 3]]),
        (frame.offset(7).limit(1000), X[7:1007]),
    ):
        np.testing.assert_array_equal(als.send_matrix(some).fetch(), wanted)


def test_a_limit_after_a_condition_or_an_order_is_spark_s(
    als: AlchemistSession, spark: Any, jvm: Any
) -> None:
    X = values()
    frame = als.send_matrix(X).to_spark(spark)
    found = np.array(frame.where("c0 > 100").select("c0", "c5").limit(9).collect())
    rows = {tuple(row) for row in X[X[:, 0] > 100][:, [0, 5]]}
    assert len(found) == 9
    assert {tuple(row) for row in found} <= rows
    least = np.array(frame.orderBy("c0").select("c0").limit(9).collect())
    np.testing.assert_array_equal(least[:, 0], np.sort(X[:, 0])[:9])


def test_spark_knows_how_small_a_matrix_is(als: AlchemistSession, spark: Any, jvm: Any) -> None:
    """It sends a small side of a join to all executors, and reads once what occurs twice."""
    X = np.column_stack([np.arange(500), np.arange(500) % 7]).astype(np.int64)
    frame = als.send_matrix(X).to_spark(spark)
    large = spark.range(10_000_000)
    joined = large.join(frame, large.id == frame.c0)
    assert "BroadcastHashJoin" in plan(joined)
    twice = frame.groupBy("c1").count().union(frame.groupBy("c1").count())
    before = spark.conf.get("spark.sql.adaptive.enabled")
    spark.conf.set("spark.sql.adaptive.enabled", "false")  # it finds them when the query runs
    try:
        assert plan(twice).count("BatchScan") == 1
    finally:
        spark.conf.set("spark.sql.adaptive.enabled", before)


# --- as other objects of Spark ------------------------------------------------------------------


def test_vectors_and_matrices_without_rows(als: AlchemistSession, spark: Any) -> None:
    vector = als.send_matrix(SMALL[:, 0]).to_spark(spark)
    np.testing.assert_array_equal(np.array(vector.collect())[:, 0], SMALL[:, 0])
    assert als.send_matrix(SMALL[:0]).to_spark(spark).collect() == []
    for empty, kind in ((SMALL[:, :0], "DataFrame"), (SMALL[:0], "BlockMatrix")):
        with pytest.raises(ShapeError, match="need at least one row and column"):
            als.send_matrix(empty).to_spark(spark, kind)


def test_mllib_computes_with_it(als: AlchemistSession, spark: Any) -> None:
    A = als.send_matrix(SMALL)
    gram = A.to_spark(spark, kind="RowMatrix").computeGramianMatrix().toArray()
    np.testing.assert_allclose(gram, SMALL.T @ SMALL)
    blocks = A.to_spark(spark, kind="BlockMatrix").transpose().toLocalMatrix().toArray()
    np.testing.assert_array_equal(blocks, SMALL.T)
    entries = A.to_spark(spark, kind="CoordinateMatrix").entries.collect()
    assert len(entries) == SMALL.size
    assert all(SMALL[e.i, e.j] == e.value for e in entries)


def test_unsupported_conversions_are_refused(als: AlchemistSession, spark: Any) -> None:
    with pytest.raises(DtypeError, match="complex"):
        als.send_matrix(SMALL + 1j).to_spark(spark)
    with pytest.raises(BadArgumentError, match="IndexedRowMatrix"):
        als.send_matrix(SMALL).to_spark(spark, kind="Table")
    with pytest.raises(ShapeError, match=r"\(2, 3, 4\): to_spark takes vectors and matrices"):
        als.xp.zeros((2, 3, 4)).to_spark(spark)
    with pytest.raises(DtypeError, match="uint8: convert with astype"):
        als.send_matrix(SMALL.astype("uint8")).to_spark(spark)
    gc.collect()
    assert "uint8" not in {str(A.dtype) for A in als.list_matrices()}
