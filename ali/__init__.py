"""The Alchemist-Library Interface: the names that authors of libraries import."""

import importlib
from typing import Any

from ali.interface import Context, routine
from ali.run import context
from mpi_workers.matrix.dist_matrix import DistMatrix
from mpi_workers.matrix.sparse_matrix import SparseMatrix

__all__ = ["Context", "DistMatrix", "SparseMatrix", "context", "routine"]


def __getattr__(name: str) -> Any:
    if name == "testing":  # at first use: it needs pytest, which ranks do not
        return importlib.import_module("ali.testing")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
