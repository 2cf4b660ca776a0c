"""The dtype that a matrix gets from its source.

The table of dtypes is `DTYPES` in `mpi_workers.matrix.dtypes`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from alchemist_ray.errors import DtypeError, LibraryLoadError, ShapeError
from mpi_workers.matrix import arrow_columns, dtypes
from mpi_workers.matrix.dtypes import DTYPES

__all__ = ["DTYPES", "as_array", "as_numbers", "check_range", "check_unmasked", "chosen_dtype"]


def chosen_dtype(source: np.dtype[Any], wanted: Any) -> np.dtype[Any]:
    """The dtype of the matrix that a source with elements of dtype `source` becomes.

    Parameters
    ----------
    source : numpy.dtype
        Of the elements that are sent.
    wanted : dtype, optional
        As the user gave it. None: that of the source.

    Returns
    -------
    numpy.dtype
        One of `DTYPES`, in this machine's byte order.

    Raises
    ------
    DtypeError
        If a matrix cannot have that dtype, or the elements cannot be cast to it.
    """
    try:
        return dtypes.chosen_dtype(source, wanted)
    except ValueError as error:
        raise DtypeError(str(error)) from None


def as_numbers(array: NDArray[Any]) -> NDArray[Any]:
    """An array of numbers; dates and durations are the int64 that they are, in their unit.

    Raises
    ------
    DtypeError
        If its elements are something else.
    """
    if array.dtype.kind in "mM":
        return array.astype(np.int64)
    if array.dtype.kind not in "biufc":
        raise DtypeError(
            f"elements of dtype {array.dtype} are not numbers; a matrix has one of the dtypes "
            f"{', '.join(DTYPES)}; if all of them are numbers, x.astype(float) makes floats"
        )
    return array


def as_array(data: Any, what: str) -> tuple[NDArray[Any], list[str]]:
    """What NumPy makes of data (`what`), and the names of its columns, if it is a table of Arrow.

    Raises
    ------
    DtypeError
        For masked elements; for a column of Arrow that has nulls or is not of numbers; for an
        object of which NumPy makes no array, such as a tensor with a gradient.
    ShapeError
        For lists of different lengths.
    LibraryLoadError
        For data of Arrow where pyarrow is not installed.
    """
    if arrow_columns.is_arrow(data):
        return _from_arrow(data)
    check_unmasked(data, what)
    try:
        return np.asarray(data), []
    except (ValueError, TypeError, RuntimeError) as error:
        if isinstance(data, Sequence):
            raise ShapeError(f"not a matrix: {error}") from None
        words = f"a {type(data).__name__} cannot become a NumPy array: {error}"
        raise DtypeError(words) from None


def _from_arrow(data: Any) -> tuple[NDArray[Any], list[str]]:
    try:
        return arrow_columns.from_arrow(data)
    except ValueError as error:  # pyarrow's own are ValueErrors too
        raise DtypeError(str(error)) from None
    except ImportError as error:
        words = f"a {type(data).__name__} is sent by Arrow: pip install pyarrow ({error})"
        raise LibraryLoadError(words) from error


def check_unmasked(data: Any, what: str) -> None:
    """Refuse masked elements, also of a list of arrays: `numpy.asarray` takes what is below a mask.

    Nulls of Arrow, polars and pandas are refused too, of which `numpy.asarray` makes NaN.

    Raises
    ------
    DtypeError
    """
    for array in data if isinstance(data, list | tuple) else (data,):
        if isinstance(array, np.ma.MaskedArray) and array.mask.any():
            raise DtypeError(f"{what} is masked, and has elements without a value: fill them first")
        if count := arrow_columns.count_nulls(array):
            raise DtypeError(f"{what} has nulls ({count}): fill or drop them first")


def check_range(array: NDArray[Any], dtype: np.dtype[Any], what: str) -> None:
    """Refuse an array with an element that a dtype cannot hold; rounding is accepted.

    Parameters
    ----------
    array : ndarray
    dtype : numpy.dtype
        Of the matrix.
    what : str
        The array, for the message.

    Raises
    ------
    DtypeError
        If an integer is out of range, or a finite number would become infinite.

    Notes
    -----
    Nothing is read where the dtype holds every element of the array's dtype.
    """
    try:
        dtypes.check_range(array, dtype, what)
    except ValueError as error:
        raise DtypeError(str(error)) from None
