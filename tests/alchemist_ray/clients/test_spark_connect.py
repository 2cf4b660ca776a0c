"""DataFrames of Spark Connect, with a client of Spark 4 in a folder of its own.

``uv pip install --no-deps --target FOLDER 'pyspark>=4' py4j zstandard grpcio-status`` makes the
folder, which the variable `ALCHEMIST_SPARK_CONNECT` names; it needs Java 17. Else this is skipped.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tests.support import commands

FOLDER = os.environ.get("ALCHEMIST_SPARK_CONNECT", "")
PROGRAM = """
    import datetime
    import numpy as np
    import pytest
    from pyspark.sql import SparkSession

    from alchemist_ray import AlchemistSession
    from alchemist_ray.clients import spark_connect
    from alchemist_ray.errors import DtypeError, ResourceError

    spark = SparkSession.builder.remote("local[2]").getOrCreate()
    columns = "id", "id * 0.5 half", "cast(id as decimal(9,2)) d"
    frame = spark.range(0, 1000, 1, 3).selectExpr(*columns)
    expected = np.arange(1000.0)[:, None] * [1, 0.5, 1]


    def arrived(A):
        assert (A.columns, A.dtype) == (("id", "half", "d"), np.float64)
        values = A.fetch()
        np.testing.assert_array_equal(values[np.argsort(values[:, 0])], expected)


    with AlchemistSession(2) as als:
        A = als.send_matrix(frame)
        arrived(A)
        np.testing.assert_array_equal(A.fetch(), expected)  # by partition, then within each
        days = spark.createDataFrame([(datetime.date(2026, 1, 2),), (None,)], "day date")
        with pytest.raises(DtypeError, match=r"column 'day' has nulls \\(1\\)"):
            als.send_matrix(days)
        D = als.send_matrix(days, missing="nan")
        assert D.dtype == np.dtype("M8[D]")
        assert np.isnat(D).sum().item() == 1
        with pytest.raises(DtypeError, match="column 'w' has type string"):
            als.send_matrix(spark.createDataFrame([("a",)], "w string"))
        print("executors")

        count = spark_connect._counter()

        def away(batches):  # executors without the package
            import pyarrow
            for batch in count(batches):
                yield batch.set_column(2, "ready", pyarrow.array([False]))

        spark_connect._counter = lambda: away
        arrived(als.send_matrix(frame))
        print("here")
        spark_connect.available_bytes = lambda: 1000
        with pytest.raises(ResourceError, match="install the package in.*load_matrix"):
            als.send_matrix(frame)
        print("refused")
    spark.stop()
"""


@pytest.mark.skipif(not FOLDER, reason="ALCHEMIST_SPARK_CONNECT names no folder with pyspark 4")
def test_a_frame_is_sent_by_executors_or_through_this_process(cluster: str) -> None:
    path = [FOLDER, str(Path(__file__).parents[3]), os.environ.get("PYTHONPATH", "")]
    said = commands.python(
        PROGRAM, code=0, limit_s=250, PYTHONPATH=os.pathsep.join(path), RAY_ADDRESS=cluster,
        SPARK_HOME=f"{FOLDER}/pyspark", PYSPARK_PYTHON=sys.executable,
    ).stdout  # fmt: skip
    told = [line for line in said.split() if line in ("executors", "here", "refused")]
    assert told == ["executors", "here", "refused"]
