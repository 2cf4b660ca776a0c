"""Columns of pandas' frames as NumPy arrays; pandas itself is not imported.

NaN in a column of NumPy's floats is a number. Columns that store missing values apart (nullable,
of Arrow, categories) follow the rules of `arrow_columns`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpi_workers.columns.arrow_columns import (
    CODE_DTYPE,
    BadShape,
    Column,
    named,
    not_numeric,
)
from mpi_workers.columns.arrow_memory import read, read_schema
from mpi_workers.columns.missing import ERROR, Missing, dtype_with_missing, filled
from mpi_workers.matrix.dtypes import check_range, chosen_dtype, common_dtype, is_time


def names_of(frame: Any) -> list[str]:
    """Names of a DataFrame's columns, or the name of a Series; empty if it has none."""
    if frame.ndim == 2:
        return [str(name) for name in frame.columns]
    return ["" if frame.name is None else str(frame.name)]


def dtypes_of(frame: Any, missing: Missing = ERROR) -> list[np.dtype[Any]]:
    """The dtype of each column. Raises `ValueError`; `BadShape` if there are no columns."""
    dtypes = list(frame.dtypes) if frame.ndim == 2 else [frame.dtype]
    if not dtypes:
        raise BadShape("the data frame has no columns: there is nothing to send")
    pairs = zip(names_of(frame), dtypes, strict=True)
    return [_dtype(name, dtype, missing) for name, dtype in pairs]


def _dtype(name: str, dtype: Any, missing: Missing) -> np.dtype[Any]:
    if isinstance(dtype, np.dtype):
        found = dtype
    elif hasattr(dtype, "tz"):  # the instants, in UTC
        found = dtype = np.dtype(f"M8[{dtype.unit}]")
    elif hasattr(dtype, "categories"):
        its = labels_of(name, dtype.categories)
        return dtype_with_missing(CODE_DTYPE if isinstance(its, list) else its.dtype, missing)
    elif hasattr(dtype, "pyarrow_dtype"):
        return Column(name, read_schema(dtype.pyarrow_dtype)).dtype(missing)
    elif str(dtype).startswith("Sparse["):
        raise ValueError(
            f"{named(name)} is {dtype}, and as a dense one it may be large: send "
            "frame.sparse.to_coo(), which is a sparse matrix, or "
            f"frame.astype({{{name!r}: {str(dtype.subtype)!r}}})"
        )
    else:
        found = getattr(dtype, "numpy_dtype", np.dtype(object))
    if found.kind not in "biufcmM":
        raise ValueError(not_numeric(name, dtype))
    return found if found is dtype else dtype_with_missing(found, missing)


def labels_of(name: str, categories: Any) -> NDArray[Any] | list[str]:
    """The categories of a column: numbers or dates as an array, others as texts that codes count.

    Raises `ValueError` if some are texts and others not, or if two have the same text.
    """
    plain, column = list(categories), categories.to_series()
    if categories.dtype != object:
        with contextlib.suppress(ValueError):  # texts, intervals
            dtypes_of(column)
            return values_of(column)
    elif plain and not any(isinstance(one, str) for one in plain):
        match categories.inferred_type:
            case "date":
                return np.array(plain, "M8[D]")
            case "decimal":
                return np.array(plain, np.float64)
        if (found := np.asarray(plain)).dtype.kind in "biufc":
            return found
    texts = list(map(str, plain))
    mixed = len({isinstance(one, str) for one in plain}) > 1
    if mixed or len(set(texts)) < len(texts):
        kinds = ", ".join(sorted({type(one).__name__ for one in plain}))
        raise ValueError(
            f"{named(name)} has categories of several types ({kinds}): make them of one type, for "
            "example by rename_categories(str)"
        )
    return texts


def values_of(
    frame: Any,
    missing: Missing = ERROR,
    categories: dict[int, Sequence[str]] | None = None,
    wanted: Any = None,
) -> NDArray[Any]:
    """The elements of a DataFrame or Series, shape (m, n) or (m,), without the index.

    Parameters
    ----------
    frame : DataFrame or Series
    missing : "error", "nan" or a number
    categories : dict, optional
        Of each column that has some, by its position: those that codes count first, to which
        others that are met are added.
    wanted : dtype, optional
        Of dates and durations; default: the finest unit of the columns.

    Raises
    ------
    ValueError
        For a column that is not of numbers, has missing values that `missing` does not allow, or
        a date that the unit of the others cannot hold.
    """
    dtypes = dtypes_of(frame, missing)
    dtype = common_dtype(dtypes, names_of(frame))
    dtype = chosen_dtype(dtype, wanted) if is_time(dtype) else dtype
    kinds = list(frame.dtypes) if frame.ndim == 2 else [frame.dtype]
    if all(isinstance(kind, np.dtype) for kind in kinds) and not is_time(dtype):
        return np.asarray(frame.to_numpy(dtype=dtype))
    columns = [frame] if frame.ndim == 1 else [frame.iloc[:, j] for j in range(len(kinds))]
    found, known = [], {} if categories is None else categories
    for j, (name, column) in enumerate(zip(names_of(frame), columns, strict=True)):
        kind = column.dtype
        its = list[str]()
        if isinstance(kind, np.dtype):
            values = column.to_numpy()
        elif hasattr(kind, "tz"):
            values = column.to_numpy(dtypes[j])
        elif hasattr(kind, "pyarrow_dtype") and hasattr(column, "__arrow_c_stream__"):
            field, parts = read(column)
            decoded, its = Column(name, field).decoded(parts, missing, known.get(j, ()))
            parts_with_rows = [part for part in decoded if len(part)]
            values = np.concatenate(parts_with_rows or [np.empty(0, dtypes[j])])
        elif hasattr(kind, "categories"):
            codes = np.asarray(column.cat.codes)
            valid = None if (codes >= 0).all() else codes >= 0
            own = labels_of(name, kind.categories)
            if isinstance(own, list):
                its = list(dict.fromkeys([*known.get(j, ()), *own]))
                place = {word: k for k, word in enumerate(its)}
                own = np.array([place[word] for word in own], CODE_DTYPE)
            words = own if len(own) else np.zeros(1, own.dtype)
            values = filled(words[codes], valid, missing, named(name), dtypes[j])
        else:
            absent = np.asarray(column.isna())
            plain = getattr(kind, "numpy_dtype", np.dtype(object))
            stored = column.to_numpy(plain, na_value=plain.type(0))
            valid = ~absent if absent.any() else None
            values = filled(stored, valid, missing, named(name), dtypes[j])
        if its:
            known[j] = its
        check_range(values, dtype, named(name))
        found.append(values.reshape(len(values), -1) if values.size else values.reshape(0, 1))
    together = np.concatenate(found, axis=1, dtype=dtype)
    return together[:, 0] if frame.ndim == 1 and together.shape[1] == 1 else together
