"""The dtype of a matrix: which dtypes there are, and which one a source gets."""

from __future__ import annotations

from typing import Any

import numpy as np

from alchemist_ray.errors import DtypeError
from mpi_workers.matrix.dist_matrix import DTYPES, check_dtype

__all__ = ["DTYPES", "chosen_dtype"]


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
        dtype = check_dtype(source if wanted is None else wanted)
    except ValueError as error:
        hint = ""
        if wanted is None and source.kind in "biuf":
            hint = "; choose one to convert to, e.g. send_matrix(..., dtype='float64')"
        raise DtypeError(f"{error}{hint}") from None
    if source.kind not in "biufc" or not np.can_cast(source, dtype, "same_kind"):
        raise DtypeError(f"elements of dtype {source} cannot be sent as {dtype} without loss")
    return np.dtype(dtype.name)
