"""Executors that are lost, leave, or repeat a task: the right matrix or an error.

A speculative copy of a task has an attempt number above 0, as a retry has. Spark starts none on the
host of the first, so that one machine cannot show one.
"""

# ruff: noqa: PLC0415 - what runs in executors imports for itself

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from alchemist_ray import AlchemistSession
from tests.support import traces
from tests.support.sparks import SPARK, Sparks

pytest.importorskip("pyspark", reason="needs alchemist-on-ray[spark]")

from pyspark import cloudpickle

pytestmark = SPARK

ROWS, PARTS, COLS = 400_000, 2, 16  # of several blocks, so that a first attempt writes some
Batches = Iterator[Any]


@pytest.fixture(scope="module")
def spark(sparks: Sparks) -> Iterator[Any]:
    """Two executors in JVMs of their own, which get the functions of this file by value."""
    module = sys.modules[__name__]
    cloudpickle.register_pickle_by_value(module)
    yield sparks.executors()
    cloudpickle.unregister_pickle_by_value(module)
    sparks.stop()


def source(spark: Any, counter: Path, act: Callable[[], None]) -> Any:
    """Columns of 0, 1, ..., whose first partition acts once, in the middle of being sent."""

    def rows(batches: Batches) -> Batches:
        for batch in batches:
            for start in range(0, batch.num_rows, 1000):
                part = batch.slice(start, 1000)
                yield part
                if part.column(0)[-1].as_py() == ROWS // PARTS - 1:  # the end of the first
                    with counter.open("a") as file:
                        file.write("x")
                    if counter.stat().st_size == 2:  # the first time it was counted
                        act()

    frame = spark.range(0, ROWS, 1, PARTS).mapInArrow(rows, "id long")
    return frame.selectExpr(*(f"id c{j}" for j in range(COLS)))


def check(found: np.ndarray[Any, Any]) -> None:
    np.testing.assert_array_equal(found, np.repeat(np.arange(ROWS)[:, None], COLS, axis=1))


def kill_executor() -> None:
    """End the JVM of this Python worker."""
    import os
    import signal
    import time

    pid = os.getpid()
    while "java" not in os.readlink(f"/proc/{pid}/exe"):
        with open(f"/proc/{pid}/stat") as file:
            pid = int(file.read().rpartition(")")[2].split()[1])
    os.kill(pid, signal.SIGKILL)
    time.sleep(60)


def fail() -> None:
    raise OSError("the disk has a bad day")


@pytest.mark.parametrize("act", [kill_executor, fail])
def test_a_repeated_task_writes_nothing(
    als: AlchemistSession, spark: Any, tmp_path: Path, act: Callable[[], None]
) -> None:
    """An executor that is killed in the middle, and a source that fails once: all is sent again."""
    check(als.send_matrix(source(spark, tmp_path / "times", act)).fetch())


def test_a_decommissioned_executor_completes_its_task(
    als: AlchemistSession, spark: Any, tmp_path: Path
) -> None:
    waiting, leaving = tmp_path / "waiting", tmp_path / "leaving"

    def wait() -> None:
        import time

        waiting.touch()
        deadline = time.monotonic() + 60
        while not leaving.exists():
            assert time.monotonic() < deadline
            time.sleep(0.05)

    frame = source(spark, tmp_path / "times", wait)
    backend = spark.sparkContext._jsc.sc().schedulerBackend()
    info = spark._jvm.org.apache.spark.scheduler.ExecutorDecommissionInfo(
        "a test", spark._jvm.scala.Option.empty()
    )
    gone: list[bool] = []

    def decommission() -> None:
        if traces.wait_until(waiting.exists, 150.0, 0.05) is not None:
            for number in range(10):
                gone.append(backend.decommissionExecutor(str(number), info, True, False))
        leaving.touch()

    thread = threading.Thread(target=decommission)
    thread.start()
    try:
        A = als.send_matrix(frame)
    finally:
        thread.join()
    assert any(gone)
    check(A.fetch())
