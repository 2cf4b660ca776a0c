"""Spark: DataFrames and MLlib's distributed matrices to a gang and back; Spark on Ray.

`init_spark` starts Spark on Ray (RayDP). Any other Spark whose executors can connect to the gang
works as well. The modules that run in executors are pickled by value; they need NumPy, pyarrow and
`mpi_workers`, but neither Ray nor the rest of this package.
"""

from __future__ import annotations

from alchemist_ray.errors import AlchemistError

try:
    from pyspark import cloudpickle
except ModuleNotFoundError as error:
    raise AlchemistError(
        f"Spark needs {error.name}: pip install 'alchemist-on-ray[spark]'"
    ) from None

from alchemist_ray.clients.spark import arrow, executor_push, object_store_pull
from alchemist_ray.clients.spark.inspection import inspect
from alchemist_ray.clients.spark.results import to_spark
from alchemist_ray.clients.spark.startup import init_spark, stop_spark

for _module in (arrow, object_store_pull, executor_push):
    cloudpickle.register_pickle_by_value(_module)

__all__ = ["init_spark", "inspect", "stop_spark", "to_spark"]
