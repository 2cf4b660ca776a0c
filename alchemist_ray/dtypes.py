"""The dtype of a matrix: which dtypes there are, and which one a source gets."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from alchemist_ray.errors import DtypeError
from mpi_workers.matrix import dist_matrix
from mpi_workers.matrix.dist_matrix import DTYPES

__all__ = ["DTYPES", "check_range", "check_unmasked", "chosen_dtype"]

ADVICE = {  # for elements that a dtype cannot hold
    "int32": "choose int64",
    "int64": "choose float64, which rounds, or subtract an offset",
    "float32": "choose float64",
    "complex64": "choose complex128",
}


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
        return dist_matrix.chosen_dtype(source, wanted)
    except ValueError as error:
        raise DtypeError(str(error)) from None


def check_unmasked(array: Any, what: str) -> None:
    """Refuse a masked array of which elements have no value: `numpy.asarray` takes what is below.

    Raises
    ------
    DtypeError
    """
    if isinstance(array, np.ma.MaskedArray) and array.mask.any():
        raise DtypeError(f"{what} is masked, and has elements without a value: fill them first")


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
    if not array.size or np.can_cast(array.dtype, dtype, "safe"):
        return
    if dtype.kind == "i":
        limits = np.iinfo(dtype)
        for value in (int(array.min()), int(array.max())):
            if not limits.min <= value <= limits.max:
                raise _out_of_range(what, value, dtype)
    elif array.dtype.kind in "fc" and np.finfo(array.dtype).max > np.finfo(dtype).max:
        parts = (array.real, array.imag) if array.dtype.kind == "c" else (array,)
        for part in parts:
            finite = np.isfinite(part)
            low = np.min(part, where=finite, initial=0.0)
            high = np.max(part, where=finite, initial=0.0)
            worst = low if -low > high else high
            if abs(worst) > np.finfo(dtype).max:
                raise _out_of_range(what, float(worst), dtype)


def _out_of_range(what: str, value: float, dtype: np.dtype[Any]) -> DtypeError:
    return DtypeError(
        f"{what} has the element {value!r}, which {dtype} cannot hold: "
        + ADVICE.get(dtype.name, "scale the elements")
    )
