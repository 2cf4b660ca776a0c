"""Tests after Databricks' spark-perf on Spark alone: a line of JSON, seconds by test.

    python -m benchmarks.papers.spark_perf 100000 --master local[2]

Its core tests are scheduling, aggregation, sorting and counting of pairs; its tests of MLlib train
on rows. Each one runs once before it counts, and what it returns is checked.
"""

from __future__ import annotations

import argparse
import json
import operator
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.spark_mllib import started

KEYS = 1000  # different ones, an even number
PARTS = 4
FEATURES = 20
TASKS = 100  # of the test of scheduling
RECORDS_OF_A_ROW = 20  # as many fewer rows than pairs

Work = Callable[[], bool]


def core(
    spark: Any, count: int, keys: int = KEYS, parts: int = PARTS, tasks: int = TASKS
) -> dict[str, Work]:
    """The core tests, on pairs of a key and 1; every work returns whether its result is right."""
    context = spark.sparkContext
    numbers = context.parallelize(range(count), parts)
    pairs = {
        "": numbers.map(lambda i: (f"{i * 7919 % keys:010}", 1)).cache(),
        "-int": numbers.map(lambda i: (i * 7919 % keys, 1)).cache(),
    }
    ones = spark._jvm.java.util.Collections.nCopies(tasks, 1)  # an element for each task, no Python
    works: dict[str, Work] = {
        "scheduling-throughput": lambda: context._jsc.parallelize(ones, tasks).count() == tasks,
        "count": lambda: pairs[""].count() == count,
        "count-with-filter": lambda: (
            pairs["-int"].filter(lambda pair: pair[0] % 2 == 0).count() == count // 2
        ),
    }
    for kind, found in pairs.items():
        found.count()
        works[f"agg-by-key{kind}"] = lambda found=found: (
            found.reduceByKey(operator.add).count() == keys
        )
        works[f"sort-by-key{kind}"] = lambda found=found: found.sortByKey().count() == count
    works["agg-by-key-naive"] = lambda: pairs[""].groupByKey().mapValues(sum).count() == keys
    return works


def mllib(spark: Any, count: int) -> dict[str, Work]:
    """Tests of MLlib on `count` rows of 20 normal features, whose labels are linear in them."""
    from pyspark.ml.classification import LogisticRegression
    from pyspark.ml.clustering import KMeans
    from pyspark.ml.feature import PCA
    from pyspark.ml.functions import array_to_vector
    from pyspark.ml.regression import LinearRegression

    X = np.random.default_rng(0).standard_normal((count, FEATURES))
    sums = X.sum(axis=1)
    columns = [X.tolist(), sums.tolist(), (sums > 0).astype(float).tolist()]
    schema = "x array<double>, y double, z double"
    frame = spark.createDataFrame(list(zip(*columns, strict=True)), schema)
    rows = frame.select(array_to_vector("x").alias("x"), "y", "z").repartition(PARTS).cache()
    rows.count()
    named = {"featuresCol": "x", "maxIter": 10}
    linear = LinearRegression(labelCol="y", **named)
    logistic = LogisticRegression(labelCol="z", **named)
    means = KMeans(k=4, seed=1, **named)
    pca = PCA(k=3, inputCol="x", outputCol="p")
    variances = np.linalg.eigvalsh(np.cov(X.T))
    first = variances[-1] / variances.sum()
    return {
        "glm-regression": lambda: bool(np.allclose(linear.fit(rows).coefficients.toArray(), 1)),
        "glm-classification": lambda: logistic.fit(rows).summary.accuracy > 0.95,
        "kmeans": lambda: means.fit(rows).summary.trainingCost < count * variances.sum(),
        "pca": lambda: bool(np.isclose(pca.fit(rows).explainedVariance[0], first)),
    }


def main() -> None:
    """Run every test twice; print the seconds of the second time."""
    parser = argparse.ArgumentParser()
    parser.add_argument("records", type=int)
    parser.add_argument("--master", required=True)
    options = parser.parse_args()
    spark = started(native=False, master=options.master, memory_gb=2)
    works = core(spark, options.records) | mllib(spark, options.records // RECORDS_OF_A_ROW)
    took = {}
    for name, work in works.items():
        for _ in range(2):
            took[name] = timed(name, work)
    print(json.dumps(took), flush=True)
    spark.stop()


def timed(name: str, work: Work) -> float:
    """The seconds of a test; SystemExit if its result is wrong."""
    begun = time.perf_counter()
    right = work()
    took = time.perf_counter() - begun
    if not right:
        raise SystemExit(f"{name}: a wrong result")
    return took


if __name__ == "__main__":
    main()
