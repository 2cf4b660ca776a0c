"""From a handle to a lazy dask array: the task that uses a chunk fetches it."""

from __future__ import annotations

import math
import sys
from dataclasses import replace
from functools import partial
from typing import Any

import dask.array as da
import numpy as np
from dask.base import tokenize
from numpy.typing import NDArray

from alchemist_ray.attached.matrix_ref import MatrixRef
from alchemist_ray.attached.registry import gang_of
from alchemist_ray.clients.ray_tasks import fetch
from alchemist_ray.errors import AlchemistError, ShapeError, TransferError
from mpi_workers.data.description import DataEndpoints, TransferTarget
from mpi_workers.data.node_connections import NodeConnections
from mpi_workers.data.transfers import MatrixReader
from mpi_workers.failures import Failure
from mpi_workers.matrix.layout import Distribution, distributions
from mpi_workers.matrix.node_shares import Region


class LostMatrix:
    """A matrix that is gone: tasks that use it raise the reason, which pickling must not."""

    def __init__(self, shape: tuple[int, ...], dtype: np.dtype[Any], reason: Exception) -> None:
        self.shape = shape
        self.dtype = dtype
        self.reason = reason

    def fetch(self, rows: slice, cols: slice = slice(None)) -> NDArray[Any]:
        raise self.reason


class AttachedMatrix:
    """A matrix in a process that knows the gang's nodes only; fetches through them."""

    def __init__(
        self, endpoints: DataEndpoints, target: TransferTarget, shape: tuple[int, ...]
    ) -> None:
        self._endpoints = endpoints
        self._target = target
        self.shape = shape
        self.dtype = target.dtype

    def fetch(self, rows: slice, cols: slice = slice(None)) -> NDArray[Any]:
        """The elements of slices with positive steps; cost: the range that they span."""
        m, n = self._target.distribution.shape
        chosen = range(m)[rows], range(n)[cols]
        bounds = [(part[0], part[-1] + 1) if part else (0, 0) for part in chosen]
        (row0, row1), (col0, col1) = bounds
        out = np.empty((row1 - row0, col1 - col0), self.dtype)
        if out.size:
            nodes = NodeConnections(self._endpoints, threads=1)  # Dask uses the other cores
            try:
                region = Region(row0, row1, col0, col1)
                with MatrixReader(nodes, self._target, region=region) as reader:
                    reader.read_block(out, (row0, col0))
            except Failure as failure:
                raise TransferError(
                    "a part of the matrix of a dask array could not be fetched; it was freed, or "
                    f"its gang has ended: {failure.message}"
                ) from failure
            finally:
                nodes.close()
        found = out[:: chosen[0].step, :: chosen[1].step]
        return found.reshape(found.shape[: len(self.shape)])


class FetchedByIndex:
    """A handle for dask: indexing fetches the elements.

    (Indexing the handle itself would make another matrix on the gang.)
    """

    __slots__ = ("_handle", "dtype", "ndim", "shape")

    def __init__(self, handle: MatrixRef | AttachedMatrix | LostMatrix) -> None:
        self._handle = handle
        self.shape = handle.shape
        self.ndim = len(handle.shape)
        self.dtype = handle.dtype

    def __getitem__(self, key: Any) -> NDArray[Any]:
        """Fetch the elements of slices and integers; None is a new axis."""
        keys = key if isinstance(key, tuple) else (key,)
        wanted = [k for k in keys if k is not None]
        wanted += [slice(None)] * (self.ndim - len(wanted))
        handle = self._handle
        read = partial(fetch, handle) if isinstance(handle, MatrixRef) else handle.fetch
        found = read(*(k if isinstance(k, slice) else slice(k, k + 1 or None) for k in wanted))
        return found[
            tuple(slice(None) if isinstance(k, slice) else k if k is None else 0 for k in keys)
        ]

    def __dask_tokenize__(self) -> Any:
        handle = self._handle
        assert isinstance(handle, MatrixRef)  # in the process that makes the graph
        return "alchemist", handle.session, handle.gang, handle.epoch, handle.id

    def __reduce__(self) -> tuple[Any, ...]:
        handle = self._handle
        if _has_client() and isinstance(handle, MatrixRef):
            return FetchedByIndex, (_attached(handle),)
        return FetchedByIndex, (handle,)


def _has_client() -> bool:
    """Whether this process has a Client, also on the thread of its event loop."""
    if "distributed" not in sys.modules:
        return False
    try:
        sys.modules["distributed"].default_client()
    except ValueError:
        return False
    return True


def _attached(handle: MatrixRef) -> AttachedMatrix | LostMatrix:
    """The matrix for a process that does not know the gang."""
    try:
        connection = gang_of(handle)
        connection.check(handle)
        handle.keep()  # Dask does not report when it is done with it
    except AlchemistError as error:
        return LostMatrix(handle.shape, handle.dtype, error)
    distribution = Distribution(handle.layout, handle.stored_shape, connection.grid)
    target = TransferTarget(handle.id, distribution, handle.dtype)
    return AttachedMatrix(connection.endpoints, target, handle.shape)


def to_dask(handle: MatrixRef, chunks: Any = "auto") -> Any:
    """A lazy dask array of a matrix.

    Parameters
    ----------
    handle : MatrixRef
    chunks : int, tuple, -1, str or "auto"
        In any of dask's spellings. ``"auto"``: whole rows where each rank has whole rows
        (VC_STAR, VR_STAR, ...), whole columns where each rank has whole columns, otherwise
        blocks; of the size of dask's ``array.chunk-size``.

    Returns
    -------
    dask.array.Array, of the handle's shape
        Two handles of the same matrix give arrays of the same name.

    Raises
    ------
    ShapeError
        If the chunks do not fit the matrix.

    Notes
    -----
    Nothing moves until it is computed: the thread or Ray task that uses a chunk fetches it
    from the ranks directly; of a slice, only its elements. The array has a reference to the
    handle, so the matrix stays as long as the array. Other processes that compute the array get a
    pickled graph: the matrix then stays until `Handle.free` or the end of its gang.
    """
    if len(handle.shape) > 2:
        found = to_dask(replace(handle, shape=handle.stored_shape)).reshape(handle.shape)
        return found if isinstance(chunks, str) and chunks == "auto" else found.rechunk(chunks)
    source = FetchedByIndex(handle)
    try:
        normal = da.core.normalize_chunks(
            _whole_chunks(handle) if isinstance(chunks, str) and chunks == "auto" else chunks,
            handle.shape,
            dtype=handle.dtype,
        )
    except (ValueError, TypeError, ZeroDivisionError) as error:
        told = "0 is not a length of chunks" if isinstance(error, ZeroDivisionError) else error
        raise ShapeError(
            f"chunks={chunks!r} do not fit an array of shape {handle.shape}: {told}"
        ) from None
    if any(math.isnan(size) for sizes in normal for size in sizes):
        raise ShapeError(f"chunks={chunks!r}: NaN is not a size of chunks")
    return da.from_array(
        source,
        chunks=normal,
        name=f"alchemist-{tokenize(source, normal)}",
        asarray=False,
        fancy=False,  # dask itself picks elements by lists and masks
        inline_array=True,
        meta=np.empty((0,) * source.ndim, handle.dtype),
    )


def _whole_chunks(handle: MatrixRef) -> Any:
    """Chunks that are not split along a dimension that is whole on every rank."""
    rows, cols = distributions(handle.layout)
    if len(handle.shape) < 2:
        return "auto"
    if cols == "STAR" and rows != "STAR":
        return "auto", -1
    if rows == "STAR" and cols != "STAR":
        return -1, "auto"
    return "auto", "auto"
