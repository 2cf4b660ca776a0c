"""xarray: a Dataset whose variables are handles; the elements stay on the ranks."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from alchemist_ray.errors import BadArgumentError, SessionError

Load = Callable[..., Any]
PACKED = ("scale_factor", "add_offset", "_FillValue", "missing_value")


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
    with (
        xr.open_dataset(path, **opening) as decoded,
        xr.open_dataset(path, mask_and_scale=False, **opening) as there,
    ):
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
    if dtype.kind in "iu":
        dtype = np.dtype(np.int32 if dtype.itemsize < 4 or dtype == np.int32 else np.int64)
    A = load(path, dataset=there.name, dtype=dtype)
    for key in ("_FillValue", "missing_value"):
        if dtype.kind == "f" and attrs.get(key) is not None and attrs[key] == attrs[key]:
            A = np.where(np.asarray(attrs[key], dtype) == A, np.asarray(np.nan, dtype), A)
    if {"scale_factor", "add_offset"} & attrs.keys():
        scale, offset = attrs.get("scale_factor", 1), attrs.get("add_offset", 0)
        A = A * np.asarray(scale, dtype) + np.asarray(offset, dtype)
    return there.dims, A, {key: x for key, x in there.attrs.items() if key not in PACKED}
