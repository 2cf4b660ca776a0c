"""HDF5 through h5py, without parallel HDF5.

A matrix is written as one contiguous data set. ``H5Dget_offset`` gives its offset in the file, and
every rank writes its elements there directly: no turns, no file per rank, and an ordinary file.
Contiguous data sets are read in the same way; chunked, compressed and virtual ones through h5py,
each rank its own chunks.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from typing import Any

from ali.files.exchange import ArraySource
from ali.files.formats import Options, Source, Spec, checked
from ali.files.npy import RawFormat, RawSource
from ali.files.paths import Place, extra
from mpi_workers.failures import Failure
from mpi_workers.matrix.layout import MAX_AXES

DEFAULT = "data"  # name of a data set that is written without a name


class Hdf5(RawFormat):
    takes = ("dataset", "append")

    def look(self, place: Place, options: Options) -> Source:
        h5py = extra(place.path, "h5py")
        with contextlib.ExitStack() as opened:
            where: Any = place.path
            if place.is_url:
                fs, inside = place.filesystem()
                where = opened.enter_context(fs.open(inside, "rb"))
            try:
                file = opened.enter_context(h5py.File(where, "r"))
            except OSError as error:
                words = f"{place.path} is not a complete HDF5 file: {error}"
                raise Failure("FileError", words) from None
            dataset = _dataset(h5py, file, options.dataset, place.path)
            shape = checked(dataset.shape, dataset.dtype, f"{place.path}: {dataset.name}")
            offset, dtype = dataset.id.get_offset(), dataset.dtype
            # The bytes are NumPy's only if HDF5's type for the dtype is the same.
            plain = h5py.h5t.py_create(dtype, logical=True) == dataset.id.get_type()
            # An external link leads to another file, with its own offsets.
            elsewhere = dataset.external or dataset.file.filename != file.filename
            if offset is None or not plain or place.is_url or elsewhere:
                return ArraySource(dataset, opened.pop_all())
        return RawSource(place.open(), offset, shape, dtype, by_columns=False)

    def create(self, path: str, spec: Spec, old: str) -> int:
        h5py = extra(old, "h5py")
        if old.endswith(".nc"):
            raise Failure(
                "BadArgumentError",
                f"{old}: NetCDF files are read, and not written: save to .h5, or fetch the array "
                "and write it with xarray's to_netcdf",
            )
        appending = spec.options.append and os.path.exists(old)
        if appending:
            shutil.copyfile(old, path)
        with h5py.File(path, "r+" if appending else "x") as file:
            name = spec.options.dataset or DEFAULT
            kind = file.get(name, getclass=True)
            if kind not in (None, h5py.Dataset):
                raise Failure(
                    "FileError",
                    f"{old}: {name!r} is a group, whose contents would be lost: choose another "
                    "dataset=...",
                )
            if kind is not None:
                del file[name]
            contiguous = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
            contiguous.set_layout(h5py.h5d.CONTIGUOUS)
            contiguous.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
            contiguous.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
            links = h5py.h5p.create(h5py.h5p.LINK_CREATE)
            links.set_create_intermediate_group(True)
            made = h5py.h5d.create(
                file.id,
                name.encode(),
                h5py.h5t.py_create(spec.dtype, logical=True),
                h5py.h5s.create_simple(spec.array_shape),
                dcpl=contiguous,
                lcpl=links,
            )
            offset: int | None = made.get_offset()
        return offset or 0  # None: it has no elements


def _dataset(h5py: Any, file: Any, name: str | None, path: str) -> Any:
    """The data set of that name, or the only one that could be a matrix."""
    found: list[str] = []

    def visit(inner: str, item: Any) -> None:
        if not isinstance(item, h5py.Dataset) or item.shape is None:  # h5py.Empty
            return
        if "pandas_type" in item.parent.attrs and not inner.endswith("values"):
            return  # a frame's or series' index, or its columns
        if item.dtype.kind in "biufc" and item.ndim <= MAX_AXES:
            found.append(inner)

    if name is not None:
        there = file.get(name)  # None, too, for a link to nothing
        if isinstance(there, h5py.Dataset):
            if there.shape is None:
                raise Failure("ShapeError", f"{path}: data set {name!r} is empty: it has no shape")
            return there
        file.visititems(visit)
        raise Failure(
            "FileError",
            f"{path} has no data set {name!r}; it has {', '.join(found) or 'no numeric ones'}",
        )
    file.visititems(visit)
    if len(found) == 1:
        return file[found[0]]
    if found:
        raise Failure(
            "BadArgumentError",
            f"{path} has {len(found)} data sets: choose one, such as dataset={found[0]!r} "
            f"(it has {', '.join(found)})",
        )
    names: list[str] = []
    file.visititems(lambda inner, item: names.append(inner))
    raise Failure(
        "DtypeError",
        f"{path} has no data set of numbers" + (f"; it has {', '.join(names)}" if names else ""),
    )


FORMAT = Hdf5()
