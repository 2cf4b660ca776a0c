"""An executor, a rank or Spark's JVM is killed while Spark sends: an error, nothing left."""

# ruff: noqa: PLC0415 - what runs in executors imports for itself

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from alchemist_ray.errors import TransferError
from alchemist_ray.transfer.watching import FAILURE_NEWS_S
from tests.faults.conftest import ERROR_LIMIT_S, Call, Gang, Outcome, kill, record
from tests.support import traces
from tests.support.sparks import SPARK, Sparks, sparks

__all__ = ["sparks"]

pytestmark = SPARK

AGAIN_S = 60.0  # Spark has to notice, and retries the task


def slow(spark: Any, folder: Path, seconds: float) -> Any:
    """Return a frame whose partitions pause halfway when they are sent.

    The first pass over a partition is the one that counts its rows; it does not pause. Later
    passes leave the process id of their Python worker in `folder`.
    """

    def rows(batches: Any) -> Any:
        import os
        import time

        from pyspark import TaskContext

        counted = folder / f"counted{TaskContext.get().partitionId()}"
        pauses = counted.exists()
        for batch in batches:
            half = batch.num_rows // 2
            yield batch.slice(0, half)
            if pauses:
                (folder / f"pid{os.getpid()}").touch()
                time.sleep(seconds)
                pauses = False
            yield batch.slice(half)
        counted.touch()

    return spark.range(0, 400_000, 1, 2).mapInArrow(rows, "id long")


def sending(outcome: Path) -> Iterator[int]:
    """Wait until Python workers are sending; yield their process ids."""
    assert traces.wait_until(lambda: any(outcome.glob("pid*")), 60.0) is not None
    time.sleep(0.3)
    return (int(path.name[3:]) for path in outcome.glob("pid*"))


def injected(gang: Gang, frame: Any, cause: Callable[[], Any], outcome: Path) -> Outcome:
    """Cause the fault while Spark sends; the outcome counts seconds from the fault."""
    under = Call(lambda: gang.session.send_matrix(frame))
    next(sending(outcome))
    assert under.under_way, "the transfer ended before the fault"
    start = traces.clock()
    cause()
    return under.outcome(start, AGAIN_S)


def broken(gang: Gang, fault: str, outcome: Outcome, limit_s: float, *words: str) -> None:
    """Check that only the transfer has failed and that the gang still works."""
    assert isinstance(outcome.error, TransferError), repr(outcome.error)
    for word in words:
        assert word in str(outcome.error), str(outcome.error)
    assert outcome.seconds < limit_s
    record(fault, outcome.seconds, None, outcome.error)
    assert len(gang.session.list_matrices()) == 1  # the gang's own
    assert gang.works()


def test_an_executor_killed_halfway_through_a_send(
    gang: Gang, sparks: Sparks, tmp_path: Path
) -> None:
    spark = sparks.on_ray()
    frame = slow(spark, tmp_path, 4.0)

    def cause() -> None:
        worker = next(sending(tmp_path))
        executor = traces.parent_of(traces.parent_of(worker))
        assert "java" in traces.command_line(executor)
        kill(executor)

    outcome = injected(gang, frame, cause, tmp_path)
    assert outcome.error is None, outcome.error  # the second attempt of its task, then all again
    np.testing.assert_array_equal(outcome.result.fetch()[:, 0], np.arange(400_000))
    outcome.result.free()
    assert len(gang.session.list_matrices()) == 1  # the gang's own
    assert gang.works()
    A = gang.session.send_matrix(spark.range(0, 1000, 1, 4))
    np.testing.assert_array_equal(A.fetch()[:, 0], np.arange(1000))
    A.free()
    sparks.stop()


def test_a_rank_killed_halfway_through_sparks_send(
    gang: Gang, sparks: Sparks, tmp_path: Path
) -> None:
    spark = sparks.local()
    frame = slow(spark, tmp_path, 8.0)
    outcome = injected(gang, frame, lambda: kill(gang.ranks[1]), tmp_path)
    assert outcome.error is None, outcome.error
    np.testing.assert_array_equal(outcome.result.fetch()[:, 0], np.arange(400_000))
    gang.goes_on("kill -9 of a rank halfway through Spark's send", outcome.seconds)


def test_a_python_worker_killed_halfway(gang: Gang, sparks: Sparks, tmp_path: Path) -> None:
    spark = sparks.local()
    frame = slow(spark, tmp_path, 6.0)
    outcome = injected(gang, frame, lambda: [kill(pid) for pid in sending(tmp_path)], tmp_path)
    broken(gang, "kill -9 of Spark's Python workers", outcome, AGAIN_S, "Python worker")


def test_sparks_jvm_killed_halfway(gang: Gang, sparks: Sparks, tmp_path: Path) -> None:
    from pyspark import SparkContext

    spark = sparks.local()
    frame = slow(spark, tmp_path, 6.0)
    jvm = next(
        pid
        for pid, line in traces.processes().items()
        if "java" in line.partition(" ")[0] and traces.parent_of(pid) == os.getpid()
    )
    outcome = injected(gang, frame, lambda: kill(jvm), tmp_path)
    limit_s = ERROR_LIMIT_S + FAILURE_NEWS_S + 2.0
    broken(gang, "kill -9 of Spark's JVM halfway", outcome, limit_s, "JVM")
    sparks.stop()
    assert SparkContext._gateway is None
    A = gang.session.send_matrix(sparks.local().range(5))  # another Spark may start
    assert A.shape == (5, 1)
    A.free()
