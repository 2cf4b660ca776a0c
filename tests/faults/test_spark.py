"""An executor, a rank or Spark's JVM dies while Spark sends: told, and nothing of it left."""

# ruff: noqa: PLC0415 - without Spark this file is skipped, and what runs in executors imports
# for itself.

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from alchemist_ray.errors import TransferError
from alchemist_ray.gang.connection import NEWS_S as LOOKS_S
from tests.faults.conftest import NEWS_S, Call, Gang, Told, kill, record
from tests.support import traces
from tests.support.sparks import SPARK, Sparks, sparks

__all__ = ["sparks"]

pytestmark = SPARK

AGAIN_S = 60.0  # Spark has to notice, and runs the task once more


def slow(spark: Any, told: Path, seconds: float) -> Any:
    """A frame that takes its time in the middle of each partition, and says who computes it."""

    def rows(batches: Any) -> Any:
        import os
        import time

        waits = (told / "go").exists()  # not yet when rows are counted
        for batch in batches:
            half = batch.num_rows // 2
            yield batch.slice(0, half)
            if waits:
                (told / f"pid{os.getpid()}").touch()
                time.sleep(seconds)
                waits = False
            yield batch.slice(half)

    return spark.range(0, 400_000, 1, 2).mapInArrow(rows, "id long")


def counted(gang: Gang, frame: Any, told: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The frame, planned: its partitions have been counted, and the next that looks is sending."""
    from alchemist_ray.transfer import sources

    plan = sources.source_for(frame, None, gang.session.connection)
    (told / "go").touch()
    monkeypatch.setattr(sources, "plan", lambda *_: plan)
    return plan


def sending(told: Path) -> Iterator[int]:
    """The Python workers that are sending."""
    assert traces.wait_until(lambda: any(told.glob("pid*")), 60.0) is not None
    time.sleep(0.3)
    return (int(path.name[3:]) for path in told.glob("pid*"))


def struck(gang: Gang, blow: Callable[[], Any], told: Path) -> Told:
    """Let the blow fall when Spark is sending; seconds are counted from the blow."""
    under = Call(lambda: gang.session.send_matrix(np.ones((2, 2))))
    next(sending(told))
    assert under.under_way, "the transfer was over before the blow"
    start = time.monotonic()
    blow()
    return under.told(start)


def broken(gang: Gang, fault: str, told: Told, limit_s: float, *words: str) -> None:
    """The transfer alone is broken, and it can be done again."""
    assert isinstance(told.error, TransferError), repr(told.error)
    for word in words:
        assert word in str(told.error), str(told.error)
    assert told.seconds < limit_s
    record(fault, told.seconds, None, told.error)
    assert len(gang.session.list_matrices()) == 1  # the gang's own
    assert gang.works()


def test_an_executor_killed_halfway_through_a_send(
    gang: Gang, sparks: Sparks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spark = sparks.on_ray()
    counted(gang, slow(spark, tmp_path, 4.0), tmp_path, monkeypatch)

    def blow() -> None:
        worker = next(sending(tmp_path))
        executor = traces.parent_of(traces.parent_of(worker))
        assert "java" in traces.command_line(executor)
        kill(executor)

    told = struck(gang, blow, tmp_path)
    monkeypatch.undo()
    broken(gang, "kill -9 of a Spark executor halfway", told, AGAIN_S, "again", "executor")
    A = gang.session.send_matrix(spark.range(0, 1000, 1, 4))
    np.testing.assert_array_equal(A.fetch()[:, 0], np.arange(1000))
    A.free()
    sparks.stop()


def test_a_rank_killed_halfway_through_sparks_send(
    gang: Gang, sparks: Sparks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spark = sparks.local()
    counted(gang, slow(spark, tmp_path, 20.0), tmp_path, monkeypatch)
    told = struck(gang, lambda: kill(gang.ranks[1]), tmp_path)
    monkeypatch.undo()
    gang.lost("kill -9 of a rank halfway through Spark's send", told, "rank 1", "SIGKILL")


def test_a_python_worker_killed_halfway(
    gang: Gang, sparks: Sparks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spark = sparks.local()
    counted(gang, slow(spark, tmp_path, 6.0), tmp_path, monkeypatch)
    told = struck(gang, lambda: [kill(pid) for pid in sending(tmp_path)], tmp_path)
    monkeypatch.undo()
    broken(gang, "kill -9 of Spark's Python workers", told, AGAIN_S, "Python worker")


def test_sparks_jvm_killed_halfway(
    gang: Gang, sparks: Sparks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pyspark import SparkContext

    spark = sparks.local()
    counted(gang, slow(spark, tmp_path, 6.0), tmp_path, monkeypatch)
    jvm = next(
        pid
        for pid, line in traces.processes().items()
        if "java" in line.partition(" ")[0] and traces.parent_of(pid) == os.getpid()
    )
    told = struck(gang, lambda: kill(jvm), tmp_path)
    monkeypatch.undo()
    limit_s = NEWS_S + LOOKS_S + 2.0
    broken(gang, "kill -9 of Spark's JVM halfway", told, limit_s, "JVM")
    sparks.stop()
    assert SparkContext._gateway is None
    A = gang.session.send_matrix(sparks.local().range(5))  # and another may start
    assert A.shape == (5, 1)
    A.free()
