"""Spark on Ray is started, used and stopped; errors when it cannot start."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from alchemist_ray import AlchemistSession
from alchemist_ray.errors import AlchemistError, LaunchError, ResourceError
from tests.alchemist_ray.clients.spark.conftest import X
from tests.alchemist_ray.session.test_alchemist_session import free_cpus
from tests.support import traces
from tests.support.sparks import SPARK, Sparks

pytest.importorskip("pyspark", reason="needs alchemist-on-ray[spark]")

from alchemist_ray.clients.spark import init_spark

pytestmark = SPARK


def javas() -> list[str]:
    return [line for line in traces.processes().values() if line.partition(" ")[0].endswith("java")]


def nothing_left(cpus: float) -> None:
    """Wait until no JVM of Spark runs and the CPUs are free again."""
    assert traces.wait_until(lambda: not javas(), 20.0, 0.1) is not None, javas()
    assert traces.wait_until(lambda: free_cpus() >= cpus, 20.0, 0.1) is not None


def test_an_impossible_start_is_refused_at_once(sparks: Sparks, tmp_path: Path) -> None:
    sparks.stop()
    cpus = free_cpus()
    start = traces.clock()
    with pytest.raises(ResourceError, match="need 65 CPUs"):
        init_spark("tests", 8, 8, "500MB")
    with pytest.raises(ResourceError, match="num_executors=0, executor_cores=1"):
        init_spark("tests", 0, 1, "500MB")
    path, home = os.environ["PATH"], os.environ.pop("JAVA_HOME", None)
    try:
        os.environ["PATH"] = str(tmp_path)
        with pytest.raises(LaunchError, match="there is no Java on the PATH"):
            init_spark("tests", 1, 1, "500MB")
        old = tmp_path / "java"
        old.write_text("#!/bin/sh\necho 'openjdk version \"1.7.0_80\"' >&2\n")
        old.chmod(0o755)
        os.environ["PATH"] = f"{tmp_path}:{path}"
        with pytest.raises(LaunchError, match=r"1\.7\.0_80.*needs Java 8, 11, 17"):
            init_spark("tests", 1, 1, "500MB")
    finally:
        os.environ["PATH"] = path
        if home is not None:
            os.environ["JAVA_HOME"] = home
    assert traces.clock() - start < 20
    nothing_left(cpus)


def test_stopping_spark_restores_pythons_ctrl_c(sparks: Sparks) -> None:
    """PySpark's handler, left behind, would raise an AttributeError."""
    sparks.stop()
    sparks.local()
    assert signal.getsignal(signal.SIGINT).__module__ == "pyspark.context"
    sparks.stop()
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


def test_a_start_that_takes_too_long_is_ended_and_cleaned_up(sparks: Sparks) -> None:
    sparks.stop()
    cpus = free_cpus()
    with pytest.raises(LaunchError, match=r"has not started in 1 s \(start_timeout_s\)"):
        init_spark("tests", 1, 1, "500MB", start_timeout_s=1.0)
    nothing_left(cpus)


def test_a_jvm_that_ends_at_the_start_is_reported(sparks: Sparks) -> None:
    sparks.stop()
    cpus = free_cpus()
    settings = {"spark.ray.raydp_app_master.extraJavaOptions": "-XX:NoSuchOption=1 -Xmx1k"}
    start = traces.clock()
    with pytest.raises(LaunchError, match="Spark did not start"):
        init_spark("tests", 1, 1, "500MB", configs=settings, start_timeout_s=120.0)
    assert traces.clock() - start < 110
    nothing_left(cpus)


def ctrl_c_cancels_jobs(spark: Any) -> None:
    """Ctrl-C cancels the jobs of a program that waits for Spark itself."""
    jobs = spark.sparkContext.statusTracker()

    def press() -> None:
        if traces.wait_until(jobs.getActiveJobsIds, 30.0, 0.1) is not None:
            os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=press)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        spark.sparkContext.parallelize(range(2), 2).foreach(lambda _: time.sleep(10))
    thread.join()
    assert traces.wait_until(lambda: not jobs.getActiveJobsIds(), 20.0, 0.1) is not None


def test_spark_on_ray_sends_receives_and_leaves_nothing(
    als: AlchemistSession, sparks: Sparks, tmp_path: Path
) -> None:
    """Matrices sent by executors outlive Spark."""
    sparks.stop()
    cpus = free_cpus()
    spark = sparks.on_ray()
    with pytest.raises(AlchemistError, match="already"):
        init_spark("again", 1, 1, "500MB")
    frame = spark.createDataFrame([tuple(map(float, row)) for row in X]).repartition(6).cache()
    want = np.array(frame.collect())
    A = als.send_matrix(frame)
    B = als.send_matrix(A.to_spark(spark, kind="IndexedRowMatrix"), layout="MC_MR")
    C = als.send_matrix(A.to_spark(spark, kind="BlockMatrix"))
    ctrl_c_cancels_jobs(spark)
    sparks.stop()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    for handle in (A, B, C):
        np.testing.assert_array_equal(handle.fetch(), want)
    nothing_left(cpus)
