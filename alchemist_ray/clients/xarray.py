"""xarray: a Dataset whose variables are handles; the elements stay on the ranks."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from alchemist_ray.errors import BadArgumentError, FileError, SessionError

Load = Callable[..., Any]
MISSING = ("_FillValue", "missing_value")
PACKED = ("scale_factor", "add_offset", "_Unsigned", *MISSING)


def open_dataset(load: Load, path: str | os.PathLike[str], variables: Sequence[str] | None) -> Any:
    """See `AlchemistSession.open_dataset`; `load` is `AlchemistSession.load_matrix`."""
    try:
        import xarray as xr  # noqa: PLC0415 - optional
    except ModuleNotFoundError as error:
        raise SessionError(
            "open_dataset needs xarray: pip install 'alchemist-on-ray[xarray]'"
        ) from error
    in_folder = os.fspath(path).rstrip("/").endswith(".zarr")
    opening: Any = {"engine": "zarr", "consolidated": False} if in_folder else {
        "engine": "h5netcdf"}  # fmt: skip
    try:
        there = xr.open_dataset(path, mask_and_scale=False, **opening)
    except OSError as error:
        raise FileError(f"{os.fspath(path)}: not a Dataset: {error}", path=path) from error
    with there:
        decoded = xr.decode_cf(there)
        numeric = [str(name) for name, one in there.data_vars.items() if one.dtype.kind in "biuf"]
        wanted = list(numeric if variables is None else variables)
        unknown = [name for name in wanted if name not in numeric]
        if unknown:
            raise BadArgumentError(
                f"{path} has no variable of numbers {unknown[0]!r}; it has {', '.join(numeric)}"
            )
        found = {name: _variable(load, path, there[name], decoded[name].dtype) for name in wanted}
        coords = there.coords.to_dataset().load().coords
        return xr.Dataset(found, coords=coords, attrs=there.attrs)


def _variable(load: Load, path: str | os.PathLike[str], there: Any, dtype: np.dtype[Any]) -> Any:
    """Dimensions, handle and attributes; packed numbers in the dtype in which xarray has them."""
    attrs = {**there.encoding, **there.attrs}
    unsigned = attrs.get("_Unsigned") == "true"  # integers that netCDF's classic model calls signed
    wide = np.dtype(np.int64) if unsigned else None
    A = load(path, dataset=there.name, dtype=dtype if dtype.kind == "f" else wide)
    marks = [x for key in MISSING for x in np.ravel(attrs.get(key, ())) if x == x]
    for mark in marks if dtype.kind == "f" else ():
        A = np.where(np.asarray(mark, dtype) == A, np.asarray(np.nan, dtype), A)
    if unsigned:
        A = A % (1 << 8 * there.dtype.itemsize)
    if {"scale_factor", "add_offset"} & attrs.keys():
        scale, offset = attrs.get("scale_factor", 1), attrs.get("add_offset", 0)
        A = A * np.asarray(scale, dtype) + np.asarray(offset, dtype)
    A = A != 0 if dtype.kind == "b" else A.astype(dtype, copy=False)
    return there.dims, A, {key: x for key, x in there.attrs.items() if key not in PACKED}
