"""`load_matrix` and `send_blocks` of a session.

The ranks read the files (`ali.files`): no element passes through the user's process, which need not
see the files.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np

from alchemist_ray.arguments import checked_matrix_name
from alchemist_ray.arrays.handle import Handle
from alchemist_ray.arrays.saving import as_path, renamed
from alchemist_ray.attached.libraries import shipped
from alchemist_ray.attached.matrix_ref import with_categories
from alchemist_ray.dtypes import checked_missing
from alchemist_ray.errors import BadArgumentError, DtypeError
from alchemist_ray.session import xarray
from alchemist_ray.session.owner import GangOwner
from alchemist_ray.transfer.sending import send
from alchemist_ray.transfer.sources import IteratorSource, SourceError
from mpi_workers.columns.missing import ERROR
from mpi_workers.protocol.files import SPARSE_SUFFIXES

Rows = slice | int | Sequence[int] | np.ndarray[Any, Any] | None
Columns = slice | int | str | Sequence[int] | Sequence[str] | np.ndarray[Any, Any] | None


class SessionFiles(GangOwner):
    """The methods of `AlchemistSession` for files and blocks."""

    def load_matrix(
        self,
        path: str | os.PathLike[str],
        dataset: str | None = None,
        columns: Columns = None,
        rows: Rows = None,
        layout: str = "VC_STAR",
        dtype: Any = None,
        name: str | None = None,
        *,
        header: bool | None = None,
        delimiter: str = ",",
        decimal: str = ".",
        na_values: str | Sequence[str] = (),
        index: bool = False,
        missing: Any = "error",
        format: str | None = None,
        variable: str | None = None,
    ) -> Handle:
        """Load a matrix from a file that all nodes see; every rank reads its own part.

        Parameters
        ----------
        path : path_like
            ``.npy``, HDF5 (``.h5 .hdf5``), NetCDF-4 (``.nc``), Zarr (``.zarr``), Parquet
            (``.parquet``, a file or a folder of them) or CSV (``.csv``). Or a URL (``s3://...``)
            that fsspec can open. Sparse matrices: ``.npz`` of `scipy.sparse.save_npz`, Matrix
            Market (``.mtx``, ``.mtx.gz``), PETSc's (``.petsc``); rank 0 reads them. Of the other
            options they have `name` alone.
        dataset : str, optional
            Name in an HDF5 file or Zarr group, if there are several.
        variable : str, optional
            The same, as it is called in NetCDF.
        columns, rows : slice, int, list, ndarray, optional
            Load only these, in this order: indices, or one boolean per row or column. Columns of
            Parquet, and of CSV with a header, also by name.
        layout : str
            Its distribution over the ranks: one of Elemental's 14, ``"BLOCK"`` or, for
            ScaLAPACK, ``"BLOCK_CYCLIC:64"`` (``docs/layouts.md``).
        dtype : dtype, optional
            Convert to it while reading. Default: the file's dtype; for CSV, float64.
        name : str, optional
            As in `send_matrix`. Default: the name of the file, which does not keep the matrix.
        header : bool, optional
            Whether the first line of a CSV file has names. Default: if a field of it is not a
            number.
        delimiter : str
            Separator of the fields of a CSV file.
        decimal : {".", ","}
            Decimal point of a CSV file.
        na_values : str or sequence of str
            Fields of a CSV file that mark a missing value, such as ``"-999"``, besides the empty
            one, ``NA``, ``null``, ... (``docs/files.md``). Missing values are NaN.
        index : bool
            Whether the index that pandas or Dask wrote into Parquet, or pandas into CSV (a first
            column without a name), is a column of the matrix. Default: it is left out, as by
            `pandas.read_parquet`.
        missing : {"error", "nan"} or number
            What a null of Parquet becomes, as in `send_matrix`.
        format : {"npy", "h5", "hdf5", "zarr", "parquet", "csv"}, optional
            Format of a file with another suffix. A folder that holds ``.parquet`` files needs none.

        Returns
        -------
        Handle

        Raises
        ------
        FileError
            If the file is missing, unreadable, damaged, ragged, or differs between nodes; with
            the `rank` that found it.
        DtypeError, ShapeError, LayoutError
            If its content is not a matrix, or the layout or dtype is invalid.
        BadArgumentError
            If it has no such column, row or data set, or the format has no such option.
        ResourceError
            If the ranks' nodes do not have the memory.

        Notes
        -----
        All formats except ``.npy`` need ``pip install 'alchemist-on-ray[files]'``. A load that
        fails leaves no matrix.
        """
        connection = self.connection
        where = as_path(path)
        checked_matrix_name(name)
        options = {
            "dataset": dataset if variable is None else variable, "header": header,
            "delimiter": delimiter, "decimal": None if decimal == "." else decimal,
            "na_values": [na_values] if isinstance(na_values, str) else list(na_values),
            "index": index, "format": format,
        }  # fmt: skip
        chosen = {**_chosen("rows", "row", rows), **_chosen("columns", "column", columns)}
        library = shipped(connection, "files")
        fill = checked_missing(missing)
        if fill != ERROR:
            chosen["missing"] = str(fill)
        if sparse := where.endswith(SPARSE_SUFFIXES) and format is None:
            given = {**options, "rows": rows, "columns": columns, "dtype": dtype}
            _refuse_of_sparse(where, {**given, "missing": None if fill == ERROR else missing})
        if _is_mask(rows) or _is_mask(columns):
            m, n, *_ = library.routine("inspect")(where, **options)
            for what, wanted, length in (("rows", rows, m), ("columns", columns, n)):
                if _is_mask(wanted) and len(cast("Sequence[bool]", wanted)) != length:
                    raise BadArgumentError(
                        f"{what}= has {len(cast('Sequence[bool]', wanted))} booleans, but {where} "
                        f"has {length} {what}"
                    )
        if dtype is not None:
            try:
                chosen["dtype"] = np.dtype(dtype).name
            except TypeError:
                raise DtypeError(f"{dtype!r} is not a dtype") from None
        recovers = connection.address.recovers
        stamp = library.routine("stamp")(where) if recovers else ""
        categories = "{}"
        if sparse:
            handle = library.routine("load_sparse")(where)
            names = []
        else:
            handle, names, categories = library.routine("load")(
                where, layout=layout, **options, **chosen
            )
        if recovers:
            connection.request({"op": "file_stamp", "matrix": handle.id, "stamp": stamp})
        named: Handle = renamed(
            connection, handle, name or Path(where.rstrip("/")).name, pin=name is not None,
            columns=with_categories(names, json.loads(categories)),
        )  # fmt: skip
        return named

    def open_dataset(
        self,
        path: str | os.PathLike[str],
        variables: Sequence[str] | None = None,
        *,
        group: str | None = None,
        **decoding: Any,
    ) -> Any:
        """A NetCDF-4 file or Zarr group as an `xarray.Dataset` of handles.

        Parameters
        ----------
        path : path_like
            ``.nc`` or ``.zarr``; this process and all nodes see it.
        variables : sequence of str, optional
            Default: all variables of numbers, dates and durations; a warning names the others.
        group : str, optional
            The group of the file, as in `xarray.open_dataset`. Default: the root.
        **decoding
            ``decode_times``, ``decode_timedelta``, ``mask_and_scale`` as in `xarray.open_dataset`.

        Returns
        -------
        xarray.Dataset
            Coordinates are in this process, as `xarray.open_dataset` decodes them; variables are
            handles. Missing values are NaN, and packed numbers are unpacked, in xarray's dtypes.

        Raises
        ------
        FileError, DtypeError, BadArgumentError
            As `load_matrix`; for other keywords, and ``use_cftime=True``, whose dates are objects.
        SessionError
            Without xarray: ``pip install 'alchemist-on-ray[xarray]'``.

        Notes
        -----
        The ranks read the variables in parallel, as `load_matrix`.
        """
        return xarray.open_dataset(self.load_matrix, path, variables, group, decoding)

    def send_blocks(
        self,
        blocks: Iterable[Any],
        *,
        shape: tuple[int, ...],
        dtype: Any = "float64",
        missing: Any = "error",
        layout: str = "VC_STAR",
        name: str | None = None,
        print_times: bool = False,
    ) -> Handle:
        """Send an array in blocks of rows, without ever having all of it in this process.

        Parameters
        ----------
        blocks : iterable of array_like, shapes (k, n) or (n,); of more axes (k, ...) or (...)
            Whole rows in order, for example from a generator. One block is in memory at a time.
        shape : tuple of int
            ``(m, n)`` of the matrix, ``(m,)`` of a vector, or of an array of up to 8 axes.
        dtype : dtype
            Of the matrix; blocks are converted to it.
        missing, layout, name, print_times
            See `send_matrix`.

        Returns
        -------
        Handle

        Raises
        ------
        ShapeError, DtypeError
            If a block does not fit, with its number.
        IncompleteMatrixError
            If rows are missing at the end.
        Exception
            Errors of the iterable. The matrix is freed.

        Notes
        -----
        The memory for `shape` is allocated on the ranks' nodes first; this process needs that of
        a block, the object store none. `send_matrix` does the same for an `h5py.Dataset` and a
        `zarr.Array`, and treats a `numpy.memmap` as an array.
        """
        source = IteratorSource.inspect(blocks, shape, dtype, missing)
        try:
            sent: Handle = send(
                self.connection, source, layout=layout, name=name, print_times=print_times
            )
            return sent
        except SourceError as error:
            raise error.error from None


def _chosen(what: str, one: str, wanted: Any) -> dict[str, Any]:
    """Rows or columns as arguments of the routine. Raises `BadArgumentError`."""
    if wanted is None:
        return {}
    if isinstance(wanted, slice):
        parts = (wanted.start, wanted.stop, wanted.step)
        try:
            return {what: ":".join("" if x is None else str(x.__index__()) for x in parts)}
        except AttributeError:
            raise BadArgumentError(f"{what}={wanted!r}: a slice must have integers") from None
    items = [wanted] if isinstance(wanted, str) or not np.iterable(wanted) else list(wanted)
    if items and one == "column" and all(isinstance(item, str) for item in items):
        return {"column_names": items}
    index = np.asarray(items if items else np.empty(0, np.int64))
    if index.dtype.kind == "b" and index.ndim == 1:
        index = np.flatnonzero(index)
    if index.dtype.kind not in "iu" or index.ndim != 1:
        names = " or names" if one == "column" else ""
        raise BadArgumentError(
            f"{what} must be a slice, indices{names} or booleans, not {wanted!r}"
        )
    return {f"{one}_list": index.tolist()}


def _refuse_of_sparse(path: str, options: dict[str, Any]) -> None:
    """Refuse options that the files of sparse matrices do not have."""
    unset = {"delimiter": ",", "na_values": [], "index": False}
    for name, value in options.items():
        if value is not None and not (name in unset and value == unset[name]):
            raise BadArgumentError(
                f"{path}: {name}= is not an option of files of sparse matrices: load it without, "
                "then A[rows], A.T[columns].T and A.astype(dtype) give what is wanted"
            )


def _is_mask(wanted: Any) -> bool:
    return isinstance(wanted, Sequence | np.ndarray) and np.asarray(wanted).dtype.kind == "b"
