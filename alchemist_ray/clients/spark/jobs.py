"""Spark's jobs, watched: by a thread of this process, beside the gang that they serve."""

from __future__ import annotations

import contextlib
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

from py4j.protocol import Py4JError
from pyspark import InheritableThread
from pyspark.errors import PySparkException

from alchemist_ray.errors import TransferError

T = TypeVar("T")

WATCH_S = 0.5  # how often the gang is asked whether it is there
LAST_S = 20.0  # what a cancelled job may take to end
WORDS = 2000  # characters of what Spark says

_settings = threading.Lock()


def run(spark: Any, what: str, action: Callable[[], T], alive: Callable[[], object]) -> T:
    """Run what starts a Spark job, and cancel the job if it is not wanted any more.

    Parameters
    ----------
    spark : SparkSession
    what : str
        For Spark's UI and for errors.
    action : callable
        Starts the job and waits for it.
    alive : callable
        Asked twice a second; what it raises ends the job. So does Ctrl-C.

    Raises
    ------
    TransferError
        If the job fails, or Spark is gone.
    """
    context = spark.sparkContext
    group = f"alchemist-{uuid.uuid4().hex}"
    result: list[T] = []
    errors: list[BaseException] = []

    def work() -> None:
        try:
            context.setJobGroup(group, f"Alchemist: {what}", interruptOnCancel=True)
            result.append(action())
        except BaseException as error:
            errors.append(error)

    thread = InheritableThread(target=work, daemon=True)
    thread.start()
    try:
        while thread.is_alive():
            thread.join(WATCH_S)
            if thread.is_alive():
                alive()
    except BaseException:
        with contextlib.suppress(Exception):  # Spark may be gone
            context.cancelJobGroup(group)
        thread.join(LAST_S)
        raise
    if errors:
        raise _told(what, errors[0]) from errors[0]
    return result[0]


def _told(what: str, error: BaseException) -> BaseException:
    """The error of the tree for what came of a job; the user's own pass as they are."""
    if not isinstance(error, PySparkException | Py4JError | OSError):
        return error
    java = getattr(error, "java_exception", None)
    if java is not None:
        with contextlib.suppress(Py4JError, OSError):
            return TransferError(f"Spark could not {what}: {_words(java.getMessage())}")
    if isinstance(error, PySparkException):
        return TransferError(f"Spark could not {what}: {_words(str(error))}")
    return TransferError(f"Spark could not {what}: its JVM does not answer; it has ended or died")


def _words(told: str | None) -> str:
    """What the JVM says, without the places in its code."""
    lines = (told or "it does not say why").partition("\nDriver stacktrace")[0].splitlines()
    return "\n".join(line for line in lines if not line.startswith("\tat "))[:WORDS]


@contextlib.contextmanager
def settings(spark: Any, wanted: Mapping[str, str]) -> Iterator[None]:
    """Settings of the Spark session for a moment; other jobs of the session run with them too."""
    with _settings:
        before = {key: spark.conf.get(key, None) for key in wanted}
        try:
            for key, value in wanted.items():
                spark.conf.set(key, value)
            yield
        finally:
            with contextlib.suppress(Py4JError, OSError):
                for key, value in before.items():
                    if value is None:
                        spark.conf.unset(key)
                    else:
                        spark.conf.set(key, value)
