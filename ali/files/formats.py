"""The interface of a file format.

A format is a module with a `Format` named `FORMAT`. Reading: `open` returns a `Source` on all
ranks at once; it describes the file and reads any rows and columns on its own. Writing: `create`
on rank 0, a `Sink` on each rank for its boxes, `finish` on all. A format names the options that it
`takes`; others are refused before it is asked. Assignment to ranks, layouts,
atomic replacement and agreement on errors are common code in other modules.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from ali.files.paths import Place, replacing, together
from ali.interface import Context
from mpi_workers.failures import Failure
from mpi_workers.matrix.dtypes import chosen_dtype
from mpi_workers.matrix.layout import MAX_AXES, ArrayShape, Shape, stored_shape
from mpi_workers.protocol.files import SUFFIXES

Pick = range | NDArray[np.int64]  # indices of a file, in the order of the matrix


class Box(NamedTuple):
    """A region of a matrix, as ranges of step 1 of its rows and columns."""

    rows: range
    cols: range

    @property
    def shape(self) -> Shape:
        return len(self.rows), len(self.cols)


class Grain(NamedTuple):
    """The smallest unit that a format reads or writes: its chunks.

    Attributes
    ----------
    rows, cols : int
        Height and width of regular chunks.
    bands : sequence of int, optional
        First rows of chunks of unequal heights; instead of `rows`.
    by_columns : bool
        Columns are contiguous in the file.
    columns_apart : bool
        Some columns of a band can be read alone, for their share of the time.
    """

    rows: int = 1
    cols: int = 1
    bands: Sequence[int] | None = None
    by_columns: bool = False
    columns_apart: bool = False

    def elements(self, shape: Shape) -> int:
        """Elements of the largest chunk of a file of this shape."""
        heights = [self.rows] if self.bands is None else np.diff([*self.bands, shape[0]])
        return int(max(heights, default=0)) * self.cols


Array = NDArray[Any]


@dataclass(frozen=True, slots=True)
class Options:
    """The user's options besides the path; a format refuses options that it does not support.

    Attributes
    ----------
    dataset : str, optional
        Name inside an HDF5 file or a Zarr group.
    header : bool, optional
        Whether the first line of a CSV file has names; None: decided from its fields.
    delimiter : str
        The separator of fields in a CSV file.
    decimal : str, optional
        The decimal point of a CSV file.
    na_values : sequence of str
        Fields of a CSV file that mark a missing value, besides those of `text.MISSING`.
    names : sequence of str
        Names of the columns to write.
    append : bool
        Keep the other data sets of an HDF5 file.
    index : bool
        Whether the index that pandas or Dask wrote into a table is a column.
    missing : str
        What a null becomes: ``"nan"`` or a number; empty: an error.
    """

    dataset: str | None = None
    header: bool | None = None
    delimiter: str = ","
    decimal: str | None = None
    na_values: Sequence[str] = ()
    names: Sequence[str] = ()
    append: bool = False
    index: bool = False
    missing: str = ""


@dataclass(frozen=True, slots=True)
class About:
    """The description of the array in a file; the same on all ranks."""

    array_shape: ArrayShape
    dtype: np.dtype[Any]  # of the file: any kind of number, any byte order
    grain: Grain
    names: Sequence[str] = ()  # of its columns, where they have any
    order: Literal["C", "F"] = "C"  # of the arrays that `Source.read` returns
    named: bool = True  # else the names only number the columns, and no matrix gets them
    time: str = ""  # the dtype of dates or durations, whose counts the elements are

    @property
    def shape(self) -> Shape:
        """Rows and columns, see `stored_shape`."""
        return stored_shape(self.array_shape)


@dataclass(frozen=True, slots=True)
class Spec:
    """An array to be written."""

    array_shape: ArrayShape
    dtype: np.dtype[Any]
    options: Options

    @property
    def shape(self) -> Shape:
        """Rows and columns, see `stored_shape`."""
        return stored_shape(self.array_shape)


class Source(Protocol):
    """A matrix in a file, open for reading on this rank."""

    def about(self, dtype: np.dtype[Any] | None, cols: Pick | None) -> About:
        """The matrix in the file; for text and tables, with this dtype and these columns.

        Raises
        ------
        Failure
            DtypeError, if elements of those columns are not numbers.
        """

    def read(self, rows: Pick, cols: Pick) -> Array:
        """These elements, in the dtype of `about`; valid until the next call."""

    def close(self) -> None: ...


@runtime_checkable
class WithCategories(Protocol):
    """A source that has codes of categories in some columns."""

    def agree(self, ctx: Context, cols: Pick) -> dict[int, list[str]]:
        """The categories of these columns, by position, in all of the file. Collective."""


class Sink(Protocol):
    """A matrix in a file, open for writing on this rank."""

    def write(self, box: Box, values: Array) -> None:
        """Write the C-ordered elements of a box. Boxes of a rank come in order."""

    def close(self) -> None:
        """End the writing, and wait until the elements of this rank are on the disk."""


class Format:
    """A file format."""

    urls = False  # whether it can be written to a URL, as `zarr3` is
    takes: Collection[str] = ()  # the options of `REFUSED` that it supports
    any_axes = False  # whether it stores arrays of three axes and more

    def open(self, ctx: Context, place: Place, options: Options) -> Source:
        """Collective; fails on all ranks alike."""
        return together(ctx, place.path, lambda: self.look(place, options))

    def look(self, place: Place, options: Options) -> Source:
        """The source of this rank, where ranks open a file without each other's help."""
        raise NotImplementedError

    def replacing(
        self, ctx: Context, place: Place, token: str | None
    ) -> contextlib.AbstractContextManager[str]:
        """A block that writes under the name it gets, and that ends on all ranks alike."""
        return replacing(ctx, place.path, token, self.owns)

    def create(self, path: str, spec: Spec, old: str) -> Any:
        """Create a file on rank 0; the result is sent to all ranks.

        `old` is the path that it will replace; for a URL it is `path` itself.
        """
        raise NotImplementedError

    def grain(self, spec: Spec) -> Grain:
        """The grain at which boxes are cut: whole rows, unless a format overrides it."""
        return Grain(cols=spec.shape[1])

    def sink(self, path: str, spec: Spec, created: Any, rank: int) -> Sink:
        """The sink of this rank for a created file."""
        raise NotImplementedError

    def finish(self, ctx: Context, path: str, spec: Spec, old: str) -> None:
        """Called when all boxes are written and sinks closed. Collective."""

    def owns(self, folder: Path) -> bool:
        """Whether a folder holds one matrix of this format and nothing else: it may be replaced."""
        return False


COMPRESSED = (".gz", ".bz2", ".xz", ".zst", ".zip")


def format_of(place: Place) -> Format:
    """The format by a path's suffix. Raises `Failure` (BadArgumentError)."""
    name = SUFFIXES.get(place.suffix)
    if place.suffix in COMPRESSED:
        raise Failure(
            "BadArgumentError",
            f"{place.path}: ranks cannot read or write parts of a compressed file: decompress it, "
            "or read it yourself, for example als.send_matrix(pandas.read_csv(path))",
        )
    if name is None:
        raise Failure(
            "BadArgumentError",
            f"{place.path}: unknown suffix {place.suffix!r}; known suffixes are "
            + ", ".join(SUFFIXES)
            + "; only `load_matrix(..., format=)` takes other names",
        )
    found: Format = importlib.import_module(f"ali.files.{name}").FORMAT
    return found


def place_to_read(path: str, format: str | None) -> Place:
    """The place of a file, with the format that the user names or that its folder shows.

    Raises
    ------
    Failure
        BadArgumentError, if there is no such format.
    """
    if format is not None:
        place = Place(path, f".{format.lower().removeprefix('.')}")
        if place.suffix not in SUFFIXES:
            known = ", ".join(suffix[1:] for suffix in SUFFIXES)
            raise Failure("BadArgumentError", f"unknown format {format!r}; known are {known}")
        return place
    place = Place(path)
    if place.suffix not in SUFFIXES and place.holds(".parquet"):  # as Spark and Dask write them
        return Place(path, ".parquet")
    return place


def matrix_dtype(have: np.dtype[Any], wanted: str | None, path: str) -> np.dtype[Any]:
    """The dtype of a matrix for a file's elements. Raises `Failure` (DtypeError).

    Conversions to a narrower dtype are allowed; `exchange.fitting` checks the elements.
    """
    try:
        return chosen_dtype(have, wanted)
    except ValueError as error:
        raise Failure("DtypeError", f"{path}: {error}") from None


def checked(shape: Sequence[int], dtype: np.dtype[Any], path: str) -> ArrayShape:
    """The shape of an array of numbers, if it has up to `MAX_AXES` axes.

    Raises
    ------
    Failure
        ShapeError, or DtypeError if its elements are not numbers.
    """
    if len(shape) > MAX_AXES:
        raise Failure(
            "ShapeError", f"{path}: an array of shape {tuple(shape)} has more than {MAX_AXES} axes"
        )
    if dtype.kind not in "biufc":
        raise Failure("DtypeError", f"{path}: elements of dtype {dtype} are not numbers")
    return tuple(map(int, shape))


REFUSED = {
    "dataset": "data sets inside",
    "header": "header lines",
    "decimal": "decimal points",
    "na_values": "texts for missing values",
    "names": "names of columns",
    "append": "other data sets to keep",
    "index": "index",
    "missing": "nulls (an empty field of CSV is NaN)",
}


def refuse(place: Place, options: Options, takes: Collection[str]) -> None:
    """Refuse options other than those that `takes`. Raises `Failure` (BadArgumentError)."""
    for name, what in REFUSED.items():
        if getattr(options, name) and name not in takes:
            raise Failure("BadArgumentError", f"{place.path}: {place.suffix} files have no {what}")
