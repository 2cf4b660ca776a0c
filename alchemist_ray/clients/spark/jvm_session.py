"""The session of a program in Scala or Java: ``python -m alchemist_ray.clients.spark.jvm_session``.

`java/alchemist/Helper.scala` starts this process in Spark's driver. It connects to the JVM as
PySpark does, so that the matrices of the JVM's MLlib are those of this process too, and carries out
one request after the other until its input ends.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable
from typing import Any

from py4j.java_collections import JavaList
from py4j.java_gateway import JavaObject
from py4j.protocol import Py4JError, Py4JJavaError
from pyspark import SparkConf, SparkContext
from pyspark.java_gateway import launch_gateway
from pyspark.sql import DataFrame, SparkSession

from alchemist_ray.arrays.handle import Handle
from alchemist_ray.clients.spark import jvm
from alchemist_ray.clients.spark.results import MLLIB
from alchemist_ray.errors import AlchemistError, BadArgumentError
from alchemist_ray.session.alchemist_session import AlchemistSession

WAIT_S = 3600  # for a request; then it asks again
END_S = 50.0  # for the session to end, before the JVM kills this process

_MATRICES = {kind: matrix for kind, (matrix, _) in MLLIB.items()}


class JvmSession:
    """Carries out the requests of one `AlchemistContext`."""

    def __init__(self, gateway: Any) -> None:
        self._gateway = gateway
        java_session = gateway.entry_point.spark()
        java_context = gateway.jvm.JavaSparkContext(java_session.sparkContext())
        conf = SparkConf(_jconf=java_context.getConf())
        context = SparkContext(gateway=gateway, jsc=java_context, conf=conf)
        self._spark = SparkSession(context, java_session)
        self._handles: dict[int, Handle] = {}
        self._als: AlchemistSession | None = None

    def serve(self) -> None:
        """Carry out requests until the connection to the JVM is lost."""
        while True:
            request = self._gateway.entry_point.take(WAIT_S)
            if request is not None:
                self._answer(request)

    def end(self) -> None:
        """End the session."""
        if self._als is not None:
            self._als.stop()

    def _answer(self, request: Any) -> None:
        for matrix in request.dropped():
            self._handles.pop(matrix, None)  # objects of Spark may still refer to it
        jvm.release()
        try:
            value = getattr(self, f"_{request.operation()}")(request, *request.arguments())
        except Py4JJavaError as error:
            java = error.java_exception
            request.fail("TransferError", f"{java.getClass().getName()}: {java.getMessage()}")
        except Py4JError:
            raise  # the JVM has ended
        except Exception as error:
            request.fail(type(error).__name__, str(error))
        else:
            request.succeed(_java(value))

    # --- requests, by the names of their operations ---

    def _open(self, request: Any, workers: int, options: Any) -> None:
        self._als = AlchemistSession(workers, **dict(options))

    def _load(self, request: Any, name: str, path: str | None) -> None:
        self._session.load_library(name, path)

    def _run(self, request: Any, library: str, routine: str, args: Any, keywords: Any) -> list[Any]:
        given = [self._argument(value) for value in args]
        named = {name: self._argument(keywords[name]) for name in keywords}
        found = self._session.run_task(library, routine, *given, **named)
        values = found if isinstance(found, tuple) else () if found is None else (found,)
        return [self._result(request, value) for value in values]

    def _send(self, request: Any, kind: str, data: Any, sizes: Any) -> Any:
        frame = kind == "DataFrame"
        source = DataFrame(data, self._spark) if frame else _MATRICES[kind](data, *sizes)
        return self._result(request, self._session.send_matrix(source))

    def _receive(self, request: Any, matrix: int, kind: str) -> Any:
        return self._handle(matrix).to_spark(self._spark, kind=kind)

    def _free(self, request: Any, matrix: int) -> None:
        handle = self._handles.pop(matrix, None)
        if handle is not None:
            with contextlib.suppress(AlchemistError):  # the gang has ended
                handle.free()

    # --- values ---

    @property
    def _session(self) -> AlchemistSession:
        assert self._als is not None  # the JVM opens it first
        return self._als

    def _handle(self, matrix: int) -> Handle:
        if matrix not in self._handles:
            raise BadArgumentError(f"matrix {matrix} was freed")
        return self._handles[matrix]

    def _argument(self, value: Any) -> Any:
        if isinstance(value, JavaList):
            return [self._argument(item) for item in value]
        return self._handle(value.id()) if isinstance(value, JavaObject) else value

    def _result(self, request: Any, value: Any) -> Any:
        if not isinstance(value, Handle):
            return value
        self._handles[value.id] = value
        rows, cols = value.stored_shape
        return request.matrix(value.id, value.name, rows, cols, value.dtype.name, value.layout)


def _java(value: Any) -> Any:
    """An object of Spark in the JVM. The JVM forgets a matrix of MLlib with its Python object."""
    if isinstance(value, DataFrame):
        return value._jdf
    matrix: Any = value
    found = isinstance(value, tuple(_MATRICES.values()))
    return matrix._java_matrix_wrapper._java_model if found else value


def _watch_input(end: Callable[[], None]) -> None:
    """End this process when its input ends: the JVM has closed it, or has ended."""
    sys.stdin.buffer.read()
    threading.Timer(END_S, os._exit, (1,)).start()
    try:
        end()
    finally:
        os._exit(0)


def main() -> None:
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)  # of functions in Python
    session = JvmSession(launch_gateway())
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the JVM's, which then ends
    watch = threading.Thread(target=_watch_input, args=(session.end,), daemon=True)
    watch.start()
    try:
        session.serve()
    except (Py4JError, OSError):  # the JVM ends, and so does the input
        watch.join()


if __name__ == "__main__":
    main()
