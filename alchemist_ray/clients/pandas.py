"""pandas: columns of data frames as matrices. The same rules hold for Dask's partitions."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from alchemist_ray.attached.connection import GangConnection
from alchemist_ray.attached.matrix_ref import ColumnName
from alchemist_ray.dtypes import frame_values, refusals
from alchemist_ray.errors import ShapeError
from alchemist_ray.transfer.sources import NumPySource
from mpi_workers.columns.missing import Missing
from mpi_workers.columns.pandas_columns import dtypes_of, names_of
from mpi_workers.matrix import dtypes


def inspect(source: Any, wanted: Any, missing: Missing, connection: GangConnection) -> NumPySource:
    """A source for pandas' DataFrame, Series, Index or array. Raises `DtypeError`, `ShapeError`."""
    if not hasattr(source, "iloc"):
        source = importlib.import_module(type(source).__module__.partition(".")[0]).Series(source)
    categories: dict[int, Sequence[str]] = {}
    values = frame_values(source, missing, categories, wanted)
    return NumPySource.inspect(values, wanted, kept_names(source, categories))


def kept_names(frame: Any, categories: dict[int, Sequence[str]] | None = None) -> list[str]:
    """The names that a matrix keeps: none, if pandas has numbered the columns and none has codes.

    A name with several levels is that of its tuple, as pandas writes it to Parquet.
    """
    given = frame.columns if frame.ndim == 2 else [frame.name]
    numbered = all(name is None or isinstance(name, int | np.integer) for name in given)
    if numbered and not categories:
        return []
    found = enumerate(names_of(frame))
    return [ColumnName(name or f"c{j}", (categories or {}).get(j, ())) for j, name in found]


def common_dtype(frame: Any, missing: Missing) -> np.dtype[Any]:
    """The dtype that holds every column, as NumPy promotes them.

    Raises
    ------
    DtypeError
        For a column that is not numeric.
    ShapeError
        If there are no columns.
    """
    with refusals():
        return dtypes.common_dtype(dtypes_of(frame, missing), names_of(frame))


def partition(
    frame: Any, columns: list[str], dtype: np.dtype[Any], missing: Missing
) -> NDArray[Any]:
    """The values of a part of Dask's data frame, in a dtype of their own.

    Parameters
    ----------
    columns, dtype
        As the whole declares them; of a series, its name.

    Raises
    ------
    DtypeError
        For a column that is not of numbers, or has missing values that `missing` does not allow.
    ShapeError
        If the part has other columns.
    """
    if not len(frame):  # its columns may be untyped
        return np.empty((0, len(columns)), dtype)
    if frame.ndim == 2 and names_of(frame) != columns:
        raise ShapeError(
            f"it has the columns {', '.join(names_of(frame))}, and the data frame "
            f"{', '.join(columns)}: check that a function that was mapped over it returns these"
        )
    values = frame_values(frame, missing)
    return values if values.ndim == 2 else values[:, np.newaxis]
