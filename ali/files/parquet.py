"""Parquet through pyarrow: columns of numbers, from one file or a folder of them.

Row groups are read, and only the selected columns of each. A matrix is written as a folder with
one file per rank, which pandas, Dask, Spark and pyarrow read as one table; without compression,
and without dictionaries, which would merge all NaNs into one.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from ali.files.exchange import Array
from ali.files.formats import About, Box, Format, Grain, Options, Pick, Source, Spec
from ali.files.paths import Place, extra, flush, together
from ali.interface import Context
from mpi_workers.failures import Failure
from mpi_workers.matrix.layout import IndexArray, as_slice
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
    n, names = spec.shape[1], list(spec.options.names)
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
    takes = ("names", "index")

    def open(self, ctx: Context, place: Place, options: Options) -> Source:

        def look() -> tuple[list[str], dict[int, tuple[list[tuple[str, str]], list[int]]]]:
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
            schemas = [told[k][0] for k in range(len(paths))]
            for path, schema in zip(paths, schemas, strict=True):
                if schema != schemas[0]:
                    raise Failure(
                        "FileError", f"{path} has different columns than {Path(paths[0]).name}"
                    )
            groups = [(k, g, rows) for k in range(len(paths)) for g, rows in enumerate(told[k][1])]
            return ParquetSource(place, paths, schemas[0], [g for g in groups if g[2]])

        return together(ctx, place.path, make)

    def create(self, path: str, spec: Spec, old: str) -> list[str]:
        names = names_of(spec, old)
        pyarrow = pyarrow_with("parquet", old)
        os.mkdir(path)
        if not spec.shape[0]:  # no rank has rows: this file has the columns
            sink = ParquetSink(pyarrow, _part(path, 0), names)
            sink.write(Box(range(0), range(len(names))), np.empty(spec.shape, spec.dtype))
            sink.close()
        return names

    def sink(self, path: str, spec: Spec, created: Any, rank: int) -> ParquetSink:
        return ParquetSink(pyarrow_with("parquet", path), _part(path, rank), created)

    def owns(self, folder: Path) -> bool:
        return all(
            entry.is_file() and (entry.name.endswith(".parquet") or entry.name[0] in "._")
            for entry in os.scandir(folder)
        )


def _part(path: str, rank: int) -> str:
    return f"{path}/part-{rank:05d}.parquet"


def _opened(pyarrow: Any, place: Place, path: str) -> Any:
    if place.is_url:
        fs, _ = place.filesystem()
        return pyarrow.parquet.ParquetFile(fs.open(path, "rb"))
    return pyarrow.parquet.ParquetFile(path)


def _look(file: Any, *, index: bool) -> tuple[list[tuple[str, str]], list[int]]:
    """Names and types of a file's columns, and the rows of its row groups.

    What pandas or Dask wrote as the index is a column only if `index` says so.
    """
    schema, about = file.schema_arrow, file.metadata
    described = json.loads((schema.metadata or {}).get(b"pandas", b"{}"))
    # A range is no column; pandas describes it by a dict.
    hidden = set() if index else {str(name) for name in described.get("index_columns", ())}
    columns = [(str(f.name), str(f.type)) for f in schema if f.name not in hidden]
    return columns, [about.row_group(g).num_rows for g in range(about.num_row_groups)]


# NumPy's dtypes of Arrow's types that are numbers.
DTYPES_OF_ARROW = {
    "bool": "bool", "halffloat": "float16", "float": "float32", "double": "float64",
    "int8": "int8", "int16": "int16", "int32": "int32", "int64": "int64",
    "uint8": "uint8", "uint16": "uint16", "uint32": "uint32", "uint64": "uint64",
}  # fmt: skip


class ParquetSource:
    def __init__(
        self,
        place: Place,
        paths: list[str],
        schema: list[tuple[str, str]],
        groups: list[tuple[int, int, int]],
    ) -> None:
        self._place = place
        self._paths = paths
        self._schema = schema
        self._groups = groups
        self._starts = list(accumulate((rows for _, _, rows in groups), initial=0))
        self._open_number = -1
        self._file: Any = None
        self._dtype = np.dtype(np.float64)
        self._buffers = Buffers()

    def about(self, dtype: np.dtype[Any] | None, cols: Pick | None) -> About:
        names = [name for name, _ in self._schema]
        shape = (self._starts[-1], len(names))
        if cols is not None:
            kinds = []
            for j in cols:
                name, arrow = self._schema[int(j)]
                if arrow not in DTYPES_OF_ARROW:
                    raise Failure(
                        "DtypeError",
                        f"{self._place.path}: column {name!r} has type {arrow}, which is not a "
                        "number: choose other columns with columns=[...], or convert it",
                    )
                kinds.append(np.dtype(DTYPES_OF_ARROW[arrow]))
            self._dtype = np.result_type(*kinds) if kinds else self._dtype
        grain = Grain(bands=tuple(self._starts[:-1]), columns_apart=True)
        return About(shape, self._dtype, grain, names, order="F")

    def read(self, rows: Pick, cols: Pick) -> Array:
        out = self._buffers.take("read", (len(cols), len(rows)), self._dtype).T
        for g, to, inside in by_band(self._starts, rows):
            table = self._table(g, cols)
            for k, j in enumerate(cols):
                out[to, k] = self._values(table, int(j), g)[inside]
        return out

    def _table(self, g: int, cols: Pick) -> Any:
        pyarrow = pyarrow_with("parquet", self._place.path)
        number, inside, rows = self._groups[g]
        try:
            if number != self._open_number:
                self.close()
                self._file = _opened(pyarrow, self._place, self._paths[number])
                self._open_number = number
            names = list(dict.fromkeys(self._schema[int(j)][0] for j in cols))
            table = self._file.read_row_group(inside, columns=names, use_threads=False)
        except pyarrow.ArrowException as error:
            raise Failure("FileError", f"{self._paths[number]}: {error}") from None
        if table.num_rows != rows:
            raise Failure(
                "FileError", f"{self._paths[number]} changed while it was read: load it again"
            )
        return table

    def _values(self, table: Any, j: int, g: int) -> Array:
        name = self._schema[j][0]
        column = table.column(name)
        if column.null_count and self._dtype.kind != "f":
            raise Failure(
                "DtypeError",
                f"{self._paths[self._groups[g][0]]}: column {name!r} has missing values, which "
                f"{self._dtype} cannot represent: drop them, or convert the column to floats",
            )
        values: Array = column.to_numpy()
        return values

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file, self._open_number = None, -1


class ParquetSink:
    """The file of a rank, created by its first box: a rank without boxes creates none."""

    def __init__(self, pyarrow: Any, path: str, names: list[str]) -> None:
        self._pyarrow = pyarrow
        self._path = path
        self._names = names
        self._writer: Any = None

    def write(self, box: Box, values: Array) -> None:
        table = table_of(self._pyarrow, values, self._names)
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
