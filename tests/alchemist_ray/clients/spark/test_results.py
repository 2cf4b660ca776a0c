"""Matrices of a gang as Spark's, lazy and of every kind."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from alchemist_ray import AlchemistSession
from alchemist_ray.errors import BadArgumentError, DtypeError, ShapeError
from tests.alchemist_ray.clients.spark.conftest import X
from tests.support.sparks import SPARK

pytestmark = SPARK


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
