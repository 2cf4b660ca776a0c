"""Spark MLlib on the same cores, as a program of its own: prints one JSON object.

    python -m benchmarks.spark_mllib multiply 4000
    python -m benchmarks.spark_mllib svd 100000 500 20
    python -m benchmarks.spark_mllib svd 100000 500 20 --native

Spark makes its own data, row by row in its own workers; from there on everything counts. With
``--native`` MLlib computes with this machine's BLAS through dev.ludovic.netlib, as a tuned Spark
does; without, with netlib's Java.
"""

from __future__ import annotations

import ctypes.util
import json
import os
import sys
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

BLOCK = 1000
DECAY = 0.9
PARTS = 8
NATIVE = "dev.ludovic.netlib.blas.nativeLib"


def started(*, native: bool, master: str = "local[2]", memory_gb: int = 8) -> Any:
    """Spark, on two cores of this machine; `native`: with its BLAS, or the program ends."""
    library = "none"  # netlib would take any BLAS that it finds
    if native:
        found = ctypes.util.find_library("openblas") or ctypes.util.find_library("blas")
        if found is None:
            sys.exit("there is no native BLAS on this machine (apt-get install libopenblas0)")
        library = found
    os.environ["PYSPARK_PYTHON"] = os.environ["PYSPARK_DRIVER_PYTHON"] = sys.executable
    from pyspark.sql import SparkSession

    spark = (
        SparkSession.builder.master(master)
        .config("spark.driver.memory", f"{memory_gb}g")
        .config("spark.driver.maxResultSize", "4g")
        .config("spark.driver.bindAddress", "127.0.0.1")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.driver.extraJavaOptions", f"-D{NATIVE}={library}")
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.log.level", "ERROR")
        .getOrCreate()
    )
    if native:  # it raises where the library cannot be used
        spark._jvm.dev.ludovic.netlib.blas.NativeBLAS.getInstance()
    return spark


def main(what: str, *sizes: int, native: bool) -> None:
    spark = started(native=native)
    told = {"multiply": multiply, "svd": svd}[what](spark, *sizes)
    print(json.dumps(told), flush=True)
    spark.stop()


def multiply(spark: Any, n: int) -> dict[str, float]:
    """Rows to BlockMatrix, BlockMatrix.multiply, to a local matrix."""
    from pyspark.mllib.linalg.distributed import IndexedRow, IndexedRowMatrix

    def row(i: int) -> Any:
        return IndexedRow(i, np.random.default_rng(i).random(n))

    def made() -> Any:
        rows = spark.sparkContext.parallelize(range(n), 8).map(row)
        return IndexedRowMatrix(rows).toBlockMatrix(BLOCK, BLOCK).cache()

    start = time.perf_counter()
    A, B = made(), made()
    A.blocks.count(), B.blocks.count()
    begun = time.perf_counter()
    C = A.multiply(B).cache()
    C.blocks.count()
    computed = time.perf_counter() - begun
    C.toLocalMatrix().toArray()
    return {"compute_s": computed, "end_to_end_s": time.perf_counter() - start}


def decaying(m: int, n: int, part: int) -> np.ndarray[Any, Any]:
    """Some of the rows of a matrix whose singular values decay: m rows of part `part`."""
    mix, _ = np.linalg.qr(np.random.default_rng(0).standard_normal((n, n)))
    return (np.random.default_rng(part).standard_normal((m, n)) * DECAY ** np.arange(n)) @ mix


def svd(spark: Any, m: int, n: int, k: int) -> dict[str, float]:
    """RowMatrix.computeSVD with U, which is counted in the JVM."""
    from pyspark.mllib.linalg import Vectors
    from pyspark.mllib.linalg.distributed import RowMatrix

    def rows(part: int) -> Iterator[Any]:
        return map(Vectors.dense, decaying(m // PARTS, n, part))

    data = spark.sparkContext.parallelize(range(PARTS), PARTS).flatMap(rows).cache()
    data.count()
    start = time.perf_counter()
    found = RowMatrix(data, m, n).computeSVD(k, computeU=True)
    found.U._java_matrix_wrapper._java_model.rows().count()
    took = time.perf_counter() - start
    return {"compute_s": took, "end_to_end_s": took}


if __name__ == "__main__":
    words = [word for word in sys.argv[1:] if word != "--native"]
    main(words[0], *map(int, words[1:]), native="--native" in sys.argv)
