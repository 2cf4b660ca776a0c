"""What `send_matrix` takes, and what has to be done for each kind: one small plan per source.

Everything is checked here, before the gang is asked for memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import ray
from numpy.typing import NDArray

from alchemist_ray.arrays.handle import Handle
from alchemist_ray.clients import client_of
from alchemist_ray.errors import DtypeError, MatrixError, ShapeError
from alchemist_ray.transfer import iterators, object_store
from mpi_workers.data.rank_connections import RankTimes, TransferTarget
from mpi_workers.data.transfers import Progress
from mpi_workers.matrix.dist_matrix import DTYPES, check_dtype
from mpi_workers.matrix.layout import Shape

if TYPE_CHECKING:
    from alchemist_ray.gang.connection import GangConnection


class MatrixSource(Protocol):
    """A source that has been looked at: ready to be sent."""

    shape: Shape
    dtype: np.dtype[Any]

    def provenance(self) -> dict[str, Any]:
        """Where the matrix comes from, for the gang's record."""

    def send(
        self, client: GangConnection, target: TransferTarget, progress: Progress | None
    ) -> dict[int, RankTimes]:
        """Move every element."""


def source_for(source: Any, dtype: Any, client: GangConnection) -> MatrixSource:
    """What to do for this source.

    Raises
    ------
    DtypeError, ShapeError, IncompleteMatrixError
        If no matrix can be made of it.
    """
    if isinstance(source, Handle):
        raise MatrixError(
            f"{source.name} is on ranks already: use handle.to_layout(), or send handle.fetch() "
            "to another session"
        )
    if isinstance(source, iterators.IteratorSource):
        return source
    if iterators.on_disk(source):
        return iterators.disk_plan(source, dtype)
    if isinstance(source, list) and source and _is_block(source[0]):
        return object_store.ObjectStoreSource.inspect(source, dtype)
    theirs = client_of(source)
    if theirs is not None:
        looked: MatrixSource = theirs.plan(source, dtype, client)
        return looked
    return NumPySource.inspect(source, dtype)


def _is_block(item: Any) -> bool:
    return isinstance(item, tuple) and len(item) == 3 and isinstance(item[0], ray.ObjectRef)


def chosen_dtype(have: np.dtype[Any], wanted: Any) -> np.dtype[Any]:
    """The dtype of the matrix for elements of dtype `have`. Raises `DtypeError`."""
    try:
        dtype = check_dtype(have if wanted is None else wanted)
    except ValueError as error:
        hint = ""
        if wanted is None and have.kind in "biuf":
            hint = "; say which one to convert to, e.g. send_matrix(..., dtype='float64')"
        raise DtypeError(f"{error}{hint}") from None
    if have.kind not in "biufc" or not np.can_cast(have, dtype, "same_kind"):
        raise DtypeError(f"elements of dtype {have} cannot be sent as {dtype} without loss")
    return np.dtype(dtype.name)  # in this machine's byte order


class NumPySource:
    """A NumPy array in this process: cut by layout and sent from here, without a copy of it."""

    def __init__(self, array: NDArray[Any], dtype: np.dtype[Any]) -> None:
        self.array = array
        self.dtype = dtype
        self.shape: Shape = (array.shape[0], array.shape[1])

    @classmethod
    def inspect(cls, source: Any, wanted: Any) -> NumPySource:
        array = _as_array(source)
        if array.dtype.kind not in "biufc":
            raise DtypeError(
                f"elements of dtype {array.dtype} are not numbers; a matrix is one of "
                + ", ".join(DTYPES)
            )
        if array.ndim == 1:
            array = array[:, np.newaxis]
        if array.ndim != 2:
            raise ShapeError(f"an array of shape {array.shape} is not a matrix: it must be 2-D")
        if not array.size:
            raise ShapeError(f"an array of shape {array.shape} is empty: there is nothing to send")
        return cls(array, chosen_dtype(array.dtype, wanted))

    def provenance(self) -> dict[str, Any]:
        return {"from": "array", "dtype": str(self.array.dtype), "shape": list(self.shape)}

    def send(
        self, client: GangConnection, target: TransferTarget, progress: Progress | None
    ) -> dict[int, RankTimes]:
        return client.write(target, self.array, progress)


def _as_array(source: Any) -> NDArray[Any]:
    if isinstance(source, np.ndarray):
        if isinstance(source, np.ma.MaskedArray) and source.mask.any():
            raise DtypeError("a masked array has elements without a value: fill them first")
        return np.asarray(source)
    if isinstance(source, ray.ObjectRef):
        raise ShapeError(
            "an ObjectRef alone has no place in a matrix: send [(ref, 0, 0)], a list of "
            "(ObjectRef, first row, first column)"
        )
    if hasattr(source, "tocsr"):
        raise DtypeError("a sparse matrix cannot be sent: send source.toarray()")
    if isinstance(source, str | bytes | dict | set) or source is None:
        raise DtypeError(f"a {type(source).__name__} is not a matrix")
    if isinstance(source, Sequence) or hasattr(source, "__array__"):
        try:
            return np.asarray(source)
        except (ValueError, TypeError) as error:
            raise ShapeError(f"not a matrix: {error}") from None
    raise DtypeError(
        f"a {type(source).__name__} cannot be sent: give a NumPy array, or a list of "
        "(ObjectRef, first row, first column)"
    )
