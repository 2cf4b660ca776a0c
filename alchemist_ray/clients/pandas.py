"""pandas: columns of data frames as matrices. The same rules hold for Dask's partitions."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from alchemist_ray.attached.connection import GangConnection
from alchemist_ray.errors import DtypeError, ShapeError
from alchemist_ray.transfer.sources import NumPySource
from mpi_workers.matrix.arrow_columns import not_numeric, nulls


def inspect(source: Any, wanted: Any, connection: GangConnection) -> NumPySource:
    """A source for a pandas DataFrame or Series. Raises `DtypeError`, `ShapeError`."""
    if not hasattr(source, "dtypes") or getattr(source, "ndim", 0) not in (1, 2):
        return NumPySource.inspect(np.asarray(source), wanted)
    found = matrix(source, common_dtype(source))
    values = found[:, 0] if source.ndim == 1 else found
    return NumPySource.inspect(values, wanted, kept_names(source))


def names(frame: Any) -> list[str]:
    """Names of a DataFrame's columns, or the name of a Series."""
    return [str(name) for name in frame.columns] if frame.ndim == 2 else [str(frame.name)]


def kept_names(frame: Any) -> list[str]:
    """The names that a matrix keeps: none, if pandas has numbered the columns.

    A name with several levels is that of its tuple, as pandas writes it to Parquet.
    """
    given = frame.columns if frame.ndim == 2 else [frame.name]
    numbered = all(name is None or isinstance(name, int | np.integer) for name in given)
    return [] if numbered else names(frame)


def common_dtype(frame: Any) -> np.dtype[Any]:
    """The dtype that holds every column, as NumPy promotes them.

    Raises
    ------
    DtypeError
        For a column that is not numeric.
    ShapeError
        If there are no columns.
    """
    dtypes = list(frame.dtypes) if frame.ndim == 2 else [frame.dtype]
    if not dtypes:
        raise ShapeError("the data frame has no columns: there is nothing to send")
    found = []
    for name, dtype in zip(names(frame), dtypes, strict=True):
        plain = _plain(dtype)
        if plain is None:
            raise DtypeError(not_numeric(name, dtype))
        found.append(plain)
    return np.result_type(*found)


def _plain(dtype: Any) -> np.dtype[Any] | None:
    """The NumPy dtype of a column's values; None if they are not numeric."""
    if not isinstance(dtype, np.dtype):  # pandas' own dtypes, which store missing values separately
        if type(dtype).__name__ in ("CategoricalDtype", "SparseDtype"):
            return None
        dtype = getattr(dtype, "numpy_dtype", None)
    return dtype if isinstance(dtype, np.dtype) and dtype.kind in "biufc" else None


def partition(frame: Any, columns: list[str], dtype: np.dtype[Any]) -> NDArray[Any]:
    """The values of a part of Dask's data frame, in a dtype of their own.

    Parameters
    ----------
    columns, dtype
        As the whole declares them; of a series, its name.

    Raises
    ------
    DtypeError
        See `common_dtype` and `matrix`.
    ShapeError
        If the part has other columns.
    """
    if not len(frame):  # its columns may be untyped
        return np.empty((0, len(columns)), dtype)
    if frame.ndim == 2 and names(frame) != columns:
        raise ShapeError(
            f"it has the columns {', '.join(names(frame))}, and the data frame "
            f"{', '.join(columns)}: check that a function that was mapped over it returns these"
        )
    return matrix(frame, common_dtype(frame))


def matrix(frame: Any, dtype: np.dtype[Any]) -> NDArray[Any]:
    """The values of a pandas DataFrame or Series, shape (m, n), without the index.

    Raises
    ------
    DtypeError
        If a value is missing in a column whose dtype represents missing values (``Int64``,
        ``double[pyarrow]``). NaN in a column of floats is a number.
    """
    if frame.ndim == 1:
        frame = frame.to_frame()
    for position, name in enumerate(names(frame)):
        column = frame.iloc[:, position]
        if not isinstance(column.dtype, np.dtype):
            missing = np.asarray(column.isna())
            if missing.any():
                raise DtypeError(
                    nulls(
                        name, int(missing.sum()), "fill them (fillna) or drop their rows (dropna)"
                    )
                )
    return np.asarray(frame.to_numpy(dtype=dtype))
