"""Matrices in files, as a user asks for them; the ranks do the work (`ali.files`).

The user's process only says what and where: no element passes through it, and it need not see
the files.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np

from alchemist_ray.arrays.handle import Handle
from alchemist_ray.errors import BadArgumentError, DtypeError
from alchemist_ray.io.saving import as_path, files_library, renamed
from alchemist_ray.runtime.gang_owner import GangOwner
from alchemist_ray.transfer import iterators
from alchemist_ray.transfer.sending import send

Rows = slice | int | Sequence[int] | np.ndarray[Any, Any] | None
Columns = slice | int | str | Sequence[int] | Sequence[str] | np.ndarray[Any, Any] | None


class SessionFiles(GangOwner):
    """What a session does with files; a part of `AlchemistSession`."""

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
    ) -> Handle:
        """A matrix from a file that all nodes see; every rank reads its own part of it.

        Parameters
        ----------
        path : path_like
            ``.npy``, HDF5 (``.h5 .hdf5``), Zarr (``.zarr``), Parquet (``.parquet``, a file or a
            folder of them) or CSV (``.csv``). Or a URL (``s3://...``) that fsspec knows.
        dataset : str, optional
            Which one of an HDF5 file or a Zarr group, where there are several.
        columns, rows : slice, int, list, ndarray, optional
            Only these, in this order: indices, or one boolean for each; columns of Parquet and
            of CSV with a header also by name.
        layout : str
            How to spread it over the ranks: one of Elemental's 14 names.
        dtype : dtype, optional
            Convert to it on the way. Default: the file's own; of CSV, float64.
        name : str, optional
            For people; shown by the handle. Default: the file's.
        header : bool, optional
            Whether a CSV file begins with names. Default: if a field of its first line is no
            number.
        delimiter : str
            Between the fields of a CSV file.

        Returns
        -------
        Handle

        Raises
        ------
        FileError
            If it is missing, unreadable, damaged, ragged, or not the same on all nodes; with
            the `rank` that met it.
        DtypeError, ShapeError, LayoutError
            If what is in it is no matrix.
        BadArgumentError
            If it has no such column, row or data set, or the format knows no such option.
        ResourceError
            If the ranks' nodes have not the memory.

        Notes
        -----
        Needs the extra: ``pip install 'alchemist-on-ray[files]'``, but for ``.npy``. A load
        that fails leaves no matrix.
        """
        connection = self.connection
        where = as_path(path)
        chosen = {**_chosen("rows", "row", rows), **_chosen("columns", "column", columns)}
        library = files_library(connection)
        if _is_mask(rows) or _is_mask(columns):
            m, n, *_ = library.routine("inspect")(where, dataset, header, delimiter)
            for what, wanted, length in (("rows", rows, m), ("columns", columns, n)):
                if _is_mask(wanted) and len(cast("Sequence[bool]", wanted)) != length:
                    raise BadArgumentError(f"{where} has {length} {what}, not as many booleans")
        if dtype is not None:
            try:
                chosen["dtype"] = np.dtype(dtype).name
            except TypeError:
                raise DtypeError(f"{dtype!r} is not a dtype") from None
        handle: Handle = library.routine("load")(
            where, dataset=dataset, layout=layout, header=header, delimiter=delimiter, **chosen
        )
        named: Handle = renamed(
            connection, handle, name or Path(where.rstrip("/")).name, pin=name is not None
        )
        return named

    def send_blocks(
        self,
        blocks: Iterable[Any],
        *,
        shape: tuple[int, int],
        dtype: Any = "float64",
        layout: str = "VC_STAR",
        name: str | None = None,
        print_times: bool = False,
    ) -> Handle:
        """Send a matrix that comes in blocks of rows, and is never whole in this process.

        Parameters
        ----------
        blocks : iterable of array_like, shapes (k, n) or (n,)
            Whole rows, from the first on; a generator, for one. One block is here at a time.
        shape : (int, int)
            ``(m, n)`` of the whole.
        dtype : dtype
            Of the matrix; blocks are converted to it.
        layout, name, print_times
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
            What the iterable raises. Nothing partial stays behind.

        Notes
        -----
        What `shape` needs is taken on the ranks' nodes at once; here and in the object store
        nothing but the block. `send_matrix` does the same for an `h5py.Dataset` and a
        `zarr.Array`, and takes a `numpy.memmap` as it is.
        """
        source = iterators.IteratorSource.inspect(blocks, shape, dtype)
        try:
            sent: Handle = send(
                self.connection, source, layout=layout, name=name, print_times=print_times
            )
            return sent
        except iterators.SourceError as error:
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
            raise BadArgumentError(f"{what}={wanted!r}: a slice of integers") from None
    items = [wanted] if isinstance(wanted, str | int) else list(wanted)
    if items and one == "column" and all(isinstance(item, str) for item in items):
        return {"column_names": items}
    index = np.asarray(items if items else np.empty(0, np.int64))
    if index.dtype.kind == "b" and index.ndim == 1:
        index = np.flatnonzero(index)
    if index.dtype.kind not in "iu" or index.ndim != 1:
        names = " or names" if one == "column" else ""
        raise BadArgumentError(f"{what}: a slice, indices{names}, or booleans, not {wanted!r}")
    return {f"{one}_list": index.tolist()}


def _is_mask(wanted: Any) -> bool:
    return isinstance(wanted, Sequence | np.ndarray) and np.asarray(wanted).dtype.kind == "b"
