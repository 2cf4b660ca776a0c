"""Spark: DataFrames and MLlib's distributed matrices to a gang and back; Spark on Ray.

`init_spark` starts Spark on Ray (RayDP). Any other Spark whose executors can connect to the gang
works as well: only their JVMs take part, with the jar of `jvm.py`.
"""

from __future__ import annotations

from alchemist_ray.errors import AlchemistError

try:
    import pyspark  # noqa: F401
except ModuleNotFoundError as error:
    raise AlchemistError(
        f"Spark needs {error.name}: pip install 'alchemist-on-ray[spark]'"
    ) from None

from alchemist_ray.clients.spark.results import to_spark
from alchemist_ray.clients.spark.sources import inspect
from alchemist_ray.clients.spark.startup import init_spark, stop_spark

__all__ = ["init_spark", "inspect", "stop_spark", "to_spark"]
