"""Data of other systems: how it becomes a matrix, and how a matrix becomes theirs again.

Each system is a module here that is imported when something of that system is met, and not
before: none of them is needed by the others, or by who has only NumPy.
"""

from __future__ import annotations

import importlib
from typing import Any

# From the package that a source's type comes from to the module that has its `plan`. The longest
# name that fits counts.
_MODULES = {
    "dask": "dask",
    "dask_expr": "dask",
    "pandas": "frames",
    "ray.data": "data",
    "pyspark": "spark",
}


def client_of(source: Any) -> Any:
    """The module here that can send `source`; None if it is nothing of another system's."""
    for kind in type(source).__mro__:
        package = kind.__module__
        while package:
            if package in _MODULES:
                return importlib.import_module(f"{__name__}.{_MODULES[package]}")
            package = package.rpartition(".")[0]
    return None
