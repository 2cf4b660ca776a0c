"""The routines of the library `files`: load and save, folders of checkpoints."""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ali.blocks import require_layout
from ali.files import exchange
from ali.files.exchange import fitting
from ali.files.formats import (
    About,
    Box,
    Format,
    Grain,
    Options,
    Pick,
    Source,
    Spec,
    WithCategories,
    format_of,
    matrix_dtype,
    place_to_read,
    refuse,
)
from ali.files.paths import Place, agree_on, hidden, on_rank_0, remove, replacing, together
from ali.interface import Context, routine
from mpi_workers.failures import Failure
from mpi_workers.matrix.available_memory import available_bytes
from mpi_workers.matrix.dist_matrix import DistMatrix
from mpi_workers.matrix.layout import as_slice
from mpi_workers.matrix.sizes import readable
from mpi_workers.protocol.files import CHECKPOINT_FORMAT, MANIFEST, TIME

Picked = Pick
COPIES = 2  # of a chunk while it is read: decompressed, and in the order of the matrix


@routine("A", "columns", "categories", pure=True)
def load(
    ctx: Context,
    path: str,
    dataset: str | None = None,
    rows: str | None = None,
    row_list: list[int] | None = None,
    columns: str | None = None,
    column_list: list[int] | None = None,
    column_names: list[str] | None = None,
    layout: str = "VC_STAR",
    dtype: str | None = None,
    header: bool | None = None,
    delimiter: str = ",",
    decimal: str | None = None,
    na_values: list[str] | None = None,
    index: bool = False,
    missing: str = "",
    format: str | None = None,
) -> tuple[DistMatrix, list[str], str]:
    """Read a matrix from a file that all nodes see; every rank reads a part of it.

    Parameters
    ----------
    path : str
        Its suffix selects the format: .npy, .h5, .hdf5, .nc (NetCDF-4), .zarr, .parquet (a file or
        a folder), .csv. A path with ``://`` is a URL for fsspec.
    dataset : str, optional
        Name of the array in an HDF5 file or a Zarr group with several.
    rows, columns : str, optional
        A slice, as in Python: ``"10:20"``, ``"::2"``.
    row_list, column_list : list of int, optional
        Indices instead, in any order; negative ones count from the end. Shuffled rows of a file
        with chunks (or of CSV) are read in order and permuted during the exchange.
    column_names : list of str, optional
        Names instead, for Parquet and for CSV with a header.
    layout : str
        Layout of the result.
    dtype : str, optional
        Convert to this dtype; a number out of its range is an error. Default: the file's own;
        for CSV, float64.
    header : bool, optional
        Whether the first line of a CSV file has names. Default: true if one of its fields is
        neither a number nor a missing value; a first line 0,1,2 needs an explicit value.
    delimiter : str
        The separator of fields in a CSV file.
    decimal : str, optional
        Its decimal point, "," or ".".
    na_values : list of str, optional
        Its fields that mark a missing value, which is NaN, besides the empty one, NA, null, ...
    index : bool
        Whether the index that pandas or Dask wrote into Parquet, or pandas into CSV (a first
        column without a name), is a column of the matrix.
    missing : str
        What a null of Parquet becomes: "nan" or a number. Default: an error.
    format : str, optional
        The format, as a suffix without its dot, of a path with another suffix. A folder that holds
        .parquet files needs none.

    Returns
    -------
    A : array
        With the axes of the array in the file; CSV gives a matrix, and so does Parquet, but of a
        column of tensors alone.
    columns : list of str
        Names of its columns, if the file has names.
    categories : str
        JSON: the categories of each column that has codes of some, by its position. Under "time"
        the dtype of dates or durations, of which A has the counts.

    Raises
    ------
    FileError
        If the file is missing, unreadable, truncated, ragged, or not the same on all nodes.
    DtypeError, ShapeError, LayoutError
        If it does not contain a matrix of a supported dtype, or an element is out of range.
    BadArgumentError
        If the format does not support an option, or a row, column or data set does not exist.
    ResourceError
        If a rank's node has not enough memory, for the matrix or for a chunk of the file.

    Notes
    -----
    Each rank reads contiguous parts of the file, in boxes of about 16 MiB (or one chunk of the
    file, if that is larger), and the ranks exchange them over MPI. Where elements are stored
    plainly (.npy, contiguous HDF5, uncompressed Zarr), ranks on one node read their own elements
    if that is less work: see `ali.files.exchange`.

    Error: 0 eps. Peak memory: 1.6 times arguments and results, of .npy, HDF5 and Zarr 1.2 times;
    boxes and chunks are not included.
    """
    place = place_to_read(path, format)
    require_layout("load", layout)
    nodes = agree_on(ctx, place)
    options = Options(
        dataset=dataset, header=header, delimiter=delimiter, decimal=decimal,
        na_values=na_values or (), index=index, missing=missing,
    )  # fmt: skip
    source = _source(ctx, place, options)
    try:

        def look() -> tuple[Picked, Picked, About, np.dtype[Any]]:
            there = source.about(None, None)
            m, n = there.shape
            ndim = len(there.array_shape)
            if ndim != 2 and (columns is not None or column_list is not None):
                raise Failure("BadArgumentError", f"{path}: a {ndim}-D array has no columns")
            down = _picked(rows, row_list, m, f"{path}: rows")
            if column_names is not None:
                across: Picked = _named(column_names, there.names, path)
                if columns is not None or column_list is not None:
                    raise Failure("BadArgumentError", f"{path}: columns are given twice")
            else:
                across = _picked(columns, column_list, n, f"{path}: columns")
            wanted = None if dtype is None else matrix_dtype(np.dtype("?"), dtype, path)
            there = source.about(wanted, across)
            return down, across, there, matrix_dtype(there.dtype, dtype, path)

        down, across, there, kind = together(ctx, path, look)
        of_columns = source.agree(ctx, across) if isinstance(source, WithCategories) else {}
        categories = json.dumps(of_columns | ({TIME: there.time} if there.time else {}))
        shape = (len(down), len(across))
        ndim = len(there.array_shape)
        A = ctx.empty(
            shape[:ndim] if ndim < 3 else (shape[0], *there.array_shape[1:]), kind, layout
        )
        names = [there.names[j] for j in across] if there.names and there.named else []
        one_cache = len(set(nodes)) == 1 and not place.is_url
        if one_cache and exchange.pays(source, A, down, across, ctx.size):
            exchange.fill(ctx, A, source, down, across, path)  # type: ignore[arg-type]  # ranges
            return A, names, categories
        order = _reading_order(down, there.grain)
        in_order = down if order is None else np.asarray(down)[order]
        grain = exchange.chosen(there.grain, in_order, across, there.shape)
        cut = exchange.cut(shape, there.dtype.itemsize, ctx.size, grain)
        together(ctx, path, lambda: _check_memory(path, there, cut, nodes.count(nodes[ctx.rank])))

        def read(box: Box) -> exchange.Array:
            rows, cols = in_order[as_slice(box.rows)], across[as_slice(box.cols)]
            return fitting(source.read(rows, cols), kind, path)

        exchange.scatter(ctx, A, cut, read, path, order, there.order)
        return A, names, categories
    finally:
        source.close()


def _reading_order(rows: Picked, grain: Grain) -> NDArray[np.int64] | None:
    """The order in which shuffled rows visit each chunk of the file once; None: as they are."""
    if isinstance(rows, range) or (grain.bands is None and grain.rows == 1):
        return None
    return None if (np.diff(rows) >= 0).all() else np.argsort(rows, kind="stable")


def _check_memory(path: str, there: About, cut: Sequence[Box], ranks: int) -> None:
    """Refuse chunks that are too large, decompressed, for the `ranks` of this node."""
    ranks = min(ranks, len(cut))  # no more of them read at once
    box = max((len(box.rows) * len(box.cols) for box in cut), default=0)
    nbytes = max(there.grain.elements(there.shape), box) * there.dtype.itemsize
    spare = available_bytes()
    if COPIES * nbytes * ranks > spare:
        raise Failure(
            "ResourceError",
            f"{path}: a chunk of this file has {readable(nbytes)}; {ranks} ranks of node "
            f"{os.uname().nodename} need {readable(COPIES * nbytes * ranks)} to read such chunks, "
            f"and {readable(spare)} are available: use fewer ranks per node, or write the file "
            "with smaller chunks",
        )


@routine(writes=(), any_axes=True)
def save(
    ctx: Context,
    A: DistMatrix,
    path: str,
    dataset: str | None = None,
    columns: list[str] | None = None,
    header: bool | None = None,
    delimiter: str = ",",
    append: bool = False,
    token: str | None = None,
) -> None:
    """Write a matrix to a file that all nodes see; every rank writes a part of it.

    Parameters
    ----------
    A : array
        In any layout; of three axes and more not in CSV and Parquet. These store a vector as one
        column, and CSV bool as 0 and 1.
    path : str
        Its suffix selects the format, as in `load`; Parquet is a folder with one file per rank,
        Zarr a folder. An existing file, or folder of the same format, is replaced in one step at
        the end. A path with ``://`` is a URL for fsspec at which nothing exists: Zarr only.
    dataset : str, optional
        Name in the HDF5 file. Default: ``data``. A group is never replaced.
    columns : list of str, optional
        Names of the columns, in Parquet and CSV. Default in Parquet: c0, c1, ...
    header : bool, optional
        Whether CSV begins with the names. Default: if names are given.
    delimiter : str
        The separator of fields in a CSV file.
    append : bool
        Keep the other data sets of the HDF5 file. It is copied first, so that a failed save
        leaves it unchanged.
    token : str, optional
        Part of the hidden name under which it is written. Default: random.

    Raises
    ------
    FileError
        If it cannot be written, or the folder is not the same on all nodes. The old file is
        unchanged, and no other file is left.
    DtypeError
        For complex numbers in Parquet and CSV.
    ShapeError
        For a matrix without columns in Parquet and CSV.
    BadArgumentError
        If the format does not support an option.

    Notes
    -----
    Ranks exchange elements in boxes of about 16 MiB and write each as it arrives.

    Error: 0 eps. Peak memory: 1.7 times arguments and results, of .npy, HDF5 and Zarr 1.2 times;
    boxes and chunks are not included.
    """
    place = Place(path)
    kind = format_of(place)
    if place.is_url and not kind.urls:
        raise Failure(
            "BadArgumentError",
            f"{path}: only .zarr can be saved to a URL, because its chunks are separate objects; "
            "save other formats to a path",
        )
    options = Options(
        dataset=dataset, header=header, delimiter=delimiter, names=columns or (), append=append
    )
    spec = Spec(A.array_shape, A.dtype, options)
    if A.ndim > 2 and not kind.any_axes:
        raise Failure(
            "ShapeError",
            f"{path}: {place.suffix} has rows and columns, and the array {A.ndim} axes: save it as "
            ".npy, .h5 or .zarr, or reshape it",
        )
    if header is not None and place.suffix != ".csv":
        raise Failure("BadArgumentError", f"{path}: {place.suffix} files have no header line")
    refuse(place, options, kind.takes)

    with kind.replacing(ctx, place, token) as temporary:
        _write(ctx, A, kind, spec, temporary, path)


def _write(
    ctx: Context, A: DistMatrix, kind: Format, spec: Spec, temporary: str, path: str
) -> None:
    created = ctx.comm.bcast(on_rank_0(ctx, path, lambda: kind.create(temporary, spec, path)))

    def see() -> None:
        if temporary != path and not os.path.exists(temporary):
            raise Failure(
                "FileError",
                f"{path}: node {os.uname().nodename} does not see the file that rank 0 created: "
                "give a path that all nodes share",
            )

    together(ctx, path, see)
    sink = together(ctx, path, lambda: kind.sink(temporary, spec, created, ctx.rank))
    try:
        cut = exchange.cut(A.shape, A.dtype.itemsize, ctx.size, kind.grain(spec))
        exchange.gather(ctx, A, cut, sink.write, path)
        together(ctx, path, sink.close)
    except BaseException:
        with contextlib.suppress(Exception):  # the first error is reported
            sink.close()
        raise
    kind.finish(ctx, temporary, spec, path)


@routine("m", "n", "dtype", "columns", pure=True)
def inspect(
    ctx: Context,
    path: str,
    dataset: str | None = None,
    header: bool | None = None,
    delimiter: str = ",",
    decimal: str | None = None,
    na_values: list[str] | None = None,
    index: bool = False,
    format: str | None = None,
) -> tuple[int, int, str, list[str]]:
    """Shape, dtype and column names of the matrix in a file, without its elements.

    Parameters
    ----------
    path, dataset, header, delimiter, decimal, na_values, index, format
        See `load`.

    Returns
    -------
    m, n : int
        Shape of the whole.
    dtype : str
        The file's dtype, which may be one that a matrix cannot have, such as uint8.
    columns : list of str
        Names of the columns, if they have names.

    Raises
    ------
    FileError, DtypeError, BadArgumentError
        See `load`.
    """
    place = place_to_read(path, format)
    agree_on(ctx, place)
    options = Options(
        dataset=dataset, header=header, delimiter=delimiter, decimal=decimal,
        na_values=na_values or (), index=index,
    )  # fmt: skip
    source = _source(ctx, place, options)
    try:

        def look() -> About:
            there = source.about(None, None)
            return source.about(None, range(there.shape[1]))

        there = together(ctx, path, look)
        return *there.shape, there.time or there.dtype.name, list(there.names)
    finally:
        source.close()


def _source(ctx: Context, place: Place, options: Options) -> Source:
    kind = format_of(place)
    refuse(place, options, kind.takes)
    return kind.open(ctx, place, options)


@routine("stamp", pure=True)
def stamp(ctx: Context, path: str) -> str:
    """Size and time of modification of a file, or of all files in a folder, as rank 0 sees them.

    Parameters
    ----------
    path : str
        A URL has no stamp.

    Returns
    -------
    stamp : str
        Empty for a URL.

    Raises
    ------
    FileError
        If it cannot be read.
    """
    told: str = ctx.comm.bcast(on_rank_0(ctx, path, lambda: _state(path)))
    return told


def _state(path: str) -> str:
    if "://" in path:
        return ""
    names = [path]
    if os.path.isdir(path):
        names = [os.path.join(folder, name) for folder, _, some in os.walk(path) for name in some]
    found = [os.stat(name) for name in names]
    nbytes = sum(about.st_size for about in found)
    newest = max((about.st_mtime_ns for about in found), default=0)
    return f"{len(found)} files, {nbytes} bytes, {newest}"


# --- checkpoints: folders of matrices with a manifest, which appear in one step ---

MATRIX = re.compile(r"\d+\.npy")  # the file of a matrix in a checkpoint


@routine("folder")
def begin_folder(ctx: Context, path: str, token: str) -> str:
    """Begin a folder under a hidden name, for `end_folder`.

    Parameters
    ----------
    path : str
        The final path.
    token : str
        Part of the hidden name.

    Returns
    -------
    folder : str
        The hidden name.

    Raises
    ------
    FileError
        If it cannot be created, or the path exists and is not a checkpoint.
    """

    final = ctx.comm.bcast(os.path.realpath(path))

    def make() -> None:
        if os.path.exists(final) and not _is_checkpoint(Path(final)):
            words = f"{path} exists and is not a checkpoint: choose another name"
            raise Failure("FileError", words)
        os.makedirs(hidden(final, token), exist_ok=True)

    on_rank_0(ctx, path, make)
    return hidden(final, token)


@routine()
def check_folder(ctx: Context, path: str, token: str) -> None:
    """Whether all ranks see the folder in which a checkpoint will be.

    Parameters
    ----------
    path : str
        The final path of the checkpoint.
    token : str
        Part of the name of a file that is there for a moment.

    Raises
    ------
    FileError
        If it cannot be written on rank 0, or a rank does not see what rank 0 writes.
    """
    parent = os.path.dirname(os.path.realpath(path))
    mark = os.path.join(parent, f".alchemist-{token}.part")

    def look() -> None:
        if not os.path.exists(mark):
            words = f"{path} cannot be a checkpoint folder: {os.uname().nodename} does not see it"
            raise Failure("FileError", f"{words}. Choose a folder that all nodes of the gang share")

    on_rank_0(ctx, path, Path(mark).touch)
    try:
        together(ctx, path, look)
    finally:
        if ctx.rank == 0:
            Path(mark).unlink(missing_ok=True)


@routine()
def end_folder(ctx: Context, path: str, token: str, manifest: str | None = None) -> None:
    """Rename a folder of `begin_folder` to its final path in one step, or remove it.

    Parameters
    ----------
    path, token : str
        As given to `begin_folder`.
    manifest : str, optional
        The text of its manifest.json. Without it the folder is removed.

    Raises
    ------
    FileError
        If it cannot be written; the old folder is unchanged.
    """
    temporary = hidden(os.path.realpath(path), token)
    if manifest is None:
        on_rank_0(ctx, path, lambda: remove(temporary))
        return
    text = manifest

    def write() -> None:
        Path(temporary, MANIFEST).write_text(text, encoding="utf-8")

    with replacing(ctx, path, token, _is_checkpoint):
        on_rank_0(ctx, path, write)


@routine("manifest")
def manifest(ctx: Context, path: str) -> str:
    """The text of the manifest.json of a checkpoint.

    Parameters
    ----------
    path : str
        The checkpoint's folder.

    Raises
    ------
    FileError
        If the folder is not a checkpoint, or is incomplete.
    """
    place = Place(str(Path(path, MANIFEST)))
    agree_on(ctx, place)

    def read() -> str:
        text = Path(place.path).read_text(encoding="utf-8")
        try:
            json.loads(text)
        except ValueError as error:
            raise Failure("FileError", f"{place.path} is damaged: {error}") from None
        return text

    return together(ctx, place.path, read)


def _is_checkpoint(folder: Path) -> bool:
    """Whether a folder is empty, or holds a checkpoint and nothing else."""
    if not folder.is_dir():
        return False
    names = os.listdir(folder)
    if not names:
        return True
    if not all(name == MANIFEST or MATRIX.fullmatch(name) for name in names):
        return False
    try:
        found = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(found, dict) and found.get("format") == CHECKPOINT_FORMAT


# --- rows and columns ---


def _picked(text: str | None, indices: Sequence[int] | None, length: int, what: str) -> Picked:
    """The selected rows or columns of `length`. Raises `Failure` (BadArgumentError)."""
    if text is not None and indices is not None:
        raise Failure("BadArgumentError", f"{what} are given twice")
    picked: Picked = range(length)
    if text is not None:
        picked = range(length)[_slice(text, what)]
    elif indices is not None:
        index = np.asarray(indices, np.int64)
        wrong = index[(index < -length) | (index >= length)]
        if wrong.size:
            raise Failure(
                "BadArgumentError", f"{what}: index {wrong[0]} is out of range for {length}"
            )
        picked = np.where(index < 0, index + length, index)
    return picked


def _slice(text: str, what: str) -> slice:
    parts = text.split(":")
    try:
        if not 2 <= len(parts) <= 3:
            raise ValueError(text)
        numbers = [int(part) if part.strip() else None for part in parts]
        found = slice(*numbers)
        range(1)[found]
    except ValueError:
        raise Failure("BadArgumentError", f"{what}: {text!r} is not a slice like 10:20") from None
    return found


def _named(names: Sequence[str], known: Sequence[str], path: str) -> Picked:
    if not known:
        raise Failure("BadArgumentError", f"{path}: its columns have no names: give numbers")
    missing = [name for name in names if name not in known]
    if missing:
        shown = ", ".join(list(known)[:20])
        raise Failure("BadArgumentError", f"{path} has no column {missing[0]!r}; it has {shown}")
    # A column of lists has several in the matrix, of the same name.
    places = [j for name in names for j, other in enumerate(known) if other == name]
    return np.array(places, np.int64)
