"""NumPy arrays, and other data in this process, as a source of a matrix."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from alchemist_ray.dtypes import DTYPES, check_range, check_unmasked, chosen_dtype
from alchemist_ray.errors import DtypeError, ShapeError
from alchemist_ray.gang.connection import GangConnection
from mpi_workers.data.description import NodeTimes, TransferTarget
from mpi_workers.data.transfers import MatrixWriter, Progress
from mpi_workers.matrix.layout import MAX_AXES, Shape, stored_shape

WIDENED = ("bfloat16",)  # dtypes of ml_dtypes, which NumPy takes for no numbers


class NumPySource:
    """An array in this process: cut by layout and sent from where it lies."""

    def __init__(
        self, array: NDArray[Any], dtype: np.dtype[Any], columns: Sequence[str] = ()
    ) -> None:
        self.dtype = dtype
        self.columns = columns
        self.array_shape = array.shape
        self.shape: Shape = stored_shape(array.shape)
        self.array = array if array.ndim == 2 else array.reshape(self.shape)

    @classmethod
    def inspect(cls, data: Any, wanted: Any, columns: Sequence[str] = ()) -> NumPySource:
        """A source for an array or what NumPy makes one of. Raises `DtypeError`, `ShapeError`."""
        array = _as_array(data)
        if array.dtype.name in WIDENED:
            if wanted is None:
                raise DtypeError(
                    f"a matrix cannot have dtype {array.dtype}: choose one to convert to, e.g. "
                    "dtype='float32'"
                )
            array = array.astype(np.float32)
        if array.dtype.kind not in "biufc":
            raise DtypeError(
                f"elements of dtype {array.dtype} are not numbers; a matrix has one of the dtypes "
                f"{', '.join(DTYPES)}; if all of them are numbers, x.astype(float) makes floats"
            )
        if array.ndim > MAX_AXES:
            raise ShapeError(
                f"an array of shape {array.shape} cannot be sent: it has more than {MAX_AXES} axes"
            )
        dtype = chosen_dtype(array.dtype, wanted)
        check_range(array, dtype, "the array")
        return cls(array, dtype, columns)

    def provenance(self) -> dict[str, Any]:
        """Where the matrix comes from, for the gang's record."""
        shape = list(self.array_shape)
        return {"from": "array", "dtype": str(self.array.dtype), "shape": shape}

    def kept(self) -> Any:
        """The elements: data that can be sent again, if they are kept."""
        return self.array.reshape(self.array_shape)

    def send(
        self, connection: GangConnection, target: TransferTarget, progress: Progress | None
    ) -> dict[int, NodeTimes]:
        """Write the whole array into the ranks' memory."""
        with MatrixWriter(
            connection.nodes, target, progress, connection.options.buffer_bytes
        ) as writer:
            if self.array.size:
                writer.write_block(self.array, (0, 0))
        return writer.times


def _as_array(data: Any) -> NDArray[Any]:
    check_unmasked(data, "the array")
    if isinstance(data, np.ndarray):
        return np.asarray(data)
    if hasattr(data, "tocsr"):
        raise DtypeError("a sparse matrix cannot be one of several blocks: send it alone")
    if isinstance(data, str):
        raise DtypeError("a str is not a matrix: a file is loaded with load_matrix(path)")
    if isinstance(data, bytes | dict | set) or data is None:
        raise DtypeError(f"a {type(data).__name__} is not a matrix")
    if isinstance(data, Sequence) or hasattr(data, "__array__"):
        try:
            return np.asarray(data)
        except (ValueError, TypeError) as error:
            raise ShapeError(f"not a matrix: {error}") from None
    raise DtypeError(
        f"a {type(data).__name__} cannot be sent: give a NumPy array, or a list of "
        "(ObjectRef, first row, first column)"
    )
