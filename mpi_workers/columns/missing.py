"""The treatment of missing values: elements of a source that have no number.

`missing` is ``"error"``, ``"nan"`` or a number, in `send_matrix` and `load_matrix` alike.
"""

from __future__ import annotations

import contextlib
import numbers
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

Missing: TypeAlias = Any  # "error", "nan" or a number
ERROR, NAN = "error", "nan"
FILL = "fill them or drop their rows first"
OPTION = (
    f"{FILL}; or missing='nan' makes NaN of them, and missing=0 (or another number) this number"
)


def checked_missing(missing: Any) -> Missing:
    """The option as it is sent to ranks. Raises `ValueError` for other values."""
    if isinstance(missing, str) and missing in (ERROR, NAN):
        return missing
    if isinstance(missing, np.generic):
        missing = missing.item()
    if isinstance(missing, bool):
        return int(missing)
    if isinstance(missing, numbers.Number):
        return NAN if missing != missing else missing
    raise ValueError(f"missing={missing!r}: it must be 'error', 'nan' or a number")


def missing_of(text: str) -> Missing:
    """The option from a text: ``"nan"`` or a number; empty: an error."""
    if text in ("", ERROR, NAN):
        return text or ERROR
    for kind in (int, float):
        with contextlib.suppress(ValueError):
            return kind(text)
    return complex(text)


def dtype_with_missing(dtype: np.dtype[Any], missing: Missing) -> np.dtype[Any]:
    """The dtype of a column of this dtype that can have missing values: with NaN a float's."""
    if isinstance(missing, str) and missing == NAN and dtype.kind in "biu":
        return np.result_type(dtype, np.float32)
    return dtype


def nulls(what: str, count: int, remedy: str = OPTION) -> str:
    """The words about a column or an array (`what`) with nulls."""
    return f"{what} has nulls ({count}), which a matrix cannot represent: {remedy}"


def filled(
    values: NDArray[Any],
    valid: NDArray[np.bool_] | None,
    missing: Missing,
    what: str,
    dtype: np.dtype[Any] | None = None,
) -> NDArray[Any]:
    """Values with an element for each missing one, in a dtype of theirs; a copy if there are any.

    Parameters
    ----------
    values : ndarray
        Of which those that are not valid are arbitrary.
    valid : ndarray of bool, of the same shape, optional
        None: all of them.
    missing : "error", "nan" or a number
    what : str
        The column, for messages.
    dtype : numpy.dtype, optional
        Of the result. Default: `dtype_with_missing`.

    Raises
    ------
    ValueError
        If there are missing values and `missing` says so, or is no element of the dtype; if an
        integer would be rounded to make room for NaN.
    """
    wide = dtype_with_missing(values.dtype, missing) if dtype is None else dtype
    if valid is not None and isinstance(missing, str) and missing == ERROR:
        raise ValueError(nulls(what, int((~valid).sum())))
    found = values.astype(wide, copy=valid is not None)
    if values.dtype.kind in "iu" and wide.kind == "f" and values.dtype.itemsize >= wide.itemsize:
        with np.errstate(invalid="ignore"):
            same = found.astype(values.dtype) == values
        if not (same if valid is None else same | ~valid).all():
            raise ValueError(
                f"{what} has integers that {wide} would round, beside which there is no room for "
                "NaN: choose a number for missing=, or cast the column to float64"
            )
    if valid is not None:
        found[~valid] = element_for(missing, wide, what)
    return found


def element_for(missing: Missing, dtype: np.dtype[Any], what: str) -> Any:
    """The element of a dtype that stands for a missing value. Raises `ValueError`."""
    value = np.nan if isinstance(missing, str) else missing
    if dtype.kind in "mM" and not isinstance(missing, str):
        raise ValueError(
            f"missing={value!r} is no element of {what}, which has dtype {dtype}: 'nan' makes NaT"
        )
    element = None
    with np.errstate(all="ignore", over="raise"):  # 1e300 is no float32: it would be inf
        try:
            if dtype.kind == "c" or not np.iscomplexobj(value):  # 1j would lose its imaginary part
                element = np.asarray(value).astype(dtype)[()]
        except (ArithmeticError, TypeError, ValueError):
            pass
    if element is None or (dtype.kind in "biu" and element != value):
        raise ValueError(f"missing={value!r} is no element of {what}, which has dtype {dtype}")
    return element
