"""Matrices of a gang as Spark's, lazy and of every kind."""

# ruff: noqa: PLC0415 - without Spark this file is skipped, and what runs in executors imports
# for itself.

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from alchemist_ray import AlchemistSession
from alchemist_ray.errors import BadArgumentError, DtypeError, ShapeError
from tests.alchemist_ray.clients.spark.conftest import X
from tests.support.sparks import SPARK

pytestmark = SPARK

KINDS = ["RowMatrix", "IndexedRowMatrix", "CoordinateMatrix", "BlockMatrix"]


@pytest.mark.parametrize("dtype", ["float32", "float64", "int32", "int64", "bool"])
def test_a_dataframe_has_the_matrix_rows_and_dtype(
    als: AlchemistSession, spark: Any, dtype: str
) -> None:
    want = (10 * X).astype(dtype)
    frame = als.send_matrix(want, layout="MC_MR").to_spark(spark)
    assert frame.columns == [f"c{j}" for j in range(7)]
    np.testing.assert_array_equal(np.array(frame.collect()), want)
    back = als.send_matrix(frame)
    assert back.dtype == dtype
    np.testing.assert_array_equal(back.fetch(), want)


def test_names_vectors_and_matrices_without_rows(als: AlchemistSession, spark: Any) -> None:
    pd = pytest.importorskip("pandas")
    named = als.send_matrix(pd.DataFrame({"a": [1.0, 2.0], "b.c": [3.0, 4.0]}))
    frame = named.to_spark(spark)
    assert frame.columns == ["a", "b.c"]
    assert als.send_matrix(frame).columns == ("a", "b.c")
    vector = als.send_matrix(X[:, 0]).to_spark(spark)
    np.testing.assert_array_equal(np.array(vector.collect())[:, 0], X[:, 0])
    assert als.send_matrix(X[:0]).to_spark(spark).collect() == []
    for empty, kind in ((X[:, :0], "DataFrame"), (X[:0], "BlockMatrix")):
        with pytest.raises(ShapeError, match="need at least one row and column"):
            als.send_matrix(empty).to_spark(spark, kind)


@pytest.mark.parametrize("kind", KINDS)
def test_a_matrix_sent_back_is_unchanged(als: AlchemistSession, spark: Any, kind: str) -> None:
    from pyspark.mllib.linalg import distributed

    A = als.send_matrix(np.where(X > 0, X, 0), layout="STAR_VC")
    matrix = A.to_spark(spark, kind=kind)
    assert type(matrix) is getattr(distributed, kind)
    assert (matrix.numRows(), matrix.numCols()) == A.shape
    np.testing.assert_array_equal(als.send_matrix(matrix).fetch(), A.fetch())


def test_mllib_computes_with_it(als: AlchemistSession, spark: Any) -> None:
    A = als.send_matrix(X)
    gram = A.to_spark(spark, kind="RowMatrix").computeGramianMatrix().toArray()
    np.testing.assert_allclose(gram, X.T @ X)
    blocks = A.to_spark(spark, kind="BlockMatrix").transpose().toLocalMatrix().toArray()
    np.testing.assert_array_equal(blocks, X.T)
    entries = A.to_spark(spark, kind="CoordinateMatrix").entries.collect()
    assert len(entries) == X.size
    assert all(X[e.i, e.j] == e.value for e in entries)


def test_unsupported_conversions_are_refused(als: AlchemistSession, spark: Any) -> None:
    with pytest.raises(DtypeError, match="complex"):
        als.send_matrix(X + 1j).to_spark(spark)
    with pytest.raises(BadArgumentError, match="IndexedRowMatrix"):
        als.send_matrix(X).to_spark(spark, kind="Table")


def test_a_frame_whose_matrix_was_freed_reports_it(als: AlchemistSession, spark: Any) -> None:
    A = als.send_matrix(X)
    frame = A.to_spark(spark)
    A.free()
    with pytest.raises(Exception, match="holds no matrix"):
        frame.collect()
