"""Spark: to a gang and back, on the same cores, local and on Ray; MLlib beside the drop-ins.

Everything sent is cached in the JVM first; NumPy's rate is that of the same bytes in the same
session, measured alternately.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np

from alchemist_ray import AlchemistSession
from benchmarks.harness import Report, alone, in_turns, timed
from benchmarks.spark_mllib import BLOCK, PARTS, decaying, started

SHAPES = {100: (200_000, 100), 500: (40_000, 500)}  # 160 MB each
FEW, MANY = 2, 200
RANKS = 4
LAYOUTS = ("VC_STAR", "MC_MR", "STAR_VC")
ROUNDS = 5
SVD, RANK, N = (100_000, 500), 20, 4000
# Seconds, of Spark's own rows in linalg.json: what MLlib takes end to end.
THEIRS = {"svd": f"truncated_svd {SVD[0]} x {SVD[1]}, rank {RANK}", "multiply": f"matmul {N} x {N}"}


@contextmanager
def local_spark() -> Iterator[Any]:
    """Spark in one JVM on this machine's cores."""
    from alchemist_ray.clients.spark import stop_spark

    try:
        yield started(native=False, master=f"local[{os.cpu_count()}]", memory_gb=6)
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


def run() -> Report:
    """Transfers of a local Spark and of Spark on Ray; MLlib and drop-ins."""
    report = Report("spark")
    try:
        importlib.import_module("pyspark")
    except ImportError as error:
        print(f"Spark was not measured: {error}", flush=True)
        return report
    with local_spark() as spark:
        with AlchemistSession(RANKS, progress=False) as als:
            for columns in SHAPES:
                _transfers(report, als, spark, columns, "Spark")
            _layouts(report, als, spark)
        with AlchemistSession(RANKS, progress=False) as als:
            _drop_ins(report, als, spark)
    with AlchemistSession(RANKS, progress=False) as als:
        _on_ray(report, als)
    return report


def _sending(als: AlchemistSession, source: Any, layout: str = "VC_STAR") -> Callable[[], None]:
    return lambda: als.send_matrix(source, layout=layout).free()


@contextmanager
def cached_frame(spark: Any, handle: Any, partitions: int) -> Iterator[Any]:
    """The matrix as a DataFrame of columns, cached by Spark."""
    frame = handle.to_spark(spark).repartition(partitions).cache()
    frame.count()
    try:
        yield frame
    finally:
        frame.unpersist(True)


@contextmanager
def cached_rows(spark: Any, handle: Any, partitions: int) -> Iterator[Any]:
    """The matrix as a RowMatrix whose vectors are objects in the JVM."""
    from pyspark.mllib.linalg.distributed import RowMatrix

    lazy = handle.to_spark(spark, kind="RowMatrix")  # the JVM forgets its matrix with this object
    model = lazy._java_matrix_wrapper._java_model
    rows = model.rows().toJavaRDD().repartition(partitions).cache()
    rows.count()
    try:
        yield RowMatrix(spark._jvm.org.apache.spark.mllib.linalg.distributed.RowMatrix(rows.rdd()))
    finally:
        rows.unpersist(True)


def _scan(spark: Any, source: Any) -> Callable[[], None]:
    """The job of a send without sending: its tasks visit the same cached batches or vectors."""
    from alchemist_ray.clients.spark import jvm

    sender, cores = jvm.sender(spark), spark.sparkContext.defaultParallelism
    if hasattr(source, "_jdf"):
        rows = sender.rows(source._jdf, True)
    else:
        rows = sender.rows(source._java_matrix_wrapper._java_model.rows().toJavaRDD())

    def count() -> None:
        sender.forget(rows)
        sender.count(rows, cores)

    return count


def _transfers(report: Report, als: AlchemistSession, spark: Any, columns: int, where: str) -> None:
    """A DataFrame and a RowMatrix of few and of many partitions; back as both.

    On the way back Spark makes every row (a count of a DataFrame would fetch nothing): of the
    matrix, of one of 2 rows, and of its own cache. An empty job has as many tasks as partitions.
    """
    A = np.random.default_rng(0).random(SHAPES[columns])
    handle, tiny = als.send_matrix(A), als.send_matrix(A[:FEW])

    def make_rows(source: Any) -> None:
        if hasattr(source, "write"):
            source.write.format("noop").mode("overwrite").save()
        else:
            source._java_matrix_wrapper._java_model.rows().count()

    def back(from_: Any, kind: str) -> None:
        make_rows(from_.to_spark(spark, kind=kind))

    numbers = spark._jvm.java.util.Collections.nCopies(MANY, 0)
    empty = spark.sparkContext._jsc.parallelize(numbers, MANY)

    makers = {"DataFrame": cached_frame, "RowMatrix": cached_rows}
    for kind, cached in makers.items():
        with cached(spark, handle, FEW) as few, cached(spark, handle, MANY) as many:
            works: dict[str, Callable[[], object]] = {
                "numpy": _sending(als, A), "few": _sending(als, few), "many": _sending(als, many),
                "scan few": _scan(spark, few), "scan many": _scan(spark, many),
                "empty": empty.count, "fetch": handle.fetch, "back": partial(back, handle, kind),
                "tiny": partial(back, tiny, kind), "own": partial(make_rows, few),
            }  # fmt: skip
            times = in_turns(works, ROUNDS)
        name = f"{where} → gang, {kind}, {columns} columns"
        for parts, key in ((FEW, "few"), (MANY, "many")):
            report.add(
                f"{name}, {parts} partitions", times["numpy"] / times[key], 0.3, "x NumPy's rate",
                detail=f"{A.nbytes / times[key] / 1e6:.0f} MB/s; NumPy "
                f"{A.nbytes / times['numpy'] / 1e6:.0f}; {times[key]:.3f} s, the same job without "
                f"sending {times[f'scan {key}']:.3f} s",
            )  # fmt: skip
        report.add(
            f"{name}, {MANY} partitions / {FEW}", times["many"] / times["few"], 1.5, "x the time",
            at_most=True, detail=f"an empty job of {MANY} tasks {times['empty']:.3f} s",
        )  # fmt: skip
        report.add(
            f"gang → {where}, {kind}, {columns} columns, every row", times["fetch"] / times["back"],
            0.3, "x NumPy's rate",
            detail=f"{A.nbytes / times['back'] / 1e6:.0f} MB/s: {times['back']:.3f} s, of which a "
            f"matrix of {FEW} rows takes {times['tiny']:.3f} s; Spark alone, of its own cache, "
            f"{times['own']:.3f} s",
        )  # fmt: skip
    handle.free()
    tiny.free()


def _layouts(report: Report, als: AlchemistSession, spark: Any) -> None:
    handle = als.send_matrix(np.random.default_rng(0).random(SHAPES[500]))
    with cached_rows(spark, handle, FEW) as rows:
        works = {layout: _sending(als, rows, layout) for layout in LAYOUTS}
        times = in_turns(works, ROUNDS)
    handle.free()
    fastest = min(times.values())
    report.add(
        "Spark, slowest / fastest layout", max(times.values()) / fastest, 2, "x", at_most=True,
        detail=", ".join(f"{layout} {took / fastest:.2f}" for layout, took in times.items())
        + "; 2019, VI-C: VC_STAR fastest, MC_MR little slower, STAR_VC slowest",
    )  # fmt: skip


def _on_ray(report: Report, als: AlchemistSession) -> None:
    """The same in RayDP's executors."""
    from alchemist_ray.clients.spark import init_spark, stop_spark

    quiet = {"spark.log.level": "ERROR", "spark.ui.showConsoleProgress": "false"}
    spark = init_spark("clients", FEW, 1, "2GB", configs=quiet)
    try:
        for columns in SHAPES:
            _transfers(report, als, spark, columns, "Spark on Ray")
    finally:
        stop_spark()


def _drop_ins(report: Report, als: AlchemistSession, spark: Any) -> None:
    """From matrices cached in the JVM to results there, as MLlib's own in `spark_mllib.py`."""
    from alchemist_ray.clients.spark import mllib

    rows, columns = SVD
    A = als.send_matrix(np.vstack([decaying(rows // PARTS, columns, k) for k in range(PARTS)]))
    with in_jvm(spark, A, PARTS) as matrix:
        A.free()

        def svd() -> None:
            found = mllib.computeSVD(matrix, RANK, True, session=als)
            found.U._java_matrix_wrapper._java_model.rows().count()

        ours = min(timed(svd) for _ in range(2))
    _beside(report, "computeSVD", THEIRS["svd"], ours, ["svd", *SVD, RANK])
    B = als.send_matrix(np.random.default_rng(2).random((N, N)))
    left = B.to_spark(spark, kind="IndexedRowMatrix").toBlockMatrix(BLOCK, BLOCK).cache()
    left._java_matrix_wrapper._java_model.blocks().count()
    B.free()

    def multiply() -> None:
        C = mllib.multiply(left, left, session=als)
        C._java_matrix_wrapper._java_model.blocks().count()

    ours = min(timed(multiply) for _ in range(2))
    _beside(report, "multiply", THEIRS["multiply"], ours, ["multiply", N])


def _beside(report: Report, name: str, operation: str, ours_s: float, command: list[Any]) -> None:
    """MLlib with netlib's Java, and tuned: with this machine's BLAS."""
    from benchmarks.linalg import mllib as spark_alone

    report.compare(operation, f"drop-in {name}", ours_s)
    for who, more in (("MLlib", []), ("MLlib with native BLAS", ["--native"])):
        theirs = spark_alone(*command, *more)
        if isinstance(theirs, str):
            report.notes.append(f"{who}'s {name} is not in this table: {theirs}")
            continue
        end_s = theirs["end_to_end_s"]
        report.compare(operation, f"{who} {name}", theirs["compute_s"], end_s)
        report.add(
            f"drop-in {name} against {who}, end to end", end_s / ours_s, 20, "x as quick",
            detail=f"ours {ours_s:.2f} s, {who} {end_s:.1f} s",
        )  # fmt: skip


if __name__ == "__main__":
    alone(run)
