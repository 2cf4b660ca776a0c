"""Conversion of a file's elements to the dtype of a matrix, with a check of their range.

Rounding to fewer digits is allowed. A number that the dtype cannot hold is an error: NumPy's
casts would wrap integers and turn large floats into infinities.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpi_workers.failures import Failure
from mpi_workers.matrix.dist_matrix import DTYPES

Array = NDArray[Any]


def narrows(have: np.dtype[Any], want: np.dtype[Any]) -> bool:
    """Whether some numbers of dtype `have` are out of the range of `want`."""
    if want.kind == "i":
        return not np.can_cast(have, want, "safe")
    if have.kind in "fc":
        return np.finfo(have).maxexp > np.finfo(want).maxexp
    return False


def converted(values: Array, dtype: np.dtype[Any], path: str) -> Array:
    """The elements, in `dtype` or in a dtype that converts to it without overflow.

    Raises
    ------
    Failure
        DtypeError, if one is out of range; names it.
    """
    if not values.size or not narrows(values.dtype, dtype):
        return values
    if dtype.kind == "i":
        limits = np.iinfo(dtype)
        low, high = int(values.min()), int(values.max())
        if low < limits.min or high > limits.max:
            raise _out_of_range(low if low < limits.min else high, values.dtype, dtype, path)
        return values
    with np.errstate(over="ignore"):
        found = values.astype(dtype)
    if np.isinf(found).any():
        overflow = np.isinf(found.real) & ~np.isinf(values.real)
        overflow |= np.isinf(found.imag) & ~np.isinf(values.imag)
        if overflow.any():
            raise _out_of_range(values[overflow].flat[0], values.dtype, dtype, path)
    return found


def _out_of_range(value: Any, have: np.dtype[Any], want: np.dtype[Any], path: str) -> Failure:
    wider = have.name if have.name in DTYPES else "float64"
    return Failure(
        "DtypeError", f"{path}: {value} is out of range of {want}: load it as dtype={wider!r}"
    )
