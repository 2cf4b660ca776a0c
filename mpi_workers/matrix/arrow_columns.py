"""Columns of Arrow as NumPy arrays: one rule for tables, frames, blocks and Parquet files.

A column has numbers and no nulls: an array has no place for them, and no number is changed to make
one. Nulls that pandas made of NaN are NaN again.
"""

from __future__ import annotations

import json
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

# NumPy's dtypes of Arrow's types that are numbers.
DTYPES_OF_ARROW = {
    "bool": "bool", "halffloat": "float16", "float": "float32", "double": "float64",
    "int8": "int8", "int16": "int16", "int32": "int32", "int64": "int64",
    "uint8": "uint8", "uint16": "uint16", "uint32": "uint32", "uint64": "uint64",
}  # fmt: skip
TIMES = ("date", "time", "duration")  # how the names of Arrow's types begin: dates and durations
FILL = "fill them or drop their rows (fill_null, drop_null)"
UNNAMED = b"alchemist.unnamed"  # the key of a Parquet file whose matrix had no names of columns


class Column(NamedTuple):
    """A column: its name, its type as Arrow prints it, whether its nulls are NaN of pandas."""

    name: str
    type: str
    nan: bool = False

    def dtype(self) -> np.dtype[Any]:
        """Its dtype. Raises `ValueError` if it is not of numbers."""
        if self.type not in DTYPES_OF_ARROW:
            raise ValueError(not_numeric(self.name, self.type))
        return np.dtype(DTYPES_OF_ARROW[self.type])

    def values(self, stored: Any) -> NDArray[Any]:
        """The elements of a `pyarrow.ChunkedArray`. Raises `ValueError` for nulls."""
        if stored.null_count and not self.nan:
            raise ValueError(nulls(self.name, stored.null_count, FILL))
        found: NDArray[Any] = stored.to_numpy()
        return found


class Columns(NamedTuple):
    """The columns of a table, without an index of pandas or Dask, and whether they have names."""

    columns: list[Column]
    named: bool


def columns_of(schema: Any, *, index: bool = False) -> Columns:
    """The columns of a `pyarrow.Schema`.

    An index that pandas or Dask has written is a column only if `index` says so. Columns that
    pandas has numbered have no names.
    """
    metadata = schema.metadata or {}
    pandas = json.loads(metadata.get(b"pandas", b"{}"))
    # A range is no column; pandas describes it by a dict.
    hidden = set() if index else {str(name) for name in pandas.get("index_columns", ())}
    floats = {
        about["field_name"] for about in pandas.get("columns", ())
        if str(about.get("numpy_type")).startswith("float")
    }  # fmt: skip
    levels = [about.get("pandas_type") for about in pandas.get("column_indexes", ())]
    columns = [Column(str(f.name), str(f.type), f.name in floats) for f in schema]
    columns = [column for column in columns if column.name not in hidden]
    return Columns(columns, UNNAMED not in metadata and levels != ["int64"])


def not_numeric(name: str, kind: Any) -> str:
    """The words about a column that is not of numbers."""
    remedy = "drop or convert it"
    if str(kind).startswith(TIMES):
        remedy = "drop it, or cast it to an integer: the count of its unit"
    if str(kind).startswith("decimal"):
        remedy = "drop it, or cast it to float64"
    return f"{_named(name)} has type {kind}, which is not numeric: {remedy}"


def nulls(name: str, count: int, remedy: str) -> str:
    """The words about a column with nulls."""
    return f"{_named(name)} has nulls ({count}), which a matrix cannot represent: {remedy}"


def _named(name: str) -> str:
    return f"column {name!r}" if name else "the column"


def count_nulls(data: Any) -> int:
    """How many nulls an array of pyarrow, polars or pandas has; 0 for others. NaN is a number."""
    if type(data).__module__.partition(".")[0] == "pandas" and hasattr(data, "isna"):
        if data.ndim == 2:
            return sum(count_nulls(data.iloc[:, j]) for j in range(data.shape[1]))
        return 0 if isinstance(data.dtype, np.dtype) else int(data.isna().sum())
    count = getattr(data, "null_count", 0)
    count = count() if callable(count) else count  # of polars
    return count if isinstance(count, int) else 0


def is_arrow(data: Any) -> bool:
    """Whether data gives its columns by Arrow's protocol. pandas does, but with NaN as nulls."""
    protocol = hasattr(data, "__arrow_c_stream__") or hasattr(data, "__arrow_c_array__")
    return protocol and not hasattr(data, "iloc")


def from_arrow(data: Any) -> tuple[NDArray[Any], list[str]]:
    """The elements and the names of columns of a table or column that `is_arrow`.

    Returns
    -------
    array : ndarray, shape (m, n) or (m,)
        In the dtype that holds all columns, as NumPy promotes them.
    names : list of str

    Raises
    ------
    ValueError
        For a column that is not of numbers or has nulls, with its name, and without columns.
    ImportError
        Without pyarrow.
    """
    import pyarrow  # noqa: PLC0415 - optional

    if not any(hasattr(data, name) for name in ("columns", "column_names", "schema")):
        column = pyarrow.chunked_array([data] if isinstance(data, pyarrow.Array) else data)
        about = Column(str(getattr(data, "name", None) or ""), str(column.type))
        about.dtype()
        return about.values(column), [about.name] if about.name else []
    table = pyarrow.table(data)
    columns, named = columns_of(table.schema)
    if not columns:
        raise ValueError("the table has no columns: there is nothing to send")
    shown = {column.name for column in columns}
    kept = [table.column(j) for j, name in enumerate(table.schema.names) if str(name) in shown]
    found = np.empty((len(table), len(columns)), np.result_type(*(c.dtype() for c in columns)), "F")
    for j, (column, stored) in enumerate(zip(columns, kept, strict=True)):
        found[:, j] = column.values(stored)
    return found, [column.name for column in columns] if named else []
