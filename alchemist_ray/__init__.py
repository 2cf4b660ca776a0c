"""Alchemist on Ray: MPI libraries behind Python, with data that is already in Ray."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from typing import TYPE_CHECKING, Any

from alchemist_ray.cluster.batch_job import adopt
from alchemist_ray.version import __version__

if "ray" not in sys.modules:  # Ray reads how to authenticate itself when it is imported
    adopt(os.environ)

if TYPE_CHECKING:
    from alchemist_ray.arrays.handle import Handle
    from alchemist_ray.errors import AlchemistError
    from alchemist_ray.functions.submitted import SubmittedCall
    from alchemist_ray.observe.status import status
    from alchemist_ray.ray_access.executor import Executor
    from alchemist_ray.ray_access.mpi_function import MpiFunction, mpi_function
    from alchemist_ray.session.alchemist_session import (
        AlchemistSession,
        CallInfo,
        GangInfo,
        WorkerInfo,
    )
    from alchemist_ray.session.channels import couple

# Loaded at first use: `alchemist_ray.attached` and `.arrays` can be imported without Ray, and the
# command line starts quickly.
_PUBLIC = {
    "AlchemistError": "alchemist_ray.errors",
    "AlchemistSession": "alchemist_ray.session.alchemist_session",
    "CallInfo": "alchemist_ray.session.alchemist_session",
    "Executor": "alchemist_ray.ray_access.executor",
    "GangInfo": "alchemist_ray.session.alchemist_session",
    "Handle": "alchemist_ray.arrays.handle",
    "MpiFunction": "alchemist_ray.ray_access.mpi_function",
    "SubmittedCall": "alchemist_ray.functions.submitted",
    "WorkerInfo": "alchemist_ray.session.alchemist_session",
    "couple": "alchemist_ray.session.channels",
    "mpi_function": "alchemist_ray.ray_access.mpi_function",
    "status": "alchemist_ray.observe.status",
}

__all__ = [
    "AlchemistError",
    "AlchemistSession",
    "CallInfo",
    "GangInfo",
    "Handle",
    "SubmittedCall",
    "WorkerInfo",
    "__version__",
    "couple",
]
if importlib.util.find_spec("alchemist_ray.ray_access"):  # not in alchemist-client
    __all__ += ["Executor", "MpiFunction", "mpi_function", "status"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_PUBLIC[name]), name)
    globals()[name] = value
    return value


def load_ipython_extension(shell: Any) -> None:
    """``%load_ext alchemist_ray`` in IPython and Jupyter."""
    importlib.import_module("alchemist_ray.notebook").register(shell)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
