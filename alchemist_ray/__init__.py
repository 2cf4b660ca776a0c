"""Alchemist on Ray: MPI libraries behind Python, with data that is already in Ray."""

import os
import sys

from alchemist_ray.runtime.batch_job import adopt

if "ray" not in sys.modules:  # it reads how to authenticate itself when it is imported
    adopt(os.environ)

from alchemist_ray.arrays.handle import Handle
from alchemist_ray.errors import AlchemistError
from alchemist_ray.functions.mpi_function import mpi_function
from alchemist_ray.session import AlchemistSession, WorkerInfo

__version__ = "0.1.0"

__all__ = [
    "AlchemistError",
    "AlchemistSession",
    "Handle",
    "WorkerInfo",
    "__version__",
    "mpi_function",
]
