"""Spark's columns as NumPy arrays, and back. Runs in Spark's Python workers.

Pickled by value: needs NumPy, pyarrow and `mpi_workers` only. Arrow represents Spark's vectors and
matrices as structs, so dense values are contiguous and become an array without a copy.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa

from mpi_workers.failures import Failure
from mpi_workers.matrix.dist_matrix import check_range

Array = Any

SCALAR, VECTOR, LIST = "scalar", "vector", "list"
SPARSE, DENSE = 0, 1  # values of the field `type` of a vector or a matrix


def rows_of(
    columns: list[Any], names: list[str], kinds: list[str], widths: list[int], dtype: Any
) -> Array:
    """A batch of rows as an array of shape (k, sum of widths), to be sent as `dtype`.

    Raises `Failure`.
    """
    if len(columns) == 1 and kinds[0] != SCALAR:
        return fitting(
            _wide(columns[0], names[0], kinds[0], widths[0]), dtype, f"column {names[0]!r}"
        )
    block = np.empty((len(columns[0]), sum(widths)), dtype, order="F")
    start = 0
    for column, name, kind, width in zip(columns, names, kinds, widths, strict=True):
        if kind == SCALAR:
            _no_nulls(column, name)
            values = column.to_numpy(zero_copy_only=False)[:, np.newaxis]
        else:
            values = _wide(column, name, kind, width)
        block[:, start : start + width] = fitting(values, dtype, f"column {name!r}")
        start += width
    return block


def fitting(values: Array, dtype: Any, what: str) -> Array:
    """The values of a column or block, if the dtype can hold them. Raises `Failure`."""
    try:
        check_range(values, np.dtype(dtype), what)
    except ValueError as error:
        raise Failure("DtypeError", str(error)) from None
    return values


def _no_nulls(column: Any, name: str) -> None:
    if column.null_count:
        raise Failure(
            "DtypeError",
            f"column {name!r} has nulls, which a matrix cannot represent: fill or drop them first "
            "(df.na.fill, df.na.drop)",
        )


def _wide(column: Any, name: str, kind: str, width: int) -> Array:
    _no_nulls(column, name)
    if kind == LIST:
        return _lists(column, name, width)
    form, size, indices, values = column.flatten()
    forms = form.to_numpy(zero_copy_only=False)
    if (forms == DENSE).all():
        return _lists(values, name, width)
    block = np.zeros((len(column), width))
    dense = np.flatnonzero(forms == DENSE)
    if len(dense):
        block[dense] = _lists(values.take(pa.array(dense)), name, width)
    sparse = np.flatnonzero(forms == SPARSE)
    chosen = pa.array(sparse)
    for each in np.unique(size.take(chosen).to_numpy(zero_copy_only=False)):
        _same_width(int(each), name, width)
    picked = indices.take(chosen)
    places = picked.flatten().to_numpy(zero_copy_only=False)
    counts = picked.value_lengths().to_numpy(zero_copy_only=False)
    found = values.take(chosen).flatten().to_numpy(zero_copy_only=False)
    block[np.repeat(sparse, counts), places] = found
    return block


def _lists(column: Any, name: str, width: int) -> Array:
    lengths = column.value_lengths().to_numpy(zero_copy_only=False)
    for each in np.unique(lengths):
        _same_width(int(each), name, width)
    values = column.flatten()
    _no_nulls(values, name)
    return values.to_numpy(zero_copy_only=False).reshape(len(column), width)


def _same_width(found: int, name: str, width: int) -> None:
    if found != width:
        raise Failure(
            "ShapeError",
            f"column {name!r} has a row of {found} elements where others have {width}: the rows of "
            "a matrix must have the same length",
        )


def blocks_of(column: Any) -> list[Array]:
    """The blocks of a BlockMatrix in a batch as arrays; sparse blocks become dense."""
    form, rows, cols, pointers, indices, values, turned = column.flatten()
    found = []
    for k in range(len(column)):
        shape = (rows[k].as_py(), cols[k].as_py())
        swapped = turned[k].as_py()
        elements = values[k].values.to_numpy(zero_copy_only=False)
        if form[k].as_py() == DENSE:
            block = elements.reshape(shape, order="C" if swapped else "F")
        else:
            block = np.zeros(shape)
            across = indices[k].values.to_numpy(zero_copy_only=False)
            ends = pointers[k].values.to_numpy(zero_copy_only=False)
            down = np.repeat(np.arange(len(ends) - 1), np.diff(ends))
            where = (down, across) if swapped else (across, down)
            np.add.at(block, where, elements)
        found.append(block)
    return found


# --- the way back -----------------------------------------------------------------------


def vectors(rows: Array) -> Any:
    """Rows as Spark's dense vectors."""
    m, n = rows.shape
    flat = pa.array(np.ascontiguousarray(rows, np.float64).reshape(-1))
    values = pa.ListArray.from_arrays(pa.array(np.arange(m + 1) * n, pa.int32()), flat)
    return pa.StructArray.from_arrays(
        [
            pa.array(np.full(m, DENSE, np.int8)),
            pa.nulls(m, pa.int32()),
            pa.nulls(m, pa.list_(pa.int32())),
            values,
        ],
        ["type", "size", "indices", "values"],
    )


def matrix(block: Array) -> Any:
    """An array as a column with one of Spark's dense matrices."""
    m, n = block.shape
    flat = pa.array(np.asarray(block, np.float64).reshape(-1, order="C"))
    values = pa.ListArray.from_arrays(pa.array([0, m * n], pa.int32()), flat)
    return pa.StructArray.from_arrays(
        [
            pa.array([DENSE], pa.int8()),
            pa.array([m], pa.int32()),
            pa.array([n], pa.int32()),
            pa.nulls(1, pa.list_(pa.int32())),
            pa.nulls(1, pa.list_(pa.int32())),
            values,
            pa.array([True]),
        ],
        ["type", "numRows", "numCols", "colPtrs", "rowIndices", "values", "isTransposed"],
    )
