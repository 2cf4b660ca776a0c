"""The dtypes that a matrix can have, and the elements that one cannot hold."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

# Their codes in C and Fortran (alchemist.h) are places here, from 1.
DTYPES: tuple[str, ...] = (
    "float32", "float64", "complex64", "complex128", "int32", "int64", "bool",
    "int8", "int16", "uint8", "uint16", "uint32", "uint64", "float16",
)  # fmt: skip
AT_ONCE = 1 << 16  # elements that are checked
ADVICE = {  # for elements that a dtype cannot hold
    "int64": "choose float64, which rounds, or subtract an offset",
    "uint64": "choose float64, which rounds, or subtract an offset",
    "float16": "choose float32",
    "float32": "choose float64",
    "complex64": "choose complex128",
}


def is_time(dtype: np.dtype[Any]) -> bool:
    """Whether elements are dates (datetime64) or durations (timedelta64)."""
    return dtype.kind in "mM"


def stored_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """The dtype on the ranks: dates and durations are the int64 counts of their unit there."""
    return np.dtype(np.int64) if is_time(dtype) else dtype


def common_dtype(dtypes: Sequence[np.dtype[Any]], names: Sequence[str] = ()) -> np.dtype[Any]:
    """The dtype that holds elements of all these, as NumPy promotes them.

    Raises `ValueError` for dates, durations and numbers together: NumPy would make durations of
    the numbers. `names` are those of the columns.
    """
    if (dates := [is_time(dtype) for dtype in dtypes]) and any(dates):
        first = dates.index(True)
        for j, dtype in enumerate(dtypes):
            if dtype.kind != dtypes[first].kind:
                told = [
                    f"column {names[k]!r} ({dtypes[k]})" if names else str(dtypes[k])
                    for k in (first, j)
                ]
                raise ValueError(
                    f"{told[0]} and {told[1]} have no common dtype: send dates, durations and "
                    "numbers as matrices of their own"
                )
    try:
        return np.result_type(*dtypes)
    except TypeError as error:  # years and days
        raise ValueError(f"{error}: convert them to one unit") from None


def check_dtype(dtype: Any) -> np.dtype[Any]:
    """`dtype` as a NumPy dtype. Raises `ValueError` if a matrix cannot have it."""
    try:
        found: np.dtype[Any] = np.dtype(dtype)
    except TypeError:
        raise ValueError(f"{dtype!r} is not a dtype") from None
    if found.name not in DTYPES:
        raise ValueError(f"dtype {found}: it must be one of {', '.join(DTYPES)}")
    return found


def chosen_dtype(have: np.dtype[Any], wanted: Any = None) -> np.dtype[Any]:
    """The dtype of the matrix that elements of dtype `have` become; by default the same one.

    Raises `ValueError` if a matrix cannot have the dtype, or the elements cannot be cast to it.
    """
    if is_time(have):
        try:
            time = have if wanted is None else np.dtype(wanted)
        except TypeError:
            raise ValueError(f"{wanted!r} is not a dtype") from None
        if time.kind != have.kind:
            raise ValueError(
                f"elements of dtype {have} cannot become {time}: leave out dtype=, and "
                ".astype('int64') of the handle gives the counts of their unit"
            )
        if np.datetime_data(time)[0] == "generic":  # NumPy's: of any unit
            time = have
        return time.newbyteorder("=")  # which elements it holds is checked when they are sent
    if wanted is None and have.kind in "fc" and have.name not in DTYPES:
        nearest = "complex128" if have.kind == "c" else "float64"
        raise ValueError(
            f"a matrix cannot have dtype {have}: choose one to convert to, e.g. dtype={nearest!r}"
        )
    dtype = check_dtype(have if wanted is None else wanted)
    if not castable(have, dtype):
        remedy = ".real" if have.kind == "c" else f".astype({dtype.name!r})"
        raise ValueError(
            f"elements of dtype {have} cannot become {dtype} without loss: leave out dtype=, and "
            f"{remedy} of the handle converts"
        )
    return np.dtype(dtype.name)


def castable(have: np.dtype[Any], dtype: np.dtype[Any]) -> bool:
    """Whether elements can be sent as another dtype, if it holds each of them (`check_range`)."""
    if is_time(have) or is_time(dtype):
        return have.kind == dtype.kind
    if have.kind in "iuf" and dtype.kind in "iu":
        return True
    return have.kind in "biufc" and np.can_cast(have, dtype, "same_kind")


def check_range(array: NDArray[Any], dtype: np.dtype[Any], what: str, *, cut: bool = False) -> None:
    """Refuse an array (`what`) with an element that a dtype cannot hold.

    Rounding to another float is accepted. With `cut`, fractions may be cut off, as NumPy's
    `astype` and assignments do. Raises `ValueError`. Nothing is read where the dtype holds every
    element of the array's dtype.
    """
    if not array.size or not narrows(array.dtype, dtype):
        return
    if is_time(dtype):
        if len(lost := _lost_times(array.ravel(), dtype)):
            raise ValueError(
                f"{what} has the element {lost[0]}, which {dtype} cannot hold: choose another unit"
            )
        return
    if dtype.kind in "iu":
        limits = np.iinfo(dtype)
        for value in (array.real.min().item(), array.real.max().item()):
            if not limits.min - 1 < value < limits.max + 1:
                raise _out_of_range(what, value, dtype)
        if array.dtype.kind == "f" and not cut:
            pieces: Any = np.nditer(array, ["external_loop", "buffered"], buffersize=AT_ONCE)
            for piece in pieces:
                if (wrong := piece[piece != np.trunc(piece)]).size:
                    raise _out_of_range(what, wrong[0].item(), dtype)
        return
    most = float(np.finfo(dtype).max)
    for part in (array.real, array.imag) if array.dtype.kind == "c" else (array,):
        if not np.isfinite([part.min(), part.max()]).all():
            part = part[np.isfinite(part)]  # nan and infinity stay what they are
        for value in (part.min(initial=0).item(), part.max(initial=0).item()):
            if abs(value) > most:
                raise _out_of_range(what, float(value), dtype)


def _lost_times(array: NDArray[Any], dtype: np.dtype[Any]) -> NDArray[Any]:
    """Dates or durations that a dtype of another unit does not hold; not always all of them."""
    try:
        lost: NDArray[Any] = array[
            (array.astype(dtype).astype(array.dtype) != array) & ~np.isnat(array)
        ]
    except OverflowError:  # of NumPy 2.5, which does not tell the element
        if array.size == 1:
            return array
        first, second = np.array_split(array, 2)
        lost = _lost_times(first, dtype)
        return lost if lost.size else _lost_times(second, dtype)
    return lost


def narrows(have: np.dtype[Any], want: np.dtype[Any]) -> bool:
    """Whether some elements of dtype `have` are out of the range of `want`."""
    if is_time(want):
        return have != want
    if want.kind in "iu":
        return not np.can_cast(have, want, "safe")
    if have.kind in "iu" and want.kind in "fc":  # 100000 is beyond float16
        return int(np.iinfo(have).max) > float(np.finfo(want).max)
    return have.kind in "fc" and want.kind in "fc" and np.finfo(have).maxexp > np.finfo(want).maxexp


def _out_of_range(what: str, value: float, dtype: np.dtype[Any]) -> ValueError:
    advice = ADVICE.get(dtype.name, "choose int64" if dtype.kind in "iu" else "scale the elements")
    if not np.isfinite(value):
        advice = "replace it first, for example with np.nan_to_num"
    elif dtype.kind in "iu" and value != int(value):
        advice = f"leave out dtype=, and .astype({dtype.name!r}) of the handle cuts fractions off"
    return ValueError(f"{what} has the element {value!r}, which {dtype} cannot hold: {advice}")
