"""Spark for tests: one at a time in this process, started when asked for, kept while it fits."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from typing import Any

import pytest

START_S = 240.0  # on a busy machine; 11 s on a quiet one

SPARK = [  # the marks of every file of tests with Spark
    pytest.mark.skipif(
        shutil.which("java") is None, reason="Spark needs Java, and the PATH has none"
    ),
    pytest.mark.timeout(300, func_only=True),
    # PySpark 3.5's own.
    pytest.mark.filterwarnings("ignore:distutils Version classes:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:pyspark"),
    pytest.mark.filterwarnings("ignore::FutureWarning:pyspark"),
]


class Sparks:
    """The Spark of this process: a local one, or one on Ray."""

    def __init__(self) -> None:
        self._kind: str | None = None
        self._spark: Any = None

    def local(self) -> Any:
        """Two threads in one JVM, without RayDP."""
        return self._started("local[2]", {})

    def executors(self) -> Any:
        """Two executors of one core each, in JVMs of their own, without RayDP."""
        settings = {"spark.executor.memory": "512m", "spark.decommission.enabled": "true"}
        return self._started("local-cluster[2,1,512]", settings)

    def _started(self, master: str, settings: dict[str, str]) -> Any:
        if self._kind != master:
            self.stop()
            from pyspark.sql import SparkSession  # noqa: PLC0415

            os.environ["PYSPARK_PYTHON"] = os.environ["PYSPARK_DRIVER_PYTHON"] = sys.executable
            builder = SparkSession.builder.master(master).appName("tests")
            for key, value in {
                "spark.driver.bindAddress": "127.0.0.1",
                "spark.driver.host": "127.0.0.1",
                "spark.driver.memory": "1g",
                "spark.log.level": "OFF",
                "spark.sql.shuffle.partitions": "4",
                "spark.ui.enabled": "false",
                "spark.ui.showConsoleProgress": "false",
                **settings,
            }.items():
                builder = builder.config(key, value)
            self._kind, self._spark = master, builder.getOrCreate()
        return self._spark

    def on_ray(self) -> Any:
        """Two executors of one core each on the Ray cluster of the tests."""
        if self._kind != "ray":
            self.stop()
            from alchemist_ray.clients.spark import init_spark  # noqa: PLC0415

            settings = {"spark.log.level": "OFF", "spark.sql.shuffle.partitions": "4"}
            self._spark = init_spark(
                "tests", 2, 1, "700MB", configs=settings, start_timeout_s=START_S
            )
            self._kind = "ray"
        return self._spark

    def stop(self) -> None:
        if self._kind is not None:
            from alchemist_ray.clients.spark import stop_spark  # noqa: PLC0415

            self._kind = self._spark = None
            stop_spark()


_sparks = Sparks()  # pytest makes the fixture once in each file and folder that imports it


@pytest.fixture(scope="session")
def sparks(cluster: str) -> Iterator[Sparks]:
    """Which Spark there is now."""
    pytest.importorskip("pyspark", reason="Spark's tests need the extra 'spark'")
    pytest.importorskip("raydp", reason="Spark's tests need the extra 'spark'")
    yield _sparks
    _sparks.stop()
