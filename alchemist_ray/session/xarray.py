"""xarray: a Dataset whose variables are handles; the elements stay on the ranks."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from alchemist_ray.errors import BadArgumentError, FileError, SessionError

Load = Callable[..., Any]
KINDS = "biufcmM"  # of dtypes that handles have
DECODING = ("decode_times", "decode_timedelta", "mask_and_scale")  # keywords of xarray
PACKED = ("_FillValue", "missing_value", "scale_factor", "add_offset", "_Unsigned")


def open_dataset(
    load: Load,
    path: str | os.PathLike[str],
    variables: Sequence[str] | None,
    group: str | None,
    decoding: Mapping[str, Any],
) -> Any:
    """See `AlchemistSession.open_dataset`; `load` is `AlchemistSession.load_matrix`."""
    decoding = _checked(decoding)
    try:
        import xarray as xr  # noqa: PLC0415 - optional
    except ModuleNotFoundError as error:
        raise SessionError(
            "open_dataset needs xarray: pip install 'alchemist-on-ray[xarray]'"
        ) from error
    with _opened(xr, path, group) as stored:
        try:
            decoded = _decoded(xr, stored, decoding)
            coords = decoded.coords.to_dataset().load().coords
        except (ValueError, OverflowError) as error:
            which = "".join(getattr(error, "__notes__", ())).partition(" with ")[0]  # the variable
            words = f"{os.fspath(path)} cannot be decoded: {error} {which}"
            raise FileError(words.rstrip(), path=path) from error
        place = "" if group is None else group.strip("/") + "/"
        found = {}
        for name in _wanted(path, stored, decoded, variables):
            A = load(path, dataset=place + name)
            one = decoded[name]
            found[name] = one.dims, _as_decoded(xr, A, stored[name], one.dtype, decoding), one.attrs
        return xr.Dataset(found, coords=coords, attrs=decoded.attrs)


def _opened(xr: Any, path: str | os.PathLike[str], group: str | None) -> Any:
    """The Dataset of a file or folder as it is stored. Raises `FileError`."""
    opening: dict[str, Any] = {"engine": "h5netcdf"}
    if os.fspath(path).rstrip("/").endswith(".zarr"):
        opening = {"engine": "zarr", "consolidated": False}
    try:
        return xr.open_dataset(path, decode_cf=False, group=group, **opening)
    except (OSError, KeyError) as error:
        if group is not None and os.path.exists(path):
            words = f"{os.fspath(path)} has no group {group!r} that is a Dataset: {error}"
            raise FileError(words, path=path) from error
        raise FileError(f"{os.fspath(path)}: not a Dataset: {error}", path=path) from error


def _wanted(
    path: str | os.PathLike[str], stored: Any, decoded: Any, variables: Sequence[str] | None
) -> list[str]:
    """The variables that become handles; without `variables` it warns of those that cannot.

    Raises `BadArgumentError`.
    """
    kinds = {str(name): one.dtype for name, one in decoded.data_vars.items()}
    numeric = [name for name, dtype in kinds.items() if dtype.kind in KINDS]
    if variables is not None:
        if unknown := [name for name in variables if name not in numeric]:
            raise BadArgumentError(
                f"{path} has no variable of numbers {unknown[0]!r}; it has {', '.join(numeric)}"
                + _as_stored(stored, kinds, unknown[0])
            )
        return list(variables)
    if left := [name for name in kinds if name not in numeric]:
        shown = ", ".join(f"{name!r} ({kinds[name]})" for name in left)
        warnings.warn(
            f"{path}: open_dataset leaves out {shown}: a handle has numbers, bools or dates"
            + "".join(_as_stored(stored, kinds, name) for name in left),
            stacklevel=4,
        )
    return numeric


def _as_decoded(
    xr: Any, A: Any, stored: Any, dtype: np.dtype[Any], decoding: Mapping[str, Any]
) -> Any:
    """A handle of a variable's stored elements, with the values that xarray decodes them to."""
    attrs = stored.attrs
    if not decoding.get("mask_and_scale", True):
        attrs = {key: its for key, its in attrs.items() if key not in PACKED}
    its = stored.variable._replace(attrs=attrs)
    if dtype.kind not in "mM":
        return _numbers(A, its, dtype)
    times = {key: value for key, value in decoding.items() if key == "decode_times"}
    durations = {"decode_timedelta": decoding.get("decode_timedelta") or True}
    units = {key: attrs[key] for key in ("units", "calendar", "dtype") if key in attrs}
    pair = xr.Variable(("two",), np.arange(2), units)
    pair = xr.conventions.decode_cf_variable(stored.name, pair, **times, **durations)
    return _dates(A, its, pair.values.astype(dtype))


def _checked(decoding: Mapping[str, Any]) -> dict[str, Any]:
    """The keywords that xarray gets. Raises `BadArgumentError`."""
    found = {key: its for key, its in decoding.items() if its is not None}
    if found.pop("use_cftime", False):
        raise BadArgumentError(
            "use_cftime=True makes objects of dates, and a handle has none: leave it out for "
            "datetime64, or decode_times=False gives the counts that are stored"
        )
    if unknown := [key for key in found if key not in DECODING]:
        raise BadArgumentError(
            f"open_dataset has no {unknown[0]}=: it has {', '.join(DECODING)}, as xarray; leave it "
            "out, and use methods of the Dataset"
        )
    return found


def _decoded(xr: Any, stored: Any, decoding: dict[str, Any]) -> Any:
    """The Dataset as xarray decodes it, also where it would leave durations as they are stored.

    By default it decodes durations only of variables that say so, but marks the missing integers
    of the others as if it had decoded them.
    """
    found = xr.decode_cf(stored, **decoding)
    if "decode_timedelta" in decoding:
        return found
    plain = xr.decode_cf(stored, **decoding, decode_timedelta=False)
    odd = [
        name for name, one in found.variables.items()
        if one.dtype.kind == "i" and plain[name].dtype.kind == "f"
    ]  # fmt: skip
    return found.assign_coords({name: plain[name] for name in odd if name in found.coords}).assign(
        {name: plain[name] for name in odd if name not in found.coords}
    )


def _as_stored(stored: Any, kinds: dict[str, np.dtype[Any]], name: str) -> str:
    """The remedy for numbers in the file that xarray decodes to something else; or nothing."""
    if name not in kinds or stored[name].dtype.kind not in "biufc":
        return ""
    return f"; load_matrix(path, dataset={name!r}) loads the numbers that are stored"


def _numbers(A: Any, stored: Any, dtype: np.dtype[Any]) -> Any:
    """The numbers of a variable, in the dtype in which xarray has them."""
    attrs = stored.attrs
    if A.dtype.kind + str(attrs.get("_Unsigned")) in ("itrue", "ufalse"):
        A = _other_sign(A)
    if dtype.kind in "fc":
        missing = [np.equal(A, mark) for mark in _marks(attrs, stored.dtype, A.dtype)]
        A = A.astype(dtype, copy=False)
        for there in missing:
            A = np.where(there, np.asarray(np.nan, dtype), A)
    for name, compute in (("scale_factor", np.multiply), ("add_offset", np.add)):
        if name in attrs:
            A = compute(A, np.asarray(np.ravel(attrs[name])[0], dtype))
    return A != 0 if dtype.kind == "b" else A.astype(dtype, copy=False)


def _dates(A: Any, stored: Any, two: Any) -> Any:
    """Dates or durations, of which xarray makes `two` of 0 and 1."""
    zero, one = two.view(np.int64).tolist()
    nat = np.iinfo(np.int64).min
    if A.dtype.kind in "iu" and not {"scale_factor", "add_offset"} & set(stored.attrs):
        marks = _marks(stored.attrs, stored.dtype, A.dtype)
        marks += [np.int64(nat)] if A.dtype == np.int64 else []
        missing = [np.equal(A, mark) for mark in marks]
        counts = A.astype(np.int64) * (one - zero) + zero
    else:
        floats = _numbers(A, stored, np.dtype(np.float64))
        missing = [np.isnan(floats)]
        floats = np.rint(np.where(missing[0], 0.0, floats) * (one - zero))
        counts = floats.astype(np.int64) + zero
    for there in missing:
        counts = np.where(there, nat, counts)
    return counts.astype(two.dtype)


def _other_sign(A: Any) -> Any:
    """The same bits as unsigned integers, or as signed ones; `astype` would refuse some."""
    half, signed = 1 << (8 * A.dtype.itemsize - 1), A.dtype.kind == "u"
    other = np.dtype(f"{'i' if signed else 'u'}{A.dtype.itemsize}").type
    first_bit = A.dtype.type(half) <= A if signed else A < 0
    return (A & A.dtype.type(half - 1)).astype(other) + first_bit * other(-half if signed else half)


def _marks(attrs: Any, stored: np.dtype[Any], dtype: np.dtype[Any]) -> list[Any]:
    """The elements, of `dtype`, that mark a missing value; `stored` has the sign of the file."""
    fills = np.ravel(attrs.get("_FillValue", ()))
    if dtype.kind != stored.kind:  # `_Unsigned`: a fill value is stored as the elements are
        fills = fills.astype(stored).astype(dtype)
    given = [*fills, *np.ravel(attrs.get("missing_value", ()))]
    given = [mark for mark in given if mark.dtype.kind in "biufc" and mark == mark]
    with np.errstate(invalid="ignore"):  # 1e20 marks no integer
        marks = [(mark, mark.astype(dtype)) for mark in given]
    return [element for mark, element in marks if dtype.kind in "fc" or element == mark]
