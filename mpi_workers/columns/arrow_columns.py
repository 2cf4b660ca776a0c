"""Columns of Arrow as NumPy arrays: one rule for tables, frames, blocks and Parquet files.

A column has numbers, or lists of equally many. An array has no place for a null: `missing` says
what becomes of one, and no number is changed to make room for it. Nulls that pandas made of NaN
are NaN again.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mpi_workers.columns import arrow_memory
from mpi_workers.columns.arrow_memory import Field, Part
from mpi_workers.columns.missing import ERROR, NAN, Missing, dtype_with_missing, filled
from mpi_workers.matrix.dtypes import check_range, common_dtype

Array = NDArray[Any]
Inner = tuple[int, ...]  # the shape of an element of a column; of a number `()`

NUMBERS = {
    "b": "bool", "e": "float16", "f": "float32", "g": "float64",
    "c": "int8", "s": "int16", "i": "int32", "l": "int64",
    "C": "uint8", "S": "uint16", "I": "uint32", "L": "uint64",
}  # fmt: skip
LISTS = {"+l": "list", "+L": "large_list"}
OTHERS = {  # the names of Arrow's types that are not numbers, by how their formats begin
    "u": "string", "U": "large_string", "vu": "string_view", "z": "binary", "Z": "large_binary",
    "vz": "binary_view", "w": "fixed_size_binary", "tdD": "date32[day]", "tdm": "date64[ms]",
    "tt": "time", "ts": "timestamp", "tD": "duration", "ti": "interval", "d:": "decimal",
    "+w": "fixed_size_list", "+s": "struct", "+m": "map", "+u": "union", "+r": "run_end_encoded",
    "+v": "list_view", "n": "null",
} | LISTS  # fmt: skip
EXACT_POWERS = 22  # of ten, in float64
CODE_DTYPE = np.dtype(np.int32)  # of categories
UNITS = {"s": "[s]", "m": "[ms]", "u": "[us]", "n": "[ns]"}
TEXTS = ("string", "large_string", "string_view")
TEXT_FORMATS = ("u", "U", "vu")
UNNAMED = b"alchemist.unnamed"  # the key of a Parquet file whose matrix had no names of columns


class BadShape(ValueError):
    """Columns whose rows are no rows of a matrix."""


class Column(NamedTuple):
    """A column: its name, its description, whether its nulls are NaN of pandas."""

    name: str
    field: Field
    nan: bool = False

    @property
    def inner(self) -> Inner | None:
        """The shape of an element, of a number ``()``; None if only the rows show it."""
        return _inner(self.field)

    @property
    def kind(self) -> tuple[Any, ...]:
        """Its name and its type."""
        return self.name, _formats(self.field), self.inner

    @property
    def coded(self) -> bool:
        """Whether it has codes of texts. A dictionary of numbers or dates is a column of those."""
        return _coded(self.field)

    def dtype(self, missing: Missing = ERROR) -> np.dtype[Any]:
        """Its dtype. Raises `ValueError` if it is not of numbers."""
        if self.coded:
            return dtype_with_missing(CODE_DTYPE, missing)
        base = _element(self.field)
        if _coded(base):
            raise ValueError(not_numeric(self.name, "list of categories"))
        if base.extension == "arrow.bool8":
            return dtype_with_missing(np.dtype(bool), missing)
        if base.format in NUMBERS:
            return dtype_with_missing(np.dtype(NUMBERS[base.format]), missing)
        if (time := _time_dtype(base.format)) is not None:
            return time
        if base.format == "n" or base.format.startswith("d:"):
            return np.dtype(np.float64)
        raise ValueError(not_numeric(self.name, type_name(base)))

    def decoded(
        self, parts: Iterable[Part], missing: Missing = ERROR, categories: Iterable[str] = ()
    ) -> tuple[list[Array], list[str]]:
        """Its elements, by part, without a copy where the buffers allow it; and its categories.

        Codes count `categories` first, and then those that are met.

        Raises
        ------
        ValueError
            If it is not of numbers, or has nulls and `missing` has no value for them; `BadShape`
            for lists of different lengths.
        """
        dtype = self.dtype(missing)
        what = named(self.name)
        missing = NAN if self.nan else missing
        found = list[Array]()
        codes = {word: k for k, word in enumerate(categories)}
        for part in parts:
            try:
                values, valid = _elements(self.field, part)
            except BadShape as error:
                raise BadShape(f"{what} {error}") from None
            if values.dtype.kind in "mM":
                lost = np.isnat(values)
                lost = lost if valid is None else lost & valid
                if lost.any():
                    raise ValueError(
                        f"{what} has {int(lost.sum())} elements of the least int64 that are not "
                        f"null, which {values.dtype} has for NaT: make them null, or cast the "
                        "column to another unit"
                    )
            if self.coded and self.field.dictionary is not None:
                values, known = _recoded(self.field.dictionary, part.dictionary(), codes, values)
                if known is not None:
                    valid = known if valid is None else known & valid
            found.append(filled(values, valid, missing, what, dtype))
        if len({array.shape[1:] for array in found if len(array)}) > 1:
            raise BadShape(f"{what} has rows of different shapes")
        return found, list(codes)

    def values(
        self, stored: Any, missing: Missing = ERROR, categories: Iterable[str] = ()
    ) -> Array:
        """All elements of an object with Arrow's protocol, of this column; see `decoded`."""
        _, parts = arrow_memory.read(stored)
        found = [one for one in self.decoded(parts, missing, categories)[0] if len(one)]
        if len(found) == 1:
            return found[0]
        return (
            np.concatenate(found)
            if found
            else np.empty((0, *(self.inner or ())), self.dtype(missing))
        )


class Columns(NamedTuple):
    """The columns of a table, without an index of pandas or Dask, and whether they have names."""

    columns: list[Column]
    named: bool


class Table(NamedTuple):
    """The elements of a table, or of a column alone.

    Attributes
    ----------
    columns : list of Column
    parts : list of list of ndarray, shapes (k, ...)
        By column, and part after part of its rows.
    dtype : numpy.dtype
        That holds all columns, as NumPy promotes them.
    shape : tuple of int
        Of the array.
    names : list of str
        Of its columns, if they have names.
    categories : dict
        Of the columns that have some, by position.
    """

    columns: list[Column]
    parts: list[list[Array]]
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    names: list[str]
    categories: dict[int, list[str]]


def columns_of(schema: Field, *, index: bool = False) -> Columns:
    """The columns of a table.

    An index that pandas or Dask has written is a column only if `index` says so. Columns that
    pandas has numbered have no names.
    """
    pandas = json.loads(schema.metadata.get(b"pandas", b"{}"))
    # A range is no column; pandas describes it by a dict.
    hidden = set() if index else {str(name) for name in pandas.get("index_columns", ())}
    floats = {
        about["field_name"] for about in pandas.get("columns", ())
        if str(about.get("numpy_type")).startswith(("float", "datetime64", "timedelta64"))
    }  # fmt: skip
    levels = [about.get("pandas_type") for about in pandas.get("column_indexes", ())]
    columns = [Column(field.name, field, field.name in floats) for field in schema.children]
    columns = [column for column in columns if column.name not in hidden]
    return Columns(columns, UNNAMED not in schema.metadata and levels != ["int64"])


def named(name: str) -> str:
    """A column, in messages."""
    return f"column {name!r}" if name else "the column"


def not_numeric(name: str, kind: Any) -> str:
    """The words about a column that is not of numbers."""
    remedy = "drop or convert it"
    if str(kind).startswith("time["):
        remedy = "drop it, or cast it to a duration or an integer"
    elif str(kind).startswith(TEXTS):
        remedy = "drop or convert it, or make it categorical, which sends its codes"
    return f"{named(name)} has type {kind}, which is not numeric: {remedy}"


def type_name(field: Field) -> str:
    """The type as Arrow prints it, without its parameters but for units."""
    kind = field.format
    begins = next(k for k in range(min(3, len(kind)), -1, -1) if kind[:k] in OTHERS or not k)
    name = OTHERS.get(kind[:begins], kind)
    return name + UNITS.get(kind[2:3], "") if kind[:2] in ("tt", "ts", "tD") else name


def count_nulls(data: Any) -> int:
    """How many nulls an array of pyarrow, polars or pandas has; 0 for others. NaN is a number."""
    if hasattr(data, "isna") and hasattr(data, "dtype") and not isinstance(data.dtype, np.dtype):
        return int(data.isna().sum())  # of a column of pandas
    if hasattr(data, "iloc"):
        width = data.shape[1] if data.ndim == 2 else 0
        return sum(count_nulls(data.iloc[:, j]) for j in range(width))
    count = getattr(data, "null_count", 0)
    count = count() if callable(count) else count  # of polars
    return count if isinstance(count, int) else 0


def is_arrow(data: Any) -> bool:
    """Whether data gives its columns by Arrow's protocol. pandas does, but with NaN as nulls."""
    protocol = hasattr(data, "__arrow_c_stream__") or hasattr(data, "__arrow_c_array__")
    return protocol and not hasattr(data, "iloc")


def open_table(data: Any, missing: Missing = ERROR) -> Table:
    """The elements of a table or column that `is_arrow`, where they are.

    Raises
    ------
    ValueError
        For a column that is not of numbers or has nulls, with its name; `BadShape` if rows have
        different lengths, or no columns.
    """
    schema, parts = arrow_memory.read(data)
    alone = schema.format != "+s"
    if alone:
        name = schema.name or str(getattr(data, "name", None) or "")
        columns = [Column(name, schema)]
        has_names = bool(name)
        children = [parts]
    else:
        columns, has_names = columns_of(schema)
        absent = [int((~rows).sum()) for part in parts if (rows := part.valid()) is not None]
        if any(absent):  # rows of an array of structs, below which the columns have elements
            raise ValueError(f"{sum(absent)} of its rows are null: drop them first")
        shown = {id(column.field) for column in columns}
        places = [k for k, field in enumerate(schema.children) if id(field) in shown]
        children = [[part.child(k) for part in parts] for k in places]
    if not columns:
        raise ValueError("the table has no columns: there is nothing to send")
    found, categories, inner = [], {}, []
    for j, column in enumerate(columns):
        arrays, codes = column.decoded(children[j], missing)
        found.append(arrays)
        if column.coded:
            categories[j] = codes
        inner.append(next((a.shape[1:] for a in arrays if len(a)), column.inner or ()))
    width, one = widths(columns, inner)
    shape = (sum(part.length for part in parts), *one)
    if alone and one == (1,) and not inner[0]:
        shape = shape[:1]
    # Codes mean nothing without their categories, which belong to a name.
    has_names = (has_names or bool(categories)) and len(columns) == width
    names = [column.name or f"c{j}" for j, column in enumerate(columns)] if has_names else []
    kinds = [column.dtype(missing) for column in columns]
    dtype = common_dtype(kinds, [column.name for column in columns])
    return Table(columns, found, dtype, shape, names, categories if len(columns) == width else {})


def categories_of(stored: Any) -> list[str]:
    """The categories that codes of a column count, in the order in which they are met."""
    field, parts = arrow_memory.read(stored)
    return Column("", field).decoded(parts, 0)[1] if _coded(field) else []


def widths(columns: Sequence[Column], inner: Sequence[Inner]) -> tuple[int, Inner]:
    """How many elements a row has, and its shape, for columns of elements of these shapes."""
    for column, its in zip(columns, inner, strict=True):
        if len(its) > 1 and len(columns) > 1:
            raise BadShape(
                f"{named(column.name)} has tensors of shape {its}, which are no part of a row "
                "beside other columns: send it alone, as an array of more axes"
            )
    width = sum(math.prod(its) for its in inner)
    return width, inner[0] if len(inner) == 1 and len(inner[0]) > 1 else (width,)


def gathered(table: Table, dtype: np.dtype[Any] | None = None) -> Array:
    """The elements of a table in one array, by default of the dtype that holds all columns.

    Raises `ValueError` for an element that the dtype cannot hold, as a date of a coarser unit.
    """
    rows, width = table.shape[0], math.prod(table.shape[1:])
    found = np.empty((rows, width), dtype or table.dtype, "F")
    col = 0
    for column, parts in zip(table.columns, table.parts, strict=True):
        row = count = 0
        for part in parts:
            check_range(part, found.dtype, named(column.name))
            count = math.prod(part.shape[1:])
            found[row : row + len(part), col : col + count] = part.reshape(len(part), count)
            row += len(part)
        col += count
    return found.reshape(table.shape)


# --- one part of a column ---


def _time_dtype(kind: str) -> np.dtype[Any] | None:
    """The dtype of a column of dates or durations; instants of a time zone are in UTC."""
    if kind in ("tdD", "tdm"):
        return np.dtype("M8[D]" if kind == "tdD" else "M8[ms]")
    if kind[:2] not in ("ts", "tD"):
        return None
    return np.dtype(("M8" if kind[1] == "s" else "m8") + UNITS[kind[2]])


def _coded(field: Field) -> bool:
    return field.dictionary is not None and field.dictionary.format in TEXT_FORMATS


def _element(field: Field) -> Field:
    """The elements of lists, and of dictionaries of numbers or dates."""
    while True:
        if field.dictionary is not None and not _coded(field):
            field = field.dictionary
        elif field.children and (field.format in LISTS or field.format.startswith("+w:")):
            (field,) = field.children
        else:
            return field


def _formats(field: Field) -> tuple[Any, ...]:
    if field.dictionary is not None and not _coded(field):
        return _formats(field.dictionary)
    return field.format, *map(_formats, field.children), _coded(field)


def _inner(field: Field) -> Inner | None:
    if field.dictionary is not None:
        return _inner(field.dictionary)
    if field.extension == "arrow.fixed_shape_tensor":
        shape, order = _tensor(field)
        return tuple(shape[axis] for axis in order) if order else shape
    if field.format in LISTS:
        return None
    if not field.format.startswith("+w:"):
        return ()
    below = _inner(field.children[0])
    return None if below is None else (int(field.format[3:]), *below)


def _elements(field: Field, part: Part) -> tuple[Array, NDArray[np.bool_] | None]:
    """The elements, shape (rows, ...), and which of them are not null; None: all."""
    kind, valid = field.format, part.valid()
    if field.dictionary is not None and not _coded(field):
        words, known = _elements(field.dictionary, part.dictionary())
        words = words if len(words) else np.zeros((1, *words.shape[1:]), words.dtype)
        places = np.clip(part.elements(NUMBERS[kind]), 0, len(words) - 1)  # those of nulls are any
        if known is not None:
            rows = known[places]
            valid = rows if valid is None else (rows.T & valid).T
        elif valid is not None and words.ndim > 1:
            valid = np.broadcast_to(valid, (*words.shape[:0:-1], len(valid))).T
        return words[places], valid
    if kind == "b":
        return part.bits(), valid
    if kind in NUMBERS:
        values = part.elements(NUMBERS[kind])
        return (values != 0 if field.extension == "arrow.bool8" else values), valid
    if (time := _time_dtype(kind)) is not None:
        counts = part.elements(np.int32 if kind == "tdD" else np.int64)
        return counts.astype(np.int64, copy=False).view(time), valid
    if kind == "n":
        return np.zeros(part.length), np.zeros(part.length, bool)
    if kind.startswith("d:"):
        return _decimals(kind, part), valid
    count = _list_length(kind, part, valid)
    below = part.child(0, count)
    if kind in LISTS:
        first = part.elements(np.int64 if kind == "+L" else np.int32, more=1)
        start = int(first[0]) if part.length else 0
        below = below._replace(offset=below.array.offset + start)
    values, inside = _elements(field.children[0], below)
    shape = (part.length, count, *values.shape[1:])
    if field.extension == "arrow.fixed_shape_tensor":
        shape = (part.length, *_tensor(field)[0])
    values = values.reshape(shape)
    if inside is not None or valid is not None:
        outer = np.ones(part.length, bool) if valid is None else valid
        inside = np.ones(shape, bool) if inside is None else inside.reshape(shape)
        valid = inside & outer.reshape(-1, *[1] * (len(shape) - 1))
    if field.extension == "arrow.fixed_shape_tensor" and (order := _tensor(field)[1]):
        axes = (0, *(axis + 1 for axis in order))
        return values.transpose(axes), None if valid is None else valid.transpose(axes)
    return values, valid


def _tensor(field: Field) -> tuple[Inner, list[int]]:
    """The shape of a tensor as it is stored, and the order of its axes; empty: as stored."""
    about = json.loads(field.metadata[b"ARROW:extension:metadata"])
    return tuple(about["shape"]), about.get("permutation") or []


def _list_length(kind: str, part: Part, valid: NDArray[np.bool_] | None) -> int:
    """How many elements each list of a part has."""
    if kind.startswith("+w:"):
        return int(kind[3:])
    lengths = np.diff(part.elements(np.int64 if kind == "+L" else np.int32, more=1))
    if not len(lengths):
        return 0
    if (lengths != lengths[0]).any():
        if valid is not None:
            raise BadShape(f"has rows that are null ({(~valid).sum()}) among lists: drop them")
        raise BadShape(f"has lists of different lengths, {lengths.min()} to {lengths.max()}")
    return int(lengths[0])


def _decimals(kind: str, part: Part) -> Array:
    """Decimal numbers, as the nearest float64.

    Those of up to 2^53 need one rounding, if the power of ten is exact; others Python's integers.
    """
    _, digits, *bits = kind[2:].split(",")
    scale, nbytes = int(digits), int(bits[0]) // 8 if bits else 16
    if nbytes == 4:
        stored = part.elements(np.int32).astype(np.int64)[:, np.newaxis]
    else:
        raw = part.elements(np.dtype((np.void, nbytes)))
        stored = raw.view(np.int64).reshape(-1, nbytes // 8)
    low = stored[:, 0]
    power = 10.0 ** abs(scale)
    found: Array = low / power if scale >= 0 else low * power
    exact = (stored[:, 1:] == (low >> 63)[:, np.newaxis]).all(axis=1) & (abs(low) <= 1 << 53)
    for k in np.flatnonzero(~exact) if abs(scale) <= EXACT_POWERS else range(len(found)):
        number = int.from_bytes(stored[k].tobytes(), "little", signed=True)
        found[k] = number / 10**scale if scale >= 0 else number * 10**-scale
    return found


def _recoded(
    dictionary: Field, part: Part, codes: dict[str, int], values: Array
) -> tuple[Array, NDArray[np.bool_] | None]:
    """The codes of a part by the categories of the whole column, which get those of the part.

    And which codes are not of a null among the categories; None: all.
    """
    words = [str(text) for text in part.texts(dictionary.format)]
    known = part.valid()
    there = [known is None or known[k] for k in range(len(words))]
    new = np.array(
        [
            codes.setdefault(word, len(codes)) if is_there else 0
            for word, is_there in zip(words, there, strict=True)
        ]
        or [0],
        CODE_DTYPE,
    )
    places = np.clip(values, 0, len(new) - 1)  # codes of nulls are arbitrary
    return new[places], None if known is None else known[places]
