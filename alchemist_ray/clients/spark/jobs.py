"""Runs Spark jobs while watching the gang; cancels a job that is no longer needed."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Any, TypeVar

from py4j.protocol import Py4JError
from pyspark import InheritableThread
from pyspark.errors import PySparkException

from alchemist_ray.errors import TransferError

T = TypeVar("T")

POLL_INTERVAL_S = 0.5  # between checks of the gang
CANCEL_TIMEOUT_S = 20.0  # for a cancelled job to end
MESSAGE_CHARS = 2000  # of a message from Spark


def run(spark: Any, what: str, action: Callable[[], T], alive: Callable[[], object]) -> T:
    """Run an action that starts a Spark job, and cancel the job when it is no longer needed.

    Parameters
    ----------
    spark : SparkSession
    what : str
        Its description, for Spark's UI and for errors.
    action : callable
        Starts the job and waits for it.
    alive : callable
        Called twice a second. If it raises, the job is cancelled; so does Ctrl-C.

    Raises
    ------
    TransferError
        If the job fails or Spark has ended.
    """
    context = spark.sparkContext
    group = f"alchemist-{uuid.uuid4().hex}"
    done: Future[T] = Future()

    def work() -> None:
        try:
            context.setJobGroup(group, f"Alchemist: {what}", interruptOnCancel=True)
            done.set_result(action())
        except BaseException as error:
            done.set_exception(error)

    InheritableThread(target=work, daemon=True).start()
    try:
        while not wait([done], POLL_INTERVAL_S).done:
            alive()
    except BaseException:
        with contextlib.suppress(Exception):  # Spark may have ended
            context.cancelJobGroup(group)
        wait([done], CANCEL_TIMEOUT_S)
        raise
    try:
        return done.result()
    except BaseException as error:
        raise _as_transfer_error(what, error) from error


def _as_transfer_error(what: str, error: BaseException) -> BaseException:
    """The error to raise for a failed job; errors of the user's code are not changed."""
    if not isinstance(error, PySparkException | Py4JError | OSError):
        return error
    java = getattr(error, "java_exception", None)
    if java is not None:
        with contextlib.suppress(Py4JError, OSError):
            return TransferError(f"Spark could not {what}: {_without_stack(java.getMessage())}")
    if isinstance(error, PySparkException):
        return TransferError(f"Spark could not {what}: {_without_stack(str(error))}")
    return TransferError(f"Spark could not {what}: its JVM does not answer and has probably ended")


def _without_stack(message: str | None) -> str:
    """A message from the JVM without its stack trace."""
    lines = (message or "no reason given").partition("\nDriver stacktrace")[0].splitlines()
    return "\n".join(line for line in lines if not line.startswith("\tat "))[:MESSAGE_CHARS]
