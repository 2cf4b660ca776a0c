"""The rows of Spark in the table of clients, for a local Spark on the same cores.

`add_rows` is called by `clients.py`. Everything sent is cached in the JVM first; NumPy's rate is
that of the same bytes in the same session, measured alternately.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from alchemist_ray import AlchemistSession
from benchmarks.harness import Peer, Report, in_turns, timed

TALL, WIDE, SQUARE = (200_000, 100), (2_000, 10_000), (40_000, 500)  # 160 MB each
FEW, SOME, MANY = 2, 20, 200
LAYOUTS = ("VC_STAR", "MC_MR", "STAR_VC")
ROUNDS = 3
SVD, RANK, N = (100_000, 500), 20, 4000
BLOCK = 1000
# Seconds, of Spark's own rows in linalg.json: what MLlib takes end to end.
THEIRS = {"svd": f"truncated_svd {SVD[0]} x {SVD[1]}, rank {RANK}", "multiply": f"matmul {N} x {N}"}


@contextmanager
def local_spark() -> Iterator[Any]:
    """Spark in one JVM on this machine's cores."""
    from pyspark.sql import SparkSession

    from alchemist_ray.clients.spark import stop_spark

    os.environ["PYSPARK_PYTHON"] = os.environ["PYSPARK_DRIVER_PYTHON"] = sys.executable
    builder = SparkSession.builder.master(f"local[{os.cpu_count()}]")
    for key, value in {
        "spark.driver.memory": "6g",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.driver.host": "127.0.0.1",
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.log.level": "ERROR",
    }.items():
        builder = builder.config(key, value)
    spark = builder.getOrCreate()
    try:
        yield spark
    finally:
        stop_spark()


@contextmanager
def in_jvm(spark: Any, handle: Any, partitions: int) -> Iterator[Any]:
    """A matrix as an IndexedRowMatrix whose rows lie in the JVM's memory."""
    from pyspark.mllib.common import callMLlibFunc
    from pyspark.mllib.linalg.distributed import IndexedRowMatrix

    lazy = handle.to_spark(spark, kind="IndexedRowMatrix")
    frame = callMLlibFunc("getIndexedRows", lazy._java_matrix_wrapper._java_model)
    frame = frame.repartitionByRange(partitions, "index").sortWithinPartitions("index").cache()
    frame.count()
    m, n = handle.shape
    try:
        yield IndexedRowMatrix(callMLlibFunc("createIndexedRowMatrix", frame, m, n), m, n)
    finally:
        frame.unpersist(True)


def add_rows(report: Report, als: AlchemistSession) -> None:
    """Send and fetch, layouts, shapes, partitions; then MLlib's own beside the drop-ins."""
    with local_spark() as spark:
        _transfers(report, als, spark)
        _drop_ins(report, als, spark)
    _two_ways_on_ray(report, als)


def _sending(als: AlchemistSession, source: Any, layout: str = "VC_STAR") -> Callable[[], None]:
    return lambda: als.send_matrix(source, layout=layout).free()


def _draining(matrix: Any) -> Callable[[], None]:
    """The time that Spark alone takes to bring the rows into its Python workers."""
    from pyspark.mllib.common import callMLlibFunc

    def count(batches: Iterator[Any]) -> Iterator[Any]:
        import pyarrow as pa

        yield pa.RecordBatch.from_pydict({"rows": [sum(batch.num_rows for batch in batches)]})

    frame = callMLlibFunc("getIndexedRows", matrix._java_matrix_wrapper._java_model)
    return lambda: frame.mapInArrow(count, "rows long").collect()


def _transfers(report: Report, als: AlchemistSession, spark: Any) -> None:
    from pyspark.sql import functions as F

    random = np.random.default_rng(0)
    relative: dict[str, float] = {}
    for name, shape in {"square": SQUARE, "tall": TALL, "wide": WIDE}.items():
        A = random.random(shape)
        handle = als.send_matrix(A)
        with in_jvm(spark, handle, FEW) as few, in_jvm(spark, handle, MANY) as many:
            works = {"numpy": _sending(als, A), "few": _sending(als, few)}
            if name == "square":
                works["many"] = _sending(als, many)
                works |= {layout: _sending(als, few, layout) for layout in LAYOUTS}
                works["drain"] = _draining(few)
                works["fetch"] = handle.fetch
                works["to_spark"] = lambda h=handle: (
                    h.to_spark(spark).select(F.count("c0")).collect()
                )
            times = in_turns(works, ROUNDS)
        handle.free()
        relative[name] = times["few"]
        rate = A.nbytes / times["few"] / 1e6
        if name == "square":
            _targets(report, times, A.nbytes)
        else:
            report.add(
                f"Spark → gang, {name} {shape[0]} x {shape[1]}", times["numpy"] / times["few"], 0.3,
                "x NumPy's rate", detail=f"{rate:.0f} MB/s",
            )  # fmt: skip
    report.notes.append(
        "Times relative to the tall matrix, the same bytes. Spark here: wide "
        f"{relative['wide'] / relative['tall']:.2f}; Alchemist 2018 (Tables II and III, 8 "
        "receiving nodes): wide about 0.7, with 40 to 56 nodes 0.2."
    )


def _targets(report: Report, times: dict[str, float], nbytes: int) -> None:
    rates = {name: nbytes / times[name] / 1e6 for name in ("few", "numpy", "drain")}
    report.add(
        "Spark → gang, VC_STAR", times["numpy"] / times["few"], 0.3, "x NumPy's rate",
        detail=f"{rates['few']:.0f} MB/s; NumPy {rates['numpy']:.0f}, a mapInArrow that only "
        f"counts rows {rates['drain']:.0f}",
    )  # fmt: skip
    report.add(
        "gang → Spark DataFrame, counted", times["fetch"] / times["to_spark"], 0.3,
        "x NumPy's rate", detail=f"{nbytes / times['to_spark'] / 1e6:.0f} MB/s",
    )  # fmt: skip
    report.add(
        f"Spark, {MANY} partitions / {FEW}", times["many"] / times["few"], 1.5, "x", at_most=True
    )
    layouts = {layout: times[layout] for layout in LAYOUTS}
    fastest = min(layouts.values())
    report.add(
        "Spark, slowest / fastest layout", max(layouts.values()) / fastest, 2, "x", at_most=True,
        detail=", ".join(f"{layout} {took / fastest:.2f}" for layout, took in layouts.items())
        + "; 2019 (Fig. 5): VC_STAR fastest, MC_MR little slower, STAR_VC slowest",
    )  # fmt: skip


def _two_ways_on_ray(report: Report, als: AlchemistSession) -> None:
    """A DataFrame in RayDP's executors: pushed by them, and by way of Ray's object store."""
    import ray.data

    from alchemist_ray.clients.spark import init_spark, stop_spark

    m, n = TALL
    A = np.random.default_rng(3).random((m, n))
    handle = als.send_matrix(A)
    ray.data.DataContext.get_current().enable_progress_bars = False
    quiet = {"spark.log.level": "ERROR", "spark.ui.showConsoleProgress": "false"}
    spark = init_spark("clients", FEW, 1, "2GB", configs=quiet)
    try:
        for parts in (FEW, SOME):
            frame = handle.to_spark(spark).repartition(parts).cache()
            frame.count()

            def by_store(frame: Any = frame) -> None:
                als.send_matrix(ray.data.from_spark(frame)).free()

            works = {"numpy": _sending(als, A), "push": _sending(als, frame), "store": by_store}
            times = in_turns(works, ROUNDS)
            frame.unpersist(True)
            for way, told in (("push", "pushed by executors"), ("store", "by from_spark")):
                report.add(
                    f"Spark on Ray → gang, {n} columns, {parts} parts, {told}",
                    times["numpy"] / times[way], 0.3, "x NumPy's rate",
                    detail=f"{A.nbytes / times[way] / 1e6:.0f} MB/s",
                )  # fmt: skip
    finally:
        stop_spark()
        handle.free()


def _drop_ins(report: Report, als: AlchemistSession, spark: Any) -> None:
    """From matrices cached in the JVM to results there, as MLlib's own in `spark_mllib.py`."""
    from alchemist_ray.clients.spark import mllib
    from benchmarks.linalg import _mllib
    from benchmarks.spark_mllib import PARTS, decaying

    rows, columns = SVD
    A = als.send_matrix(np.vstack([decaying(rows // PARTS, columns, k) for k in range(PARTS)]))
    with in_jvm(spark, A, PARTS) as matrix:
        A.free()

        def svd() -> None:
            found = mllib.computeSVD(matrix, RANK, True, session=als)
            found.U._java_matrix_wrapper._java_model.rows().count()

        ours = min(timed(svd) for _ in range(2))
    _beside(report, "computeSVD", THEIRS["svd"], ours, _mllib("svd", *SVD, RANK))
    B = als.send_matrix(np.random.default_rng(2).random((N, N)))
    left = B.to_spark(spark, kind="IndexedRowMatrix").toBlockMatrix(BLOCK, BLOCK).cache()
    left._java_matrix_wrapper._java_model.blocks().count()
    B.free()

    def multiply() -> None:
        C = mllib.multiply(left, left, session=als)
        C._java_matrix_wrapper._java_model.blocks().count()

    ours = min(timed(multiply) for _ in range(2))
    _beside(report, "multiply", THEIRS["multiply"], ours, _mllib("multiply", N))


def _beside(
    report: Report, name: str, operation: str, ours_s: float, theirs: dict[str, float] | str
) -> None:
    if isinstance(theirs, str):
        report.notes.append(f"MLlib's {name} is not in this table: {theirs}")
        return
    end_s = theirs["end_to_end_s"]
    report.compare(Peer(operation, f"drop-in {name}", ours_s, ours_s, 1.0))
    report.compare(Peer(operation, f"MLlib {name}", theirs["compute_s"], end_s, end_s / ours_s))
    report.add(
        f"drop-in {name}, end to end", end_s / ours_s, 20, "x as quick as MLlib",
        detail=f"ours {ours_s:.2f} s, MLlib {end_s:.1f} s",
    )  # fmt: skip
