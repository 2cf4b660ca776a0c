"""CSV through pyarrow: numbers in lines, with or without a line of names.

The file is cut into stretches of bytes. Every rank counts the lines of its own stretches, so that
all know the first row of each, and parses stretches independently. A line is a row: line breaks
inside quotes are not supported, and blank lines are allowed only at the end. A field that is empty
or marks a missing value (`MISSING`) is NaN. The bools of pandas, True and False, are 1 and 0.

Numbers are written as the shortest decimals that read back as the same number; the payload of a NaN
is lost.
"""

from __future__ import annotations

import csv
import os
import re
from collections.abc import Collection
from itertools import accumulate
from typing import Any

import numpy as np

from ali.files.exchange import Array, share
from ali.files.formats import About, Box, Format, Grain, Options, Pick, Source, Spec
from ali.files.parquet import by_band, names_of, pyarrow_with, table_of
from ali.files.paths import Bytes, Place, together
from ali.interface import Context
from mpi_workers.failures import Failure
from mpi_workers.matrix.dtypes import DTYPES
from mpi_workers.matrix.layout import IndexArray

PARSED_NBYTES = 1 << 20  # 1 MiB of text is parsed at once
COPY = 4 << 20
LINE = 64 << 20  # 64 MiB: no line of numbers is longer
PARSED = set(DTYPES) - {"complex64", "complex128", "float16"}
MISSING = ("", "NA", "N/A", "n/a", "#N/A", "<NA>", "NULL", "null", "None")
BOOLS = ("True", "False", "TRUE", "FALSE", "true", "false")
OTHER_DELIMITERS = ";\t| ,"
NUMBER = re.compile(
    r"[+-]?(\d+\.?\d*(e[+-]?\d+)?|\.\d+(e[+-]?\d+)?|inf|infinity|nan)", re.ASCII | re.IGNORECASE
)


# Arrow's words about a field that it cannot convert.
CONVERTED = re.compile(r"In CSV column #(\d+):(?: Row #(\d+):)?.*?invalid value '(.*?)'")


class Csv(Format):
    takes = ("header", "decimal", "na_values", "names", "index")

    def open(self, ctx: Context, place: Place, options: Options) -> Source:
        source = together(ctx, place.path, lambda: CsvSource(place, options))
        try:
            mine = together(ctx, place.path, lambda: source.count(ctx.rank, ctx.size))
            source.index([stretch for some in ctx.comm.allgather(mine) for stretch in some])
        except BaseException:
            source.close()
            raise
        return source

    def create(self, path: str, spec: Spec, old: str) -> None:
        _delimiter(old, spec.options)
        pyarrow_with("csv", old)
        names = names_of(spec, old)
        if broken := [name for name in names if "\n" in name or "\r" in name]:
            words = f"{old}: a name with a line break, {broken[0]!r}, cannot be read back from CSV"
            raise Failure("BadArgumentError", words)
        with open(path, "x", newline="", encoding="utf-8") as file:
            header = spec.options.header
            if header is None:  # without rows, only a header tells the columns
                header = bool(spec.options.names) or not spec.shape[0]
            if header:
                csv.writer(file, delimiter=spec.options.delimiter, lineterminator="\n").writerow(
                    names
                )

    def sink(self, path: str, spec: Spec, created: Any, rank: int) -> CsvSink:
        return CsvSink(pyarrow_with("csv", path), _part(path, rank), spec)

    def finish(self, ctx: Context, path: str, spec: Spec, old: str) -> None:
        """Concatenate the ranks' parts."""
        part = _part(path, ctx.rank)
        head = together(ctx, old, lambda: os.path.getsize(path))
        sizes = ctx.comm.allgather(together(ctx, old, lambda: os.path.getsize(part)))
        together(ctx, old, lambda: _copy(part, path, head + sum(sizes[: ctx.rank])))


def _part(path: str, rank: int) -> str:
    return f"{path}.{rank}"  # removed together with `path`


def _copy(part: str, path: str, offset: int) -> None:
    with open(part, "rb") as source, open(path, "r+b") as target:
        target.seek(offset)
        while data := source.read(COPY):
            target.write(data)
        target.flush()
        os.fsync(target.fileno())
    os.unlink(part)


def _delimiter(path: str, options: Options) -> str:
    delimiter = options.delimiter  # letters: 1e300, nan, inf
    if len(delimiter) != 1 or delimiter.isalnum() or delimiter in '"\r\n.+-':
        raise Failure(
            "BadArgumentError", f"{path}: delimiter={options.delimiter!r} cannot separate numbers"
        )
    return options.delimiter


def _numbers_apart(text: str, decimal: str) -> str | None:
    """The delimiter at which text falls into several numbers, if there is one."""
    for delimiter in OTHER_DELIMITERS.replace(decimal, ""):
        fields = text.replace(decimal, ".").strip().split(delimiter)
        if len(fields) > 1 and all(NUMBER.fullmatch(field.strip()) for field in fields):
            return delimiter
    return None


def _separated(text: str, delimiter: str) -> str:
    advice = f"set delimiter={delimiter!r}"
    if delimiter == ",":
        advice = "set decimal=',' if it has a decimal comma; commas of thousands are not read"
    return f"{text.strip()[:40]!r} is not a number: {advice}"


def _is_header(fields: list[str], missing: Collection[str], decimal: str, path: str) -> bool:
    """Whether the first line has names: if a field is neither a number nor a missing value.

    Raises
    ------
    Failure
        BadArgumentError for 0,1,2: pandas' header of a table without names, or a row.
    """
    fields = [field.strip() for field in fields]
    numbers = fields[1:] if fields[0] == "" else fields  # pandas' index has an empty name
    if len(fields) > 1 and numbers == [str(j) for j in range(len(numbers))]:
        raise Failure(
            "BadArgumentError",
            f"{path}: cannot tell whether the first line ({','.join(fields[:4])}...) is data or "
            "pandas' column numbers: set header=False or header=True",
        )
    known = {*missing, *BOOLS}
    return not all(
        field in known or NUMBER.fullmatch(field.replace(decimal, ".")) for field in fields
    )


class CsvSource:
    def __init__(self, place: Place, options: Options) -> None:
        self._path = place.path
        self._delimiter = _delimiter(place.path, options)
        self._decimal = options.decimal or "."
        if self._decimal not in ".," or self._decimal == self._delimiter:
            words = f"decimal={options.decimal!r} with delimiter={self._delimiter!r}: it must be "
            raise Failure("BadArgumentError", f"{place.path}: {words}'.' or ',', and not both")
        self._missing = [*MISSING, *options.na_values]
        end = f"(?=[{re.escape(self._delimiter)}\r\n]|$)"
        self._bool = re.compile(
            f"(?<![^{re.escape(self._delimiter)}\n])({'|'.join(BOOLS)}){end}".encode()
        )
        self._pyarrow = pyarrow_with("csv", place.path)
        self._dtype = np.dtype(np.float64)
        self._starts: list[int] = []  # first row of each stretch, then the number of rows
        self._bytes: list[int] = []  # first byte of each stretch, then the end
        self._file = place.open()
        try:
            self._look(options.header, index=options.index)
        except BaseException:
            self._file.close()
            raise

    def _look(self, header: bool | None, *, index: bool) -> None:
        line, after = _first_line(self._file)
        try:
            text = line.decode("utf-8-sig")
        except UnicodeDecodeError:
            raise Failure("FileError", f"{self._path} is not text in UTF-8") from None
        if not text.strip(self._blanks()):
            raise Failure(
                "FileError", f"{self._path} has no rows: it is empty or its first line is blank"
            )
        fields = next(csv.reader([text], delimiter=self._delimiter))
        if header is None:
            for field in fields:
                if apart := _numbers_apart(field, self._decimal):
                    raise Failure("BadArgumentError", f"{self._path}: {_separated(field, apart)}")
            header = _is_header(fields, self._missing, self._decimal, self._path)
        if header:
            fields[0] = fields[0].removeprefix("#")  # as numpy.savetxt writes a header
        self._names = [field.strip() for field in fields] if header else []
        others = [one for one in OTHER_DELIMITERS[:3] if one in text and one != self._delimiter]
        self._advice = f": set delimiter={others[0]!r}" if others else ""
        self._cols = len(fields)
        # The index that pandas and R write has no name in the header.
        self._first = int(bool(header) and not fields[0].strip() and not index)
        self._begin = after if header else (3 if line.startswith(b"\xef\xbb\xbf") else 0)
        self._end = _end(self._file, self._blanks().encode())
        self._end = max(self._begin, self._end)

    def _blanks(self) -> str:
        """White space that does not separate fields."""
        return " \t\r\n".replace(self._delimiter, "")

    def count(self, rank: int, size: int) -> list[tuple[int, int]]:
        """First byte and number of lines that begin in each stretch of a rank's bytes."""
        mine = share(self._end - self._begin, rank, size)
        found = []
        for first in range(mine.start, mine.stop, PARSED_NBYTES):
            start = self._begin + first
            stop = self._begin + min(first + PARSED_NBYTES, mine.stop)
            if first == 0:  # a line begins here, and after every line break before `stop`
                text = b"\n" + self._file.read(start, stop - 1)
            else:
                text = self._file.read(start - 1, stop - 1)
            lines = text.count(b"\n")
            if lines:
                found.append((start + text.index(b"\n"), lines))
        return found

    def index(self, stretches: list[tuple[int, int]]) -> None:
        """Store the stretches of all ranks."""
        self._bytes = [first for first, _ in stretches] + [self._end]
        self._starts = list(accumulate((lines for _, lines in stretches), initial=0))

    def about(self, dtype: np.dtype[Any] | None, cols: Pick | None) -> About:
        if dtype is not None and dtype.name in PARSED:
            self._dtype = dtype
        width, names = self._cols - self._first, self._names[self._first :]
        grain = Grain(cols=width, bands=tuple(self._starts[:-1]))
        return About((self._starts[-1], width), self._dtype, grain, names)

    def read(self, rows: Pick, cols: Pick) -> Array:
        cols = np.asarray(cols, np.int64) + self._first
        out = np.empty((len(rows), len(cols)), self._dtype, order="F")
        for k, places, wanted in by_band(self._starts, rows):
            table = self._parsed(k, cols)
            for number, j in enumerate(cols):
                column = table.column(f"f{j}")
                if column.null_count and self._dtype.kind in "biu":
                    raise Failure(
                        "DtypeError",
                        f"{self._path}: {self._column(int(j))} has missing values between rows "
                        f"{self._starts[k]} and {self._starts[k + 1]}, which {self._dtype} cannot "
                        "represent: load it as float64",
                    )
                out[places, number] = column.to_numpy()[wanted]
                if self._dtype.kind == "f" and np.isinf(out[places, number]).any():
                    self._check_infinities(k, int(j), wanted)
        return out

    def _check_infinities(self, k: int, j: int, rows: slice | IndexArray) -> None:
        """Refuse numbers that Arrow has parsed as infinities, such as 1e400."""
        column = self._parsed(k, range(j, j + 1), as_text=True).column(f"f{j}").to_pylist()
        for row in np.arange(len(column))[rows].tolist():
            number = (column[row] or "").strip().replace(self._decimal, ".")
            if re.fullmatch(r"[+-]?(inf|infinity)", number, re.I):
                continue
            if NUMBER.fullmatch(number) and np.isinf(np.array(number).astype(self._dtype)):
                raise Failure(
                    "DtypeError",
                    f"{self._path}: row {self._starts[k] + row}, {self._column(j)}: {number} is "
                    f"out of range of {self._dtype}",
                )

    def _parsed(
        self, k: int, cols: Pick, *, as_text: bool = False, with_bools: bool = False
    ) -> Any:
        pyarrow = self._pyarrow
        kind = pyarrow.string() if as_text else pyarrow.from_numpy_dtype(self._dtype)
        text = self._file.read(self._bytes[k], self._bytes[k + 1])
        if with_bools:
            text = self._bool.sub(lambda match: b"1" if match[1][:1] in b"Tt" else b"0", text)
        wanted = [f"f{j}" for j in dict.fromkeys(int(j) for j in cols)]
        ragged: list[Any] = []

        def note(row: Any) -> str:
            ragged.append(row)
            return "error"

        try:
            table = pyarrow.csv.read_csv(
                pyarrow.BufferReader(text),
                pyarrow.csv.ReadOptions(
                    use_threads=False,
                    block_size=len(text) + 1,
                    column_names=[f"f{j}" for j in range(self._cols)],
                ),
                pyarrow.csv.ParseOptions(
                    delimiter=self._delimiter,
                    ignore_empty_lines=False,
                    invalid_row_handler=note,
                ),
                pyarrow.csv.ConvertOptions(
                    include_columns=wanted,
                    column_types=dict.fromkeys(wanted, kind),
                    null_values=self._missing,
                    decimal_point=self._decimal,
                ),
            )
        except pyarrow.ArrowException as error:
            match = CONVERTED.search(str(error))
            if match and match[3] in BOOLS and not with_bools:
                return self._parsed(k, cols, with_bools=True)
            raise self._unreadable(k, ragged, str(error)) from None
        if any(column.null_count for column in table.columns) and (blank := _blank(text)) >= 0:
            row = self._starts[k] + text.count(b"\n", 0, blank)
            raise Failure("FileError", f"{self._path} is ragged: row {row} is blank")
        lines = self._starts[k + 1] - self._starts[k]
        if table.num_rows != lines:
            raise Failure(
                "FileError",
                f"{self._path}: rows {self._starts[k]} to {self._starts[k + 1]} read as "
                f"{table.num_rows} rows: does a quoted field contain a line break?",
            )
        return table

    def _unreadable(self, k: int, ragged: list[Any], said: str) -> Failure:
        """The error for text that is not a matrix of numbers."""
        if ragged:
            row = ragged[0]
            number = "" if row.number is None else f" {self._starts[k] + row.number - 1}"
            return Failure(
                "FileError",
                f"{self._path} is ragged: row{number} has {row.actual_columns} fields; the first "
                f"has {row.expected_columns}{self._advice}",
            )
        found = CONVERTED.search(said)
        if found is None:
            return Failure("FileError", f"{self._path}: {said}")
        column, row_number, value = found.groups()
        where = "" if row_number is None else f"row {self._starts[k] + int(row_number) - 1}, "
        where = f"{self._path}: {where}{self._column(int(column))}: "
        if apart := _numbers_apart(value, self._decimal):
            return Failure("DtypeError", where + _separated(value, apart))
        remedy = "choose other columns or another dtype, or name it in na_values=[...]"
        if value.startswith("#"):
            remedy = "lines of comments are not supported: remove them"
        words = f"{where}{value!r} is not a number of {self._dtype}: {remedy}"
        return Failure("DtypeError", words)

    def _column(self, j: int) -> str:
        return f"column {self._names[j]!r}" if self._names else f"column {j}"

    def close(self) -> None:
        self._file.close()


def _first_line(file: Bytes) -> tuple[bytes, int]:
    """The first line without its line break, and the offset of the next."""
    length = 64 << 10
    while True:
        head = file.read(0, min(length, file.size))
        if b"\n" in head or length >= file.size:
            line, _, _ = head.partition(b"\n")
            return line.rstrip(b"\r"), min(len(line) + 1, file.size)
        if length > LINE:
            raise Failure("FileError", f"{file.path}: its first line is longer than {LINE} bytes")
        length *= 4


def _blank(text: bytes) -> int:
    """Offset of the first blank line, or -1."""
    if text.startswith((b"\n", b"\r\n")):
        return 0
    found = [at + 1 for at in (text.find(b"\n\n"), text.find(b"\n\r\n")) if at >= 0]
    return min(found, default=-1)


def _end(file: Bytes, blanks: bytes) -> int:
    """End of the last row: before the white space at the end of the file."""
    stop = file.size
    while stop:
        start = max(0, stop - (64 << 10))
        tail = file.read(start, stop)
        if kept := tail.rstrip(blanks):
            return start + len(kept)
        stop = start
    return 0


class CsvSink:
    def __init__(self, pyarrow: Any, path: str, spec: Spec) -> None:
        self._pyarrow = pyarrow
        self._options = pyarrow.csv.WriteOptions(
            include_header=False, delimiter=spec.options.delimiter
        )
        self._names = [str(j) for j in range(spec.shape[1])]
        self._file: Any = open(path, "xb")  # noqa: SIM115 - until `close`

    def write(self, box: Box, values: Array) -> None:
        # A mask is written as 0 and 1, which every reader takes for numbers.
        numbers = values.view(np.int8) if values.dtype.kind == "b" else values
        table = table_of(self._pyarrow, numbers, self._names)
        self._pyarrow.csv.write_csv(table, self._file, self._options)

    def close(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            file.close()


FORMAT = Csv()
