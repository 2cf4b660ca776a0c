"""Parquet through pyarrow: columns of numbers, from one file or a folder of them.

Row groups are read, and only the selected columns of each. A matrix is written as a folder with
one file per rank, which pandas, Dask, Spark and pyarrow read as one table; without compression,
and without dictionaries, which would merge all NaNs into one.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from ali.files.exchange import Array, fitting
from ali.files.formats import About, Box, Format, Grain, Options, Pick, Source, Spec
from ali.files.paths import Place, extra, flush, together
from ali.interface import Context
from mpi_workers.columns.arrow_columns import UNNAMED, BadShape, Columns, categories_of, columns_of
from mpi_workers.columns.arrow_memory import read_schema
from mpi_workers.columns.missing import missing_of
from mpi_workers.failures import Failure
from mpi_workers.matrix.dtypes import common_dtype, is_time, stored_dtype
from mpi_workers.matrix.layout import ArrayShape, IndexArray, as_slice
from mpi_workers.matrix.pairwise import Buffers


def pyarrow_with(part: str, path: str) -> Any:
    """Pyarrow and a part of it, to read or write the file `path`."""
    extra(path, f"pyarrow.{part}")
    return extra(path, "pyarrow")


def by_band(
    starts: Sequence[int], rows: Pick
) -> Iterator[tuple[int, slice | IndexArray, slice | IndexArray]]:
    """Each band with some of the rows: which of them it has, and their positions in it.

    `starts` are the first rows of all bands, and the number of rows.
    """
    if isinstance(rows, range) and rows.step == 1:
        first, last = np.searchsorted(starts, [rows.start, rows.stop - 1], "right") - 1
        for k in range(int(first), int(last) + 1):
            part = range(max(rows.start, starts[k]), min(rows.stop, starts[k + 1]))
            yield k, as_slice(part, rows.start), as_slice(part, starts[k])
        return
    index = np.asarray(rows, np.int64)
    band = np.searchsorted(starts, index, "right") - 1
    for k in np.unique(band).tolist():
        places = np.flatnonzero(band == k)
        yield k, places, index[places] - starts[k]


def table_of(pyarrow: Any, values: Array, names: list[str]) -> Any:
    """The columns of a C-ordered matrix as a table of Arrow."""
    columns = np.asfortranarray(values)
    return pyarrow.table([pyarrow.array(column) for column in columns.T], names=names)


def names_of(spec: Spec, path: str) -> list[str]:
    """The names of a table's columns, as given or c0, c1, ... Raises `Failure`."""
    n = spec.shape[1]
    names = list(spec.options.names)
    if spec.dtype.kind == "c":
        words = f"{Place(path).suffix} has no complex numbers: save .npy, .h5 or .zarr instead"
        raise Failure("DtypeError", f"{path}: {words}")
    if not n:
        raise Failure(
            "ShapeError",
            f"a matrix of shape {spec.shape} has no columns, and tables of Parquet and CSV need "
            "one: save .npy, .h5 or .zarr instead",
        )
    if not names:
        return [f"c{j}" for j in range(n)]
    if len(names) != n or len(set(names)) != n:
        raise Failure(
            "BadArgumentError", f"{n} columns need {n} different names, not {len(set(names))}"
        )
    return names


class Parquet(Format):
    takes = ("names", "index", "missing")

    def open(self, ctx: Context, place: Place, options: Options) -> Source:

        def look() -> tuple[list[str], dict[int, tuple[Columns, list[int]]]]:
            pyarrow = pyarrow_with("parquet", place.path)
            paths = place.members(".parquet")
            found = {}
            for k in range(ctx.rank, len(paths), ctx.size):
                try:
                    with _opened(pyarrow, place, paths[k]) as file:
                        found[k] = _look(file, index=options.index)
                except pyarrow.ArrowException as error:
                    words = f"{paths[k]} is not a complete Parquet file: {error}"
                    raise Failure("FileError", words) from None
            return paths, found

        paths, mine = together(ctx, place.path, look)
        told = {k: about for some in ctx.comm.allgather(mine) for k, about in some.items()}

        def make() -> ParquetSource:
            if sorted(told) != list(range(len(paths))) or not paths:
                raise Failure("FileError", f"{place.path} is a folder without Parquet files")
            first = told[0][0]
            for k, path in enumerate(paths):
                if [c.kind for c in told[k][0].columns] != [c.kind for c in first.columns]:
                    raise Failure(
                        "FileError", f"{path} has different columns than {Path(paths[0]).name}"
                    )
            groups = [(k, g, rows) for k in range(len(paths)) for g, rows in enumerate(told[k][1])]
            return ParquetSource(
                place, paths, [told[k][0] for k in range(len(paths))], [g for g in groups if g[2]],
                options.missing,
            )  # fmt: skip

        return together(ctx, place.path, make)

    def create(self, path: str, spec: Spec, old: str) -> tuple[list[str], bool]:
        created = names_of(spec, old), bool(spec.options.names)
        pyarrow = pyarrow_with("parquet", old)
        os.mkdir(path)
        if not spec.shape[0]:  # no rank has rows: this file has the columns
            sink = ParquetSink(pyarrow, _part(path, 0), *created)
            sink.write(Box(range(0), range(spec.shape[1])), np.empty(spec.shape, spec.dtype))
            sink.close()
        return created

    def sink(self, path: str, spec: Spec, created: Any, rank: int) -> ParquetSink:
        return ParquetSink(pyarrow_with("parquet", path), _part(path, rank), *created)

    def owns(self, folder: Path) -> bool:
        return all(
            entry.is_file() and (entry.name.endswith(".parquet") or entry.name[0] in "._")
            for entry in os.scandir(folder)
        )


def _part(path: str, rank: int) -> str:
    return f"{path}/part-{rank:05d}.parquet"


def _opened(pyarrow: Any, place: Place, path: str, unit: str = "us") -> Any:
    """A file; timestamps of INT96 in microseconds, of which int64 holds all that Spark writes."""
    file = place.filesystem()[0].open(path, "rb") if place.is_url else path
    return pyarrow.parquet.ParquetFile(file, coerce_int96_timestamp_unit=unit)


def _check_int96(pyarrow: Any, rough: Any, fine: Any) -> None:
    """Refuse a column of INT96 that microseconds would round. Raises `ValueError`.

    Nanoseconds overflow, but the difference is right, because both overflow alike.
    """
    counts = []
    for column in (rough, fine):
        column = column.combine_chunks()
        while pyarrow.types.is_nested(column.type):
            column = column.flatten()
        counts.append(column.cast("int64").fill_null(0).to_numpy(zero_copy_only=False))
    if (counts[1] != counts[0] * 1000).any():
        raise ValueError(
            "has timestamps of INT96 with nanoseconds: write them as timestamps of INT64"
        )


def _look(file: Any, *, index: bool) -> tuple[Columns, list[int]]:
    """A file's columns, and the rows of its row groups."""
    about = file.metadata
    rows = [about.row_group(g).num_rows for g in range(about.num_row_groups)]
    return columns_of(read_schema(file.schema_arrow), index=index), rows


class ParquetSource:
    def __init__(
        self,
        place: Place,
        paths: list[str],
        schemas: list[Columns],
        groups: list[tuple[int, int, int]],
        missing: str,
    ) -> None:
        self._place = place
        self._paths = paths
        self._schemas = schemas
        self._columns = schemas[0].columns
        self._groups = groups
        self._missing = missing_of(missing)
        self._categories: dict[int, list[str]] = {}  # by column of the file
        # Of each column of the matrix that column of the file, and the place in an element of it.
        self._places = [
            (j, k)
            for j, column in enumerate(self._columns)
            for k in range(math.prod(column.inner or ()))
        ]
        self._starts = list(accumulate((rows for _, _, rows in groups), initial=0))
        self._open_number = -1
        self._file: Any = None
        self._dtype = np.dtype(np.float64)
        self._buffers = Buffers()

    def about(self, dtype: np.dtype[Any] | None, cols: Pick | None) -> About:
        names = [self._columns[j].name for j, _ in self._places]
        shape: ArrayShape = (self._starts[-1], len(names))
        named = self._schemas[0].named
        if cols is not None:
            chosen = list(dict.fromkeys(self._places[int(c)][0] for c in cols))
            try:
                kinds = [self._columns[j].dtype(self._missing) for j in chosen]
            except ValueError as error:
                words = f"{self._place.path}: {error}; columns=[...] chooses others"
                raise Failure("DtypeError", words) from None
            try:
                names_of_them = [self._columns[j].name for j in chosen]
                self._dtype = common_dtype(kinds, names_of_them) if kinds else self._dtype
            except ValueError as error:
                raise Failure("DtypeError", f"{self._place.path}: {error}") from None
            if dtype is not None and is_time(self._dtype):
                words = f"{self._dtype}, which dtype={dtype.name!r} cannot hold: leave out dtype="
                raise Failure("DtypeError", f"{self._place.path} has elements of {words}")
            shape = self._shape(chosen, cols)
            named = named and not any(self._columns[j].inner for j in chosen)
        grain = Grain(bands=tuple(self._starts[:-1]), columns_apart=True)
        time = str(self._dtype) if is_time(self._dtype) else ""
        return About(shape, stored_dtype(self._dtype), grain, names, "F", named, time)

    def _shape(self, chosen: Sequence[int], cols: Pick) -> ArrayShape:
        """Of an array of these columns; of one of tensors alone it has more axes."""
        for j in chosen:
            inner, name = self._columns[j].inner, self._columns[j].name
            if inner is None:
                raise Failure(
                    "ShapeError",
                    f"{self._place.path}: column {name!r} has lists: cast it to lists of one "
                    "length (pyarrow.list_(type, length)), or columns=[...] chooses others",
                )
            if len(inner) > 1:
                whole = [self._places.index((j, k)) for k in range(math.prod(inner))]
                if list(map(int, cols)) != whole:
                    raise Failure(
                        "ShapeError",
                        f"{self._place.path}: column {name!r} has tensors of shape {inner}, which "
                        f"are no part of a row beside other columns: columns=[{name!r}] loads it",
                    )
                return (self._starts[-1], *inner)
        return self._starts[-1], len(self._places)

    def agree(self, ctx: Context, cols: Pick) -> dict[int, list[str]]:
        """The categories of these columns; each rank reads those of some row groups."""
        places = [self._places[int(c)][0] for c in cols]
        for j in dict.fromkeys(j for j in places if self._columns[j].coded):

            def look(name: str = self._columns[j].name) -> dict[int, list[str]]:
                groups = range(ctx.rank, len(self._groups), ctx.size)
                return {g: categories_of(self._table(g, [name]).column(name)) for g in groups}

            mine = together(ctx, self._place.path, look)
            told = {g: its for some in ctx.comm.allgather(mine) for g, its in some.items()}
            self._categories[j] = list(dict.fromkeys(w for g in sorted(told) for w in told[g]))
        return {k: its for k, j in enumerate(places) if (its := self._categories.get(j))}

    def read(self, rows: Pick, cols: Pick) -> Array:
        out = self._buffers.take("read", (len(cols), len(rows)), stored_dtype(self._dtype)).T
        places = [self._places[int(c)] for c in cols]
        for g, to, inside in by_band(self._starts, rows):
            table = self._table(g, list(dict.fromkeys(self._columns[j].name for j, _ in places)))
            for j in dict.fromkeys(j for j, _ in places):
                values = self._values(table, j, g)
                if is_time(self._dtype):
                    values = fitting(values, self._dtype, self._place.path).view(np.int64)
                values = values.reshape(len(values), math.prod(values.shape[1:]))
                for at, (other, k) in enumerate(places):
                    if other == j:
                        out[to, at] = values[:, k][inside]
        return out

    def _table(self, g: int, names: list[str]) -> Any:
        """Columns of a row group, as pyarrow has them."""
        pyarrow = pyarrow_with("parquet", self._place.path)
        number, inside, rows = self._groups[g]
        try:
            if number != self._open_number:
                self.close()
                self._file = _opened(pyarrow, self._place, self._paths[number])
                self._open_number = number
            table = self._file.read_row_group(inside, columns=names, use_threads=False)
            self._check_int96(pyarrow, table, inside)
        except pyarrow.ArrowException as error:
            raise Failure("FileError", f"{self._paths[number]}: {error}") from None
        if table.num_rows != rows:
            raise Failure(
                "FileError", f"{self._paths[number]} changed while it was read: load it again"
            )
        return table

    def _check_int96(self, pyarrow: Any, table: Any, inside: int) -> None:
        paths = [c.path for c in self._file.schema if c.physical_type == "INT96"]
        paths = [path if path in table.column_names else path.split(".")[0] for path in paths]
        names = [name for name in dict.fromkeys(paths) if name in table.column_names]
        if not names:
            return
        with _opened(pyarrow, self._place, self._paths[self._open_number], "ns") as file:
            fine = file.read_row_group(inside, columns=names, use_threads=False)
        for name in names:
            try:
                _check_int96(pyarrow, table.column(name), fine.column(name))
            except ValueError as error:
                words = f"{self._place.path}: column {name!r} {error}"
                raise Failure("DtypeError", words) from None

    def _values(self, table: Any, j: int, g: int) -> Array:
        number = self._groups[g][0]
        column = self._schemas[number].columns[j]
        try:
            its = self._categories.get(j, ())
            return column.values(table.column(column.name), self._missing, its)
        except BadShape as error:
            raise Failure("ShapeError", f"{self._paths[number]}: {error}") from None
        except ValueError as error:
            raise Failure("DtypeError", f"{self._paths[number]}: {error}") from None

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file, self._open_number = None, -1


class ParquetSink:
    """The file of a rank, created by its first box: a rank without boxes creates none."""

    def __init__(self, pyarrow: Any, path: str, names: list[str], named: bool) -> None:
        self._pyarrow = pyarrow
        self._path = path
        self._names = names
        self._metadata = None if named else {UNNAMED: b"c0, c1, ..."}
        self._writer: Any = None

    def write(self, box: Box, values: Array) -> None:
        table = table_of(self._pyarrow, values, self._names)
        table = table.replace_schema_metadata(self._metadata)
        if self._writer is None:
            self._writer = self._pyarrow.parquet.ParquetWriter(
                self._path, table.schema, compression="none", use_dictionary=False
            )
        self._writer.write_table(table, row_group_size=max(1, len(values)))

    def close(self) -> None:
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()
            flush(self._path)


FORMAT = Parquet()
