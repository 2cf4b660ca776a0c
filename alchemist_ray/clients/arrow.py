"""Arrow and polars: a matrix as a table, which other packages read by Arrow's protocol."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np

from alchemist_ray.attached.matrix_ref import MatrixRef
from alchemist_ray.attached.registry import gang_of
from alchemist_ray.errors import DtypeError, LibraryLoadError, ShapeError
from alchemist_ray.transfer.fetching import fetch
from mpi_workers.columns.arrow_columns import UNNAMED
from mpi_workers.matrix import copy_kernels

__all__ = ["to_arrow", "to_polars"]


def to_arrow(handle: MatrixRef, dtype: Any = None) -> Any:
    """The elements as a table: fetched into this process, each column contiguous.

    Parameters
    ----------
    handle : MatrixRef
        Of shape (m, n), or (m,): one column.
    dtype : dtype, optional
        The datetime64 or timedelta64 of which the elements are counts.

    Returns
    -------
    pyarrow.Table
        Its columns have the names of the handle's, if these differ from each other; else c0, c1,
        ..., as in Parquet, and then `send_matrix` gives the matrix no names. Codes of categories
        become dictionaries.

    Raises
    ------
    ShapeError
        For other numbers of axes.
    DtypeError
        For complex numbers, which Arrow does not have.
    LibraryLoadError
        Without pyarrow.
    """
    if len(handle.shape) not in (1, 2):
        raise ShapeError(
            f"{handle.name} has shape {handle.shape}, and a table has rows and columns: "
            "A.reshape(m, -1) makes a matrix"
        )
    if handle.dtype.kind == "c":
        raise DtypeError(
            f"{handle.name} has dtype {handle.dtype}, and Arrow has no complex numbers: convert "
            "its real and imaginary parts separately"
        )
    pyarrow = _package("pyarrow")
    rows = fetch(gang_of(handle), handle).reshape(handle.stored_shape)
    values = np.empty_like(rows, order="F")
    copy_kernels.copy(values, rows)
    n = values.shape[1]
    named = len(set(handle.columns)) == n
    names = list(map(str, handle.columns)) if named else [f"c{j}" for j in range(n)]
    if dtype is None:
        labels = handle.columns if named else [""] * n
        arrays = [_column(pyarrow, values[:, j], label) for j, label in enumerate(labels)]
    else:
        arrays = [_times(pyarrow, values[:, j].view(dtype)) for j in range(n)]
    table = pyarrow.table(arrays, names=names)
    return table if named else table.replace_schema_metadata({UNNAMED: b"c0, c1, ..."})


def _column(pyarrow: Any, values: Any, name: str) -> Any:
    categories = getattr(name, "categories", ())
    if not categories:
        return pyarrow.array(values)
    with np.errstate(invalid="ignore"):  # NaN
        codes = values.astype(np.int32)
    known = (codes == values) & (codes >= 0) & (codes < len(categories))
    return pyarrow.DictionaryArray.from_arrays(
        pyarrow.array(codes, mask=~known), pyarrow.array(categories)
    )


def _times(pyarrow: Any, values: Any) -> Any:
    try:
        return pyarrow.array(values)  # NaT is a null
    except pyarrow.ArrowException as error:
        words = f"Arrow: {error}; A.astype('M8[s]') or A.astype('m8[s]') has one of its units"
        raise DtypeError(words) from None


def to_polars(handle: MatrixRef, dtype: Any = None) -> Any:
    """The elements as a `polars.DataFrame`; as `to_arrow`, which it needs."""
    return _package("polars").from_arrow(to_arrow(handle, dtype))


def _package(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise LibraryLoadError(f"this needs {name}: pip install {name} ({error})") from error
