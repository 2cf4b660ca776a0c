"""The dtype that a matrix gets from its source.

The table of dtypes is `DTYPES` in `mpi_workers.matrix.dtypes`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

import mpi_workers.columns.missing
from alchemist_ray.errors import BadArgumentError, DtypeError, ShapeError
from mpi_workers.columns import arrow_columns, pandas_columns
from mpi_workers.columns.missing import ERROR, FILL, OPTION, Missing, filled, nulls
from mpi_workers.matrix import dtypes as matrix_dtypes
from mpi_workers.matrix.dtypes import DTYPES

__all__ = [
    "DTYPES", "as_array", "as_numbers", "check_range", "check_unmasked", "checked_missing",
    "chosen_dtype", "common_dtype", "frame_values", "open_table", "refusals",
]  # fmt: skip


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
        return matrix_dtypes.chosen_dtype(source, wanted)
    except ValueError as error:
        raise DtypeError(str(error)) from None


def common_dtype(dtypes: Iterable[np.dtype[Any]]) -> np.dtype[Any]:
    """See `dtypes.common_dtype` of the ranks' package. Raises `DtypeError`."""
    with refusals():
        return matrix_dtypes.common_dtype(list(dtypes))


def as_numbers(array: NDArray[Any]) -> NDArray[Any]:
    """An array of numbers, dates or durations.

    Raises
    ------
    DtypeError
        If its elements are something else.
    """
    if array.dtype.kind not in "biufcmM":
        raise DtypeError(
            f"elements of dtype {array.dtype} are not numbers; a matrix has one of the dtypes "
            f"{', '.join(DTYPES)}; if all of them are numbers, x.astype(float) makes floats"
        )
    return array


def checked_missing(missing: Any) -> Missing:
    """The option ``missing=``, as it is sent to ranks. Raises `BadArgumentError`."""
    try:
        return mpi_workers.columns.missing.checked_missing(missing)
    except ValueError as error:
        raise BadArgumentError(str(error)) from None


def as_array(data: Any, what: str, missing: Missing = ERROR) -> tuple[NDArray[Any], list[str]]:
    """What NumPy makes of data (`what`), and the names of its columns, if it is a table of Arrow.

    Raises
    ------
    DtypeError
        For masked elements and nulls, if `missing` has no value for them; for a column of Arrow
        that is not of numbers, or of categories, whose codes would lose their meaning; for an
        object of which NumPy makes no array, such as a tensor with a gradient.
    ShapeError
        For lists of different lengths.
    """
    if arrow_columns.is_arrow(data):
        table = open_table(data, missing)
        _refuse_categories(table.categories, what)
        with refusals():
            return arrow_columns.gathered(table), table.names
    if hasattr(data, "iloc") and hasattr(data, "dtypes"):
        found: dict[int, Sequence[str]] = {}
        values = frame_values(data, missing, found)
        _refuse_categories(found, what)
        return values, []
    if isinstance(data, np.ma.MaskedArray) and missing != ERROR:
        mask = np.ma.getmaskarray(data)
        with refusals():
            return filled(data.data, ~mask if mask.any() else None, missing, what), []
    check_unmasked(data, what, OPTION)
    try:
        return np.asarray(data), []
    except (ValueError, TypeError, RuntimeError) as error:
        if isinstance(data, Sequence):
            raise ShapeError(f"not a matrix: {error}") from None
        words = f"a {type(data).__name__} cannot become a NumPy array: {error}"
        raise DtypeError(words) from None


def _refuse_categories(found: Mapping[int, Any], what: str) -> None:
    if found:
        raise DtypeError(
            f"{what} has categories (in column {min(found)}), whose codes each block would count "
            "from 0: send the whole table, a Dataset of Ray, or numbers that all blocks agree on"
        )


def open_table(data: Any, missing: Missing = ERROR) -> arrow_columns.Table:
    """The columns of a table or column of Arrow's protocol. Raises `DtypeError`, `ShapeError`."""
    with refusals():
        return arrow_columns.open_table(data, missing)


def frame_values(
    frame: Any,
    missing: Missing = ERROR,
    categories: dict[int, Sequence[str]] | None = None,
    wanted: Any = None,
) -> NDArray[Any]:
    """See `pandas_columns.values_of`. Raises `DtypeError`, `ShapeError`."""
    with refusals():
        return pandas_columns.values_of(frame, missing, categories, wanted)


@contextlib.contextmanager
def refusals(fitting: str = "") -> Iterator[None]:
    """Refusals of columns as errors of this package; `fitting` is a remedy for their lengths."""
    try:
        yield
    except arrow_columns.BadShape as error:
        raise ShapeError(f"{error}{fitting}") from None
    except ValueError as error:  # pyarrow's own are ValueErrors too
        raise DtypeError(str(error)) from None


def check_unmasked(data: Any, what: str, remedy: str = FILL) -> None:
    """Refuse masked elements, also of a list of arrays: `numpy.asarray` takes what is below a mask.

    Nulls of Arrow, polars and pandas are refused too, of which `numpy.asarray` makes NaN.

    Raises
    ------
    DtypeError
    """
    for array in data if isinstance(data, list | tuple) else (data,):
        if isinstance(array, np.ma.MaskedArray) and array.mask.any():
            words = "is masked, and has elements without a value"
            raise DtypeError(f"{what} {words} ({array.mask.sum()}): {remedy}")
        if count := arrow_columns.count_nulls(array):
            raise DtypeError(nulls(what, count, remedy))


def check_range(array: NDArray[Any], dtype: np.dtype[Any], what: str, *, cut: bool = False) -> None:
    """Refuse an array with an element that a dtype cannot hold; rounding is accepted.

    Parameters
    ----------
    array : ndarray
    dtype : numpy.dtype
        Of the matrix.
    what : str
        The array, for the message.
    cut : bool
        Fractions may be cut off in integers, as NumPy's `astype` and assignments do.

    Raises
    ------
    DtypeError
        If an integer is out of range or has a fraction, or a finite number would become infinite.

    Notes
    -----
    Nothing is read where the dtype holds every element of the array's dtype.
    """
    try:
        matrix_dtypes.check_range(array, dtype, what, cut=cut)
    except ValueError as error:
        raise DtypeError(str(error)) from None
