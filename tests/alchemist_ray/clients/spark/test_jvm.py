"""Rows that executors read and stream in the JVM: every layout and dtype, and refused input."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from alchemist_ray import AlchemistSession
from alchemist_ray.errors import TransferError
from tests.alchemist_ray.clients.spark.conftest import Reports
from tests.alchemist_ray.conftest import refused
from tests.support.breakable_link import BreakableLink
from tests.support.sparks import SPARK

pytest.importorskip("pyspark", reason="needs alchemist-on-ray[spark]")

from pyspark.mllib.linalg import distributed

pytestmark = SPARK

DTYPES = ["float64", "float32", "int64", "int32", "bool"]
LAYOUTS = ["VC_STAR", "STAR_VC", "MC_MR", "MD_STAR", "STAR_STAR", "BLOCK", "BLOCK_CYCLIC:7"]


def values(dtype: str, shape: tuple[int, int] = (307, 5)) -> np.ndarray[Any, Any]:
    drawn = 100 * np.random.default_rng(3).standard_normal(shape)
    return drawn > 0 if dtype == "bool" else drawn.astype(dtype)


@pytest.mark.parametrize(
    ("dtype", "layout"),
    [("float64", layout) for layout in LAYOUTS] + [(dtype, "MC_MR") for dtype in DTYPES[1:]],
)
def test_rows_come_and_go_unchanged(
    als: AlchemistSession, spark: Any, jvm: Any, dtype: str, layout: str
) -> None:
    X = values(dtype, (307, 21))  # ranks have columns in groups of 8, and others
    A = als.send_matrix(X).to_layout(layout)
    frame = A.to_spark(spark)
    assert frame.columns == [f"c{j}" for j in range(21)]
    np.testing.assert_array_equal(np.array(frame.collect()), X)
    B = als.send_matrix(frame, layout="VC_STAR" if layout == "STAR_STAR" else layout)
    assert B.dtype == X.dtype
    np.testing.assert_array_equal(B.fetch(), X)
    rows = A.to_spark(spark, kind="IndexedRowMatrix")
    np.testing.assert_array_equal(als.send_matrix(rows).fetch(), X.astype(float))


@pytest.fixture(params=["shared memory", "TCP"])
def route(
    request: pytest.FixtureRequest, jvm: Any, reports: Reports, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    """Executors on the ranks' node, and as on another one; it is checked after the test."""
    if request.param == "TCP":
        monkeypatch.setattr(jvm, "MAPPED", False)
    yield
    assert reports.routes() == {request.param}


@pytest.mark.parametrize("kind", ["DataFrame", "RowMatrix", "BlockMatrix"])
def test_a_matrix_larger_than_a_block_is_complete(
    als: AlchemistSession, spark: Any, route: Any, kind: str
) -> None:
    """Rows of 4,000 columns: several blocks, and pieces of a part of each row."""
    X = np.random.default_rng(1).standard_normal((700, 400 if kind == "DataFrame" else 4000))
    A = als.send_matrix(X, layout="MC_MR")
    matrix = A.to_spark(spark, kind=kind)
    np.testing.assert_array_equal(als.send_matrix(matrix, layout="STAR_VC").fetch(), X)


def test_rows_in_any_order_take_both_routes(als: AlchemistSession, spark: Any, route: Any) -> None:
    X = values("float64", (3000, 300))
    order = np.random.default_rng(2).permutation(len(X))
    rows = [distributed.IndexedRow(int(i), X[i]) for i in order]
    matrix = distributed.IndexedRowMatrix(spark.sparkContext.parallelize(rows, 3), *X.shape)
    np.testing.assert_array_equal(als.send_matrix(matrix, layout="MC_MR").fetch(), X)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_kind_of_mllib_has_the_values_of_any_dtype(
    als: AlchemistSession, spark: Any, jvm: Any, dtype: str
) -> None:
    X = values(dtype)
    A = als.send_matrix(X, layout="MC_MR")
    for kind in ("RowMatrix", "IndexedRowMatrix", "BlockMatrix", "CoordinateMatrix"):
        matrix = A.to_spark(spark, kind=kind, block=(100, 2))
        assert type(matrix) is getattr(distributed, kind)
        assert (matrix.numRows(), matrix.numCols()) == A.shape
        wanted = dtype if dtype == "float32" else None  # MLlib's elements are float64
        B = als.send_matrix(matrix, dtype=wanted)
        assert B.dtype == (wanted or "float64")
        np.testing.assert_array_equal(B.fetch(), X, err_msg=kind)


def test_columns_of_a_file_are_chosen_and_renamed(
    als: AlchemistSession, spark: Any, jvm: Any, tmp_path: Path
) -> None:
    X = values("float64", (4000, 12))
    als.send_matrix(X).to_spark(spark).coalesce(1).write.parquet(str(tmp_path / "x"))
    frame = spark.read.parquet(str(tmp_path / "x"))
    chosen = frame.select(*[frame[f"c{j}"].alias(f"d{j}") for j in range(11, 1, -1)])
    B = als.send_matrix(chosen, layout="MC_MR")
    assert B.columns == tuple(f"d{j}" for j in range(11, 1, -1))
    np.testing.assert_array_equal(B.fetch(), X[:, 11:1:-1])


def test_columns_of_all_kinds_are_joined(als: AlchemistSession, spark: Any, jvm: Any) -> None:
    frame = spark.sql(
        "select cast(id as tinyint) a, cast(id as smallint) b, cast(id / 2 as float) c,"
        " array(cast(id as double), 0.5D) d, id % 2 = 0 e, cast(id as decimal(9,2)) f"
        " from range(100)"
    )
    k = np.arange(100.0)
    want = np.column_stack([k, k, k / 2, k, np.full(100, 0.5), k % 2 == 0, k])
    np.testing.assert_array_equal(als.send_matrix(frame).fetch(), want)


class DroppingLink(BreakableLink):
    """Drops the first connections, and passes on the others."""

    dropped = 0

    def _accept(self) -> None:
        self.plugged = self.dropped == 3
        self.dropped += not self.plugged
        super()._accept()


def test_an_executor_that_an_endpoint_drops_connects_again(
    als: AlchemistSession, spark: Any, jvm: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An endpoint to which many connect at the same time drops some (`wire/acceptor.py`)."""
    description, links = jvm.description, list[DroppingLink]()

    def through_links(*given: Any) -> dict[str, Any]:
        found = description(*given)
        for node in found["nodes"]:
            links.append(DroppingLink(node["port"], node["host"]))
            node["host"], node["port"] = "127.0.0.1", links[-1].port
        return found

    monkeypatch.setattr(jvm, "description", through_links)
    monkeypatch.setattr(jvm, "MAPPED", False)
    X = values("float64")
    A = als.send_matrix(X).to_spark(spark)
    np.testing.assert_array_equal(als.send_matrix(A).fetch(), X)
    assert [link.dropped for link in links] == [3, 3]  # to Spark and back
    for link in links:
        link.close()


def test_an_error_in_the_data_is_spark_s_own(als: AlchemistSession, spark: Any, jvm: Any) -> None:
    frame = spark.sql("select if(id = 7, raise_error('seven'), id) x from range(9)")
    refused(als, frame.selectExpr("cast(x as double) x"), TransferError, "seven")


def test_without_a_java_the_error_names_what_is_missing(
    als: AlchemistSession, spark: Any, jvm: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    A = als.send_matrix(np.ones((2, 2)))
    for name in ("java", "home"):
        (tmp_path / name).mkdir()
    monkeypatch.setattr(jvm, "SOURCES", tmp_path / "java")
    monkeypatch.setattr(jvm, "_attached", None)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("JAVA_HOME", raising=False)
    frame = spark.range(3)
    for use in (lambda: als.send_matrix(frame), lambda: A.to_spark(spark)):
        with pytest.raises(TransferError, match=r"needs the jar of Alchemist.*no Java was found"):
            use()
