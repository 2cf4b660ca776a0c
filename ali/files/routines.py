"""The routines of the library `files`."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ali.files import boxes, exchange, own, remote
from ali.files.formats import (
    About,
    Format,
    Options,
    Source,
    Spec,
    format_of,
    matrix_dtype,
)
from ali.files.paths import Place, agree_on, replacing, together
from ali.interface import Context, routine
from mpi_workers.failures import Failure
from mpi_workers.matrix.dist_matrix import DistMatrix
from mpi_workers.matrix.layout import LAYOUTS

Picked = boxes.Pick


@routine("A")
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
) -> DistMatrix:
    """Matrix from a file that all nodes see; every rank reads a part of it.

    Parameters
    ----------
    path : str
        Its suffix says the format: .npy, .h5, .hdf5, .zarr, .parquet (a file or a folder),
        .csv. With ``://`` in it, a URL for fsspec.
    dataset : str, optional
        Which one, in an HDF5 file or a Zarr group with several.
    rows, columns : str, optional
        A slice, as in Python: ``"10:20"``, ``"::2"``.
    row_list, column_list : list of int, optional
        Indices instead, in any order; negative ones count from the end.
    column_names : list of str, optional
        Names instead, of Parquet and of CSV with a header.
    layout : str
        One of Elemental's 14.
    dtype : str, optional
        Convert to it. Default: the file's own; of CSV, float64.
    header : bool, optional
        Whether the first line of a CSV file has names. Default: if a field of it is no number.
    delimiter : str
        Between the fields of a CSV file.

    Returns
    -------
    A : matrix, shape (m, n)

    Raises
    ------
    FileError
        If the file is missing, unreadable, truncated, ragged, or not the same on all nodes.
    DtypeError, ShapeError, LayoutError
        If what it has is no matrix of ours.
    BadArgumentError
        If the format does not know such an option, or there is no such row, column or data set.
    ResourceError
        If a rank's node has not the memory.

    Notes
    -----
    Each rank reads stretches that lie together in the file, in pieces of about 16 MiB (or a
    chunk of the file, where that is larger), and the ranks exchange them over MPI. Ranks on one
    node read what is their own, where elements lie plainly in the file (.npy, contiguous HDF5,
    uncompressed Zarr) and that is less work: see `ali.files.own`.
    """
    place = Place(path)
    if layout not in LAYOUTS:
        raise Failure("LayoutError", f"unknown layout {layout!r}; there are {', '.join(LAYOUTS)}")
    nodes = agree_on(ctx, place)
    options = Options(dataset=dataset, header=header, delimiter=delimiter)
    source = format_of(place).open(ctx, place, options)
    try:

        def look() -> tuple[Picked, Picked, About, np.dtype[Any]]:
            there = source.about(None, None)
            m, n = there.shape
            down = _picked(rows, row_list, m, f"{path}: rows")
            if column_names is not None:
                across: Picked = _named(column_names, there.names, path)
                if columns is not None or column_list is not None:
                    raise Failure("BadArgumentError", f"{path}: columns are chosen twice")
            else:
                across = _picked(columns, column_list, n, f"{path}: columns")
            wanted = None if dtype is None else matrix_dtype(np.dtype("b"), dtype, path)
            there = source.about(wanted, across)
            return down, across, there, matrix_dtype(there.dtype, dtype, path)

        down, across, there, kind = together(ctx, path, look)
        shape = (len(down), len(across))
        A = ctx.empty(shape, kind, layout)
        one_cache = nodes == 1 and not place.is_url
        if one_cache and own.pays(source, A, down, across, ctx.size):
            own.fill(ctx, A, source, down, across, path)  # type: ignore[arg-type]  # ranges
            return A
        grain = boxes.chosen(there.grain, down, across, there.shape)
        cut = boxes.cut(shape, there.dtype.itemsize, ctx.size, grain)
        exchange.scatter(ctx, A, cut, lambda box: _read(source, down, across, box), path)
        return A
    finally:
        source.close()


def _read(source: Source, rows: Picked, cols: Picked, box: boxes.Box) -> boxes.Array:
    return source.read(rows[box.rows.start : box.rows.stop], cols[box.cols.start : box.cols.stop])


@routine()
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
    A : matrix, shape (m, n)
        In any layout.
    path : str
        Its suffix says the format, as in `load`; Parquet becomes a folder with a file for each
        rank, Zarr a folder. What is there already is replaced in one step at the end.
        With ``://`` in it, a URL for fsspec where nothing is: Zarr only.
    dataset : str, optional
        Name in the HDF5 file. Default: ``data``.
    columns : list of str, optional
        Names of the columns, in Parquet and CSV. Default in Parquet: c0, c1, ...
    header : bool, optional
        Whether CSV begins with the names. Default: if there are any.
    delimiter : str
        Between the fields of a CSV file.
    append : bool
        Keep the other data sets of the HDF5 file. It is copied first, so that a save that fails
        leaves it whole.
    token : str, optional
        Part of the hidden name under which it is written. Default: a random one.

    Raises
    ------
    FileError
        If it cannot be written, or the folder is not the same on all nodes. The old file is
        as it was, and nothing else is there.
    DtypeError
        For complex numbers in Parquet and CSV.
    BadArgumentError
        If the format does not know such an option.
    """
    place = Place(path)
    kind = format_of(place)
    if place.is_url and not kind.urls:
        raise Failure(
            "BadArgumentError",
            f"{path}: behind a URL only .zarr is written, whose parts are objects of their own; "
            "other formats are saved to paths",
        )
    options = Options(
        dataset=dataset, header=header, delimiter=delimiter, names=columns or (), append=append
    )
    spec = Spec(A.shape, A.dtype, options)
    if header is not None and place.suffix != ".csv":
        raise Failure("BadArgumentError", f"{path}: {place.suffix} files have no header line")

    if place.is_url:
        with remote.appearing(ctx, place):
            _write(ctx, A, kind, spec, path, path)
        return

    def owned(folder: Path) -> bool:
        return kind.folders and kind.owns(str(folder))

    with replacing(ctx, path, token, owned) as temporary:
        _write(ctx, A, kind, spec, temporary, path)


def _write(
    ctx: Context, A: DistMatrix, kind: Format, spec: Spec, temporary: str, path: str
) -> None:
    def begin() -> Any:
        return kind.create(temporary, spec, path) if ctx.rank == 0 else None

    created = ctx.comm.bcast(together(ctx, path, begin))

    def see() -> None:
        if temporary != path and not os.path.exists(temporary):
            raise Failure(
                "FileError",
                f"{path}: what rank 0 writes there, node {os.uname().nodename} does not see: give "
                "a path that all nodes share",
            )

    together(ctx, path, see)
    sink = together(ctx, path, lambda: kind.sink(temporary, spec, created, ctx.rank))
    try:
        cut = boxes.cut(A.shape, A.dtype.itemsize, ctx.size, kind.grain(spec))
        exchange.gather(ctx, A, cut, sink.write, path)
        together(ctx, path, sink.close)
    except BaseException:
        with contextlib.suppress(Exception):  # the first error is the one to tell
            sink.close()
        raise
    kind.finish(ctx, temporary, spec, path)


@routine("m", "n", "dtype", "columns")
def inspect(
    ctx: Context,
    path: str,
    dataset: str | None = None,
    header: bool | None = None,
    delimiter: str = ",",
) -> tuple[int, int, str, list[str]]:
    """What `load` would find in a file, without its elements.

    Parameters
    ----------
    path, dataset, header, delimiter
        See `load`.

    Returns
    -------
    m, n : int
        Shape of the whole.
    dtype : str
        Of the file; it may be one that a matrix cannot have, such as uint8.
    columns : list of str
        Names of the columns, if it has any.

    Raises
    ------
    FileError, DtypeError, BadArgumentError
        See `load`.
    """
    place = Place(path)
    agree_on(ctx, place)
    source = format_of(place).open(
        ctx, place, Options(dataset=dataset, header=header, delimiter=delimiter)
    )
    try:

        def look() -> About:
            there = source.about(None, None)
            return source.about(None, range(there.shape[1]))

        there = together(ctx, path, look)
        return *there.shape, there.dtype.name, list(there.names)
    finally:
        source.close()


# --- rows and columns ---


def _picked(text: str | None, indices: Sequence[int] | None, length: int, what: str) -> Picked:
    """Which of `length` rows or columns are meant. Raises `Failure` (BadArgumentError)."""
    if text is not None and indices is not None:
        raise Failure("BadArgumentError", f"{what} are chosen twice")
    picked: Picked = range(length)
    if text is not None:
        picked = range(length)[_slice(text, what)]
    elif indices is not None:
        index = np.asarray(indices, np.int64)
        wrong = index[(index < -length) | (index >= length)]
        if wrong.size:
            raise Failure("BadArgumentError", f"{what}: {wrong[0]} is not below {length}")
        picked = np.where(index < 0, index + length, index)
    if not len(picked):
        raise Failure("ShapeError", f"{what}: none of {length} are chosen")
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
        raise Failure("BadArgumentError", f"{what}: {text!r} is not a slice, as 10:20") from None
    return found


def _named(names: Sequence[str], known: Sequence[str], path: str) -> Picked:
    if not known:
        raise Failure("BadArgumentError", f"{path}: its columns have no names: give their numbers")
    missing = [name for name in names if name not in known]
    if missing:
        shown = ", ".join(list(known)[:20])
        raise Failure("BadArgumentError", f"{path} has no column {missing[0]!r}; it has {shown}")
    if not names:
        raise Failure("ShapeError", f"{path}: columns: none are chosen")
    return np.array([list(known).index(name) for name in names], np.int64)
