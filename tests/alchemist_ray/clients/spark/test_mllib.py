"""The replacements for MLlib run the same lines and give the same results."""

from __future__ import annotations

import gc
import importlib
import time
from typing import Any

import numpy as np
import pytest

from alchemist_ray import AlchemistSession
from alchemist_ray.errors import BadArgumentError, DtypeError, ShapeError
from tests.alchemist_ray.clients.spark.conftest import X
from tests.support.sparks import SPARK

pytest.importorskip("pyspark", reason="needs alchemist-on-ray[spark]")

from pyspark.mllib.common import callMLlibFunc
from pyspark.mllib.linalg import DenseMatrix, Vectors

from alchemist_ray.clients.spark import jvm
from alchemist_ray.clients.spark.mllib import CondEst

pytestmark = SPARK

THEIRS = "pyspark.mllib.linalg.distributed"
OURS = "alchemist_ray.clients.spark.mllib"


def signless(columns: Any) -> np.ndarray[Any, Any]:
    """Columns whose element of the largest absolute value is positive."""
    array = columns.toArray() if hasattr(columns, "toArray") else np.asarray(columns)
    largest = np.abs(array).argmax(axis=0)
    return np.asarray(array * np.sign(array[largest, range(array.shape[1])]))


def row_matrix(spark: Any, package: str, array: np.ndarray[Any, Any] = X) -> Any:
    """Made in the JVM: MLlib's many passes need no Python then."""
    rows = spark.createDataFrame([(Vectors.dense(row),) for row in array]).coalesce(2)
    return importlib.import_module(package).RowMatrix(rows)


def indexed_matrix(spark: Any, package: str, array: np.ndarray[Any, Any] = X, step: int = 1) -> Any:
    rows = [(step * i, Vectors.dense(row)) for i, row in enumerate(array)]
    frame = spark.createDataFrame(rows, ["index", "vector"]).coalesce(2)
    shape = step * (len(array) - 1) + 1, array.shape[1]
    java = callMLlibFunc("createIndexedRowMatrix", frame, *shape)
    return importlib.import_module(package).IndexedRowMatrix(java)


def test_rows_that_an_argument_does_not_have_are_not_in_a_result(
    als: AlchemistSession, spark: Any
) -> None:
    array = X.copy()
    array[5] = 0  # a row that is there stays, though it is zero
    numbers, shapes = [], []
    for package in (THEIRS, OURS):
        matrix = indexed_matrix(spark, package, array, step=3)
        local = DenseMatrix(X.shape[1], 2, [1.0] * (2 * X.shape[1]))
        for found in (matrix.computeSVD(3, computeU=True).U, matrix.multiply(local)):
            assert isinstance(found, type(matrix))
            numbers.append(sorted(row.index for row in found.rows.collect()))
            shapes.append((found.numRows(), found.numCols()))
    assert numbers == 4 * [list(range(0, 3 * len(X), 3))]
    assert shapes[:2] == shapes[2:]


@pytest.mark.parametrize("make", [row_matrix, indexed_matrix])
def test_svd(als: AlchemistSession, spark: Any, make: Any) -> None:
    found = []
    for package in (THEIRS, OURS):
        matrix = make(spark, package)
        svd = matrix.computeSVD(4, computeU=True)
        assert isinstance(svd.U, type(matrix))
        rows = svd.U.rows.collect()
        if make is indexed_matrix:
            rows = [row.vector for row in sorted(rows, key=lambda row: row.index)]
        found.append((svd.s.toArray(), signless([row.toArray() for row in rows]), signless(svd.V)))
    for theirs, ours in zip(*found, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-8)


def test_svd_omits_singular_values_that_count_as_zero(als: AlchemistSession, spark: Any) -> None:
    low = np.outer(np.arange(1.0, 20), np.ones(5))
    low[:, 2] = np.arange(19) % 3
    svd = row_matrix(spark, OURS, low).computeSVD(4, True)
    assert len(svd.s) == 2
    assert (svd.V.numRows, svd.V.numCols, svd.U.numCols()) == (5, 2, 2)
    u = np.array([row.toArray() for row in svd.U.rows.collect()])
    np.testing.assert_allclose((u * svd.s.toArray()) @ svd.V.toArray().T, low, atol=1e-10)
    assert row_matrix(spark, OURS, low).computeSVD(2).U is None
    with pytest.raises(BadArgumentError, match="1 to 5"):
        row_matrix(spark, OURS, low).computeSVD(6)


def test_svd_keeps_digits_that_a_gram_matrix_loses(als: AlchemistSession, spark: Any) -> None:
    random = np.random.default_rng(3)
    u, v = (np.linalg.qr(random.standard_normal((size, 6)))[0] for size in (60, 30))
    values = 10.0 ** -np.arange(0, 12, 2)
    graded = (u * values) @ v.T
    svd = row_matrix(spark, OURS, graded).computeSVD(6, True, 1e-14)
    np.testing.assert_allclose(svd.s.toArray(), values, atol=1e-15)
    np.testing.assert_allclose(signless(svd.V), signless(v), atol=1e-5)


def test_principal_components_gram_and_similarities(als: AlchemistSession, spark: Any) -> None:
    theirs, ours = row_matrix(spark, THEIRS), row_matrix(spark, OURS)
    np.testing.assert_allclose(
        signless(ours.computePrincipalComponents(3)),
        signless(theirs.computePrincipalComponents(3)),
        atol=1e-10,
    )
    gram = ours.computeGramianMatrix()
    assert type(gram) is type(theirs.computeGramianMatrix())
    np.testing.assert_allclose(gram.toArray(), theirs.computeGramianMatrix().toArray())
    entries = [
        sorted((e.i, e.j, round(e.value, 10)) for e in m.columnSimilarities().entries.collect())
        for m in (theirs, ours)
    ]
    assert entries[0] == entries[1]


def test_qr(als: AlchemistSession, spark: Any) -> None:
    theirs = row_matrix(spark, THEIRS).tallSkinnyQR(True)
    ours = row_matrix(spark, OURS).tallSkinnyQR(True)
    assert row_matrix(spark, OURS).tallSkinnyQR().Q is None
    np.testing.assert_allclose(np.abs(ours.R.toArray()), np.abs(theirs.R.toArray()), atol=1e-10)
    q = np.array(ours.Q.rows.map(lambda row: row.toArray()).collect())
    np.testing.assert_allclose(q @ ours.R.toArray(), X, atol=1e-12)
    with pytest.raises(BadArgumentError, match="fewer rows"):
        row_matrix(spark, OURS, X.T).tallSkinnyQR()


def test_products(als: AlchemistSession, spark: Any) -> None:
    local = DenseMatrix(7, 2, range(14))
    for make in (row_matrix, indexed_matrix):
        found = []
        for package in (THEIRS, OURS):
            matrix = make(spark, package)
            C = matrix.multiply(local)
            assert isinstance(C, type(matrix))
            rows = C.rows.collect()
            if make is indexed_matrix:
                rows = [row.vector for row in sorted(rows, key=lambda row: row.index)]
            found.append([row.toArray() for row in rows])
        np.testing.assert_allclose(found[1], found[0])
    products = []
    for package in (THEIRS, OURS):
        BlockMatrix = importlib.import_module(package).BlockMatrix
        A, B = (
            BlockMatrix(indexed_matrix(spark, THEIRS, array).toBlockMatrix(*block).blocks, *block)
            for array, block in ((X, (60, 4)), (X[:7], (4, 5)))
        )
        C = A.multiply(B)
        assert isinstance(C, BlockMatrix)
        assert (C.rowsPerBlock, C.colsPerBlock) == (60, 5)
        products.append(C.toLocalMatrix().toArray())
    np.testing.assert_allclose(products[1], products[0])
    np.testing.assert_allclose(products[1], X @ X[:7])
    with pytest.raises(ShapeError):
        row_matrix(spark, OURS).multiply(DenseMatrix(3, 1, range(3)))
    with pytest.raises(DtypeError, match="two BlockMatrix"):
        A.multiply(local)


def test_the_condition_number_of_the_paper(als: AlchemistSession, spark: Any) -> None:
    assert CondEst(row_matrix(spark, THEIRS)) == pytest.approx(np.linalg.cond(X))


def test_sent_matrices_are_freed(als: AlchemistSession, spark: Any) -> None:
    matrix = row_matrix(spark, OURS)
    matrix.computeSVD(2)
    matrix.computeGramianMatrix()
    matrix.computePrincipalComponents(2)
    assert als.list_matrices() == []


def dropped_by_spark(als: AlchemistSession, spark: Any) -> bool:
    """Whether the gang has no matrix soon after Java's garbage collection."""
    deadline = time.monotonic() + 20
    while als.list_matrices() and time.monotonic() < deadline:
        gc.collect()
        spark._jvm.System.gc()
        time.sleep(0.1)
        jvm.release()
    return not als.list_matrices()


@pytest.mark.parametrize("make", [row_matrix, indexed_matrix])
def test_results_stay_until_spark_drops_them(als: AlchemistSession, spark: Any, make: Any) -> None:
    rows = make(spark, OURS).computeSVD(2, computeU=True).U.rows.filter(bool)  # an RDD of Python
    for _ in range(3):
        gc.collect()
        spark._jvm.System.gc()
        jvm.release()
    assert rows.count() == len(X)
    del rows
    assert dropped_by_spark(als, spark)


def test_frames_stay_until_spark_drops_them(als: AlchemistSession, spark: Any) -> None:
    def kept(some: Any) -> bool:
        gc.collect()
        spark._jvm.System.gc()
        jvm.release()
        return bool(len(some.collect()) == len(X) and len(als.list_matrices()) == 1)

    some = als.send_matrix(X).to_spark(spark).select("c1").where("c1 is not null")
    assert kept(some)
    some = some.rdd
    assert kept(some)
    del some
    assert dropped_by_spark(als, spark)
    als.send_matrix(X).to_spark(spark).createOrReplaceTempView("numbers")
    assert kept(spark.sql("select c2 from numbers"))
    spark.catalog.dropTempView("numbers")
    assert dropped_by_spark(als, spark)
