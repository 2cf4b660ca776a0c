"""Spark alone, as a program of its own that prints the seconds of each run on a line.

    python -m benchmarks.papers.spark_program product 1000 1000 1000 --runs 3 --limit 60
    python -m benchmarks.papers.spark_program svd 10000 316 20 --asked --native

The runs together have a time limit, at which the program prints ``null`` and ends; making the
data, which is cached in the JVM, does not count. With ``--asked`` it prints ``null`` when it is
ready, and then runs once for each line of its input, which has a number of values. With
``--native`` MLlib computes with this machine's BLAS, as a tuned Spark does.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np

from benchmarks.harness import timed
from benchmarks.spark_mllib import BLOCK, started

PARTS = 8


def rows_of(spark: Any, m: int, n: int, seed: int) -> Any:
    """An IndexedRowMatrix of normal numbers, in the JVM's memory."""
    from pyspark.mllib.linalg.distributed import IndexedRow, IndexedRowMatrix

    def rows(part: int) -> Iterator[Any]:
        first, last = m * part // PARTS, m * (part + 1) // PARTS
        values = np.random.default_rng([seed, part]).standard_normal((last - first, n))
        return (IndexedRow(first + i, row) for i, row in enumerate(values))

    data = spark.sparkContext.parallelize(range(PARTS), PARTS).flatMap(rows)
    frame = IndexedRowMatrix(data, m, n)
    cached = frame._java_matrix_wrapper._java_model.rows().toJavaRDD().cache()
    cached.count()
    java = spark._jvm.org.apache.spark.mllib.linalg.distributed.IndexedRowMatrix(
        cached.rdd(), m, n
    )  # fmt: skip
    return IndexedRowMatrix(java)


def product(spark: Any, m: int, n: int, k: int) -> Callable[[], None]:
    """Rows to BlockMatrix, BlockMatrix.multiply, and back to rows, which are counted."""
    A, B = rows_of(spark, m, n, 0), rows_of(spark, n, k, 1)

    def work() -> None:
        C = A.toBlockMatrix(BLOCK, BLOCK).multiply(B.toBlockMatrix(BLOCK, BLOCK))
        C.toIndexedRowMatrix()._java_matrix_wrapper._java_model.rows().count()

    return work


def svd(spark: Any, m: int, n: int, k: int) -> Callable[..., None]:
    """IndexedRowMatrix.computeSVD with U, whose rows are counted."""
    A = rows_of(spark, m, n, 0)

    def work(values: int = k) -> None:
        A.computeSVD(values, computeU=True).U._java_matrix_wrapper._java_model.rows().count()

    return work


def iteration(spark: Any, m: int, features: int, classes: int) -> Callable[[], None]:
    """An iteration of conjugate gradients, ``Z^T (Z W)``: NumPy in tasks, a sum over a tree."""
    context = spark.sparkContext
    random = np.random.default_rng(0)

    def rows(part: int) -> Any:
        count = m * (part + 1) // PARTS - m * part // PARTS
        return np.random.default_rng(part).standard_normal((count, features))

    data = context.parallelize(range(PARTS), PARTS).map(rows).cache()
    data.count()

    def work() -> None:
        W = context.broadcast(random.standard_normal((features, classes)))
        data.map(lambda Z: Z.T @ (Z @ W.value)).treeReduce(np.add)
        W.unpersist()

    return work


WORKS = {"product": product, "svd": svd, "iteration": iteration}


def main() -> None:
    """Prepare, then run and print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=WORKS)
    parser.add_argument("sizes", type=int, nargs=3)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--limit", type=float, default=60.0)
    parser.add_argument("--asked", action="store_true")
    parser.add_argument("--native", action="store_true")
    parser.add_argument("--master", required=True)
    options = parser.parse_args()
    os.environ["OPENBLAS_NUM_THREADS"] = "1"  # of each task, as of each rank
    memory_gb = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 3e9
    spark = started(native=options.native, master=options.master, memory_gb=int(memory_gb))
    work = WORKS[options.what](spark, *options.sizes)
    if options.asked:
        print(json.dumps(None), flush=True)
        for line in sys.stdin:
            print(json.dumps(timed(partial(work, *map(int, line.split())))), flush=True)
        spark.stop()
        return

    def over() -> None:
        print(json.dumps(None), flush=True)
        os._exit(0)  # a thread cannot end the others; the JVM ends with this process

    timer = threading.Timer(options.limit, over)
    timer.daemon = True
    timer.start()
    for _ in range(options.runs):
        print(json.dumps(timed(work)), flush=True)
    timer.cancel()
    spark.stop()


if __name__ == "__main__":
    main()
