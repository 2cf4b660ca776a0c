"""The source protocol of `send_matrix`, and the registry of the kinds of data that it takes.

A source is checked before the gang is asked for memory.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np

from alchemist_ray.errors import MatrixError, ShapeError
from alchemist_ray.gang.connection import GangConnection
from alchemist_ray.gang.matrix_ref import MatrixRef
from alchemist_ray.object_refs import ObjectRef
from alchemist_ray.transfer import iterators
from alchemist_ray.transfer.numpy_source import NumPySource
from mpi_workers.data.description import NodeTimes, TransferTarget
from mpi_workers.data.transfers import Progress
from mpi_workers.matrix.layout import Shape


class MatrixSource(Protocol):
    """Data that was looked at and is ready to be sent.

    Attributes
    ----------
    shape : (int, int)
        Rows and columns, see `stored_shape`.
    array_shape : tuple of int, optional
        Of the array, if it is no matrix.
    dtype : numpy.dtype
        Of the matrix.
    columns : sequence of str
        Names of the columns, if they have names.
    """

    shape: Shape
    dtype: np.dtype[Any]
    columns: Sequence[str]

    def provenance(self) -> dict[str, Any]:
        """Where the matrix comes from, for the gang's record."""

    def send(
        self, connection: GangConnection, target: TransferTarget, progress: Progress | None
    ) -> dict[int, NodeTimes]:
        """Move every element; the times by node."""


@runtime_checkable
class KeptSource(Protocol):
    """A source whose data can be sent again, by another process."""

    def kept(self) -> Any:
        """Data of which `source_for` makes this matrix again."""


# By the package that a type comes from: the module whose `inspect(data, dtype, connection)` makes
# a source of it. It is imported when such data is met. The longest name that fits counts.
OBJECT_STORE = "alchemist_ray.transfer.object_store"
CLIENTS: dict[str, str] = {
    "dask": "alchemist_ray.clients.dask.chunks",
    "dask_expr": "alchemist_ray.clients.dask.chunks",
    "pandas": "alchemist_ray.clients.pandas",
    "ray.data": "alchemist_ray.clients.ray_data",
    "pyspark": "alchemist_ray.clients.spark.sources",
}


def source_for(data: Any, dtype: Any, connection: GangConnection) -> MatrixSource:
    """The source for some data.

    Raises
    ------
    DtypeError, ShapeError, IncompleteMatrixError, MatrixError
        If no matrix can be made of it.
    """
    if isinstance(data, MatrixRef):
        raise MatrixError(
            f"{data.name} is on the ranks already: handle.to_layout() changes its layout, and "
            "another session can send handle.fetch()"
        )
    if isinstance(data, iterators.IteratorSource):
        return data
    if iterators.on_disk(data):
        return iterators.disk_source(data, dtype)
    if isinstance(data, ObjectRef):
        raise ShapeError(
            "an ObjectRef alone has no place in a matrix: send [(ref, 0, 0)], a list of "
            "(ObjectRef, first row, first column)"
        )
    if isinstance(data, list) and data and _is_block(data[0]):
        return _inspect(OBJECT_STORE, data, dtype, connection)
    client = _client_of(data)
    if client is not None:
        return _inspect(client, data, dtype, connection)
    return NumPySource.inspect(data, dtype)


def _is_block(item: Any) -> bool:
    """Whether an item is a block, or is meant as one. Raises `ShapeError` for an array in one."""
    first = item[0] if isinstance(item, tuple) and item else item
    if first is not item and getattr(first, "ndim", 0) == 2:
        raise ShapeError(
            f"a block is (ObjectRef, first row, first column), and the first one has a "
            f"{type(first).__name__}: ray.put(array) makes an ObjectRef of an array"
        )
    return isinstance(first, ObjectRef)


def _client_of(data: Any) -> str | None:
    """The module of the client for this data; None if it is of no other system."""
    for kind in type(data).__mro__:
        package = kind.__module__
        while package:
            if package in CLIENTS:
                return CLIENTS[package]
            package = package.rpartition(".")[0]
    return None


def _inspect(module: str, data: Any, dtype: Any, connection: GangConnection) -> MatrixSource:
    source: MatrixSource = importlib.import_module(module).inspect(data, dtype, connection)
    return source
