"""Linear algebra beside MLlib's for difficult data: dependent columns, scales, far from the origin.

MLlib takes singular values and components from the Gram matrix, whose rounding errors limit the
comparison. linalg alone is compared more strictly in tests/ali/test_peers.py.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from alchemist_ray import AlchemistSession
from tests.alchemist_ray.clients.spark.test_mllib import OURS, THEIRS, row_matrix, signless
from tests.ali import peer_data
from tests.support.sparks import SPARK
from tests.support.suite import scaled

pytest.importorskip("pyspark", reason="needs alchemist-on-ray[spark]")

from alchemist_ray.clients.spark import mllib

pytestmark = SPARK

EPS = float(np.finfo("float64").eps)
NAMES = [name for name, a in peer_data.matrices().items() if len(a) > 3 and a.dtype != "float32"]
SOME = scaled(NAMES[::3], NAMES)  # tests/ali/test_peers.py has all of them on ranks


def close(found: Any, expected: Any, error: float, what: str) -> None:
    """Equal up to an error relative to the largest number."""
    found, expected = np.asarray(found), np.asarray(expected)
    limit = error * float(np.abs(expected).max(initial=0))
    np.testing.assert_allclose(found, expected, rtol=0, atol=limit, err_msg=what)


@pytest.mark.parametrize("name", SOME)
def test_results_are_mllibs(als: AlchemistSession, spark: Any, name: str) -> None:
    a = peer_data.matrices()[name].astype("float64")
    theirs, ours = row_matrix(spark, THEIRS, a), row_matrix(spark, OURS, a)
    gram = theirs.computeGramianMatrix().toArray()
    close(ours.computeGramianMatrix().toArray(), gram, 100 * EPS, "gram")

    found, expected = ours.computeSVD(5), theirs.computeSVD(5)
    s, other = found.s.toArray(), expected.s.toArray()
    close(s, other[: len(s)], 10 * EPS**0.5, "singular values")
    assert (other[len(s) :] < 10 * EPS**0.5 * s[0]).all()  # what the Gram matrix leaves of zeros
    close(s, np.linalg.svd(a, compute_uv=False)[: len(s)], 100 * EPS, "singular values, NumPy's")

    # Means are subtracted from the Gram matrix, and take the digits of far data with them.
    loss = float(np.abs(a.mean(axis=0)).max() / a.std(axis=0).max()) ** 2 + 1
    parts = [m.computePrincipalComponents(2) for m in (ours, theirs)]
    close(*map(signless, parts), 1e3 * EPS * loss, "components")

    cosines = [np.zeros((5, 5)), np.zeros((5, 5))]
    for matrix, cosine in zip((ours, theirs), cosines, strict=True):
        for entry in matrix.columnSimilarities().entries.collect():
            cosine[entry.i, entry.j] = entry.value
    close(*cosines, 100 * EPS, "similarities")


@pytest.mark.parametrize("name", ["int32", "int64"])
def test_integers_do_not_wrap(als: AlchemistSession, spark: Any, name: str) -> None:
    """The columns of a DataFrame are sent as integers; MLlib computes in float64."""
    a = peer_data.matrices()[name]
    frame = spark.createDataFrame(a.tolist(), [f"c{j}: {name[:3]}" for j in range(5)])
    frame = frame.select([frame[f"`{c}`"].cast("int" if name == "int32" else "long")
                          .alias(f"c{j}") for j, c in enumerate(frame.columns)])  # fmt: skip
    theirs = row_matrix(spark, THEIRS, a.astype("float64"))
    gram = mllib.computeGramianMatrix(frame).toArray()
    close(gram, theirs.computeGramianMatrix().toArray(), 100 * EPS, "gram")
    cosines = [
        sorted((e.i, e.j, round(e.value, 12)) for e in found.entries.collect())
        for found in (mllib.columnSimilarities(frame), theirs.columnSimilarities())
    ]
    assert cosines[0] == cosines[1]
