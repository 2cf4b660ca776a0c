"""What a format of files has to do, and which there are.

A format is a module with a `Format` named `FORMAT`. Reading: `open` gives a `Source`, on all
ranks at once, which says what is in the file and reads any rows and columns of it on its own.
Writing: `create` on rank 0, a `Sink` on each rank for its boxes, `finish` on all. Everything
else (which rank, which layout, atomicity, agreement on errors) is done once, elsewhere.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ali.files.boxes import Box, Grain, Pick
from ali.files.paths import Place
from ali.interface import Context
from mpi_workers.failures import Failure
from mpi_workers.matrix.dist_matrix import check_dtype
from mpi_workers.matrix.layout import Shape

Array = NDArray[Any]

SUFFIXES = {
    ".npy": "npy",
    ".h5": "hdf5",
    ".hdf5": "hdf5",
    ".zarr": "zarr3",
    ".parquet": "parquet",
    ".csv": "text",
}


@dataclass(frozen=True, slots=True)
class Options:
    """What the user said besides the path; what a format has no use for it refuses.

    Attributes
    ----------
    dataset : str, optional
        Name inside of an HDF5 file or a Zarr group.
    header : bool, optional
        Whether the first line of a CSV file has names; None: if a field of it is no number.
    delimiter : str
        Between the fields of a CSV file.
    names : sequence of str
        Of the columns, to be written.
    append : bool
        Keep the other data sets of an HDF5 file.
    """

    dataset: str | None = None
    header: bool | None = None
    delimiter: str = ","
    names: Sequence[str] = ()
    append: bool = False


@dataclass(frozen=True, slots=True)
class About:
    """What a file says of the matrix in it; the same on all ranks."""

    shape: Shape
    dtype: np.dtype[Any]  # of the file: any kind of number, any byte order
    grain: Grain
    names: Sequence[str] = ()  # of its columns, where they have any


@dataclass(frozen=True, slots=True)
class Spec:
    """A matrix that is to be written."""

    shape: Shape
    dtype: np.dtype[Any]
    options: Options


class Source(Protocol):
    """A matrix in a file, open for reading on this rank."""

    def about(self, dtype: np.dtype[Any] | None, cols: Pick | None) -> About:
        """What is there; of text and tables, as it will be for this dtype and these columns.

        Raises
        ------
        Failure
            DtypeError, if elements of those columns are not numbers.
        """

    def read(self, rows: Pick, cols: Pick) -> Array:
        """These elements, of the dtype that `about` said; good until the next call."""

    def close(self) -> None: ...


class Sink(Protocol):
    """A matrix in a file, open for writing on this rank."""

    def write(self, box: Box, values: Array) -> None:
        """Put these elements, C-ordered, where they belong. Boxes of a rank come in order."""

    def close(self) -> None: ...


class Format(Protocol):
    """One format of files."""

    folders: bool  # whether what it writes is a folder
    urls: bool  # whether it can be written behind a URL; see `remote.py`

    def open(self, ctx: Context, place: Place, options: Options) -> Source:
        """Collective; fails on all ranks alike."""

    def create(self, path: str, spec: Spec, old: str) -> Any:
        """Begin a file, on rank 0; what it returns goes to all ranks.

        `old` is the file that it will replace; behind a URL it is `path` itself.
        """

    def grain(self, spec: Spec) -> Grain:
        """How its boxes are to be cut."""

    def sink(self, path: str, spec: Spec, created: Any, rank: int) -> Sink:
        """This rank's end of a file that was begun."""

    def finish(self, ctx: Context, path: str, spec: Spec, old: str) -> None:
        """When all boxes are written and sinks closed. Collective."""

    def owns(self, folder: str) -> bool:
        """Whether a folder is of this format, and may be replaced by another."""


def format_of(place: Place) -> Format:
    """The format by a path's suffix. Raises `Failure` (BadArgumentError)."""
    name = SUFFIXES.get(place.suffix)
    if name is None:
        raise Failure(
            "BadArgumentError",
            f"{place.path}: the suffix {place.suffix!r} is of no format known here; there are "
            + ", ".join(SUFFIXES),
        )
    found: Format = importlib.import_module(f"ali.files.{name}").FORMAT
    return found


def matrix_dtype(have: np.dtype[Any], wanted: str | None, path: str) -> np.dtype[Any]:
    """The dtype of a matrix for a file's elements. Raises `Failure` (DtypeError)."""
    try:
        dtype = check_dtype(have.newbyteorder("=") if wanted is None else wanted)
    except ValueError as error:
        hint = ""
        if wanted is None and have.kind in "biuf":
            hint = "; say which one to convert to, e.g. dtype='float64'"
        raise Failure("DtypeError", f"{path}: {error}{hint}") from None
    if have.kind not in "biufc" or not np.can_cast(have, dtype, "same_kind"):
        raise Failure(
            "DtypeError", f"{path}: elements of dtype {have} cannot become {dtype} without loss"
        )
    return dtype.newbyteorder("=")


def checked_shape(shape: Sequence[int], path: str) -> Shape:
    """Rows and columns; what has one dimension is one column. Raises `Failure` (ShapeError)."""
    if len(shape) not in (1, 2):
        raise Failure("ShapeError", f"{path}: an array of shape {tuple(shape)} is not a matrix")
    m, n = (*shape, 1)[:2]
    if not m or not n:
        raise Failure("ShapeError", f"{path}: an array of shape {tuple(shape)} is empty")
    return int(m), int(n)


def refuse(place: Place, what: str, given: object) -> None:
    """For an option that a format has no use for. Raises `Failure` (BadArgumentError)."""
    if given:
        raise Failure("BadArgumentError", f"{place.path}: {place.suffix} files have no {what}")
