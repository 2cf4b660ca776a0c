"""xarray on handles, and NetCDF-4 and Zarr as Datasets of handles, beside xarray on NumPy."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from alchemist_ray import AlchemistSession, Handle
from alchemist_ray.errors import BadArgumentError, FileError

pd = pytest.importorskip("pandas", reason="needs alchemist-on-ray[xarray]")
xr = pytest.importorskip("xarray", reason="needs alchemist-on-ray[xarray]")
h5netcdf = pytest.importorskip("h5netcdf", reason="needs alchemist-on-ray[xarray]")

WORKERS = 2
COORDS = {
    "time": pd.date_range("2000-01-01", periods=48, freq="MS"),
    "lat": np.linspace(-75.0, 75, 6),
    "lon": np.arange(0.0, 360, 45),
}
x = np.random.default_rng(0).normal(size=(48, 6, 8))

WORK: list[Callable[[Any], Any]] = [
    lambda d: d * 2 + 1, lambda d: d.mean("time"), lambda d: d.isel(time=3, lat=slice(1, 3)),
    lambda d: d.sel(lat=15.0), lambda d: d.where(d > 0.5), lambda d: d - d.mean("time"),
    lambda d: d.groupby("time.month").mean("time"), lambda d: d.coarsen(lat=2, lon=2).mean(),
    lambda d: d.groupby("time.month") - d.groupby("time.month").mean("time"),
    lambda d: d.weighted(np.cos(np.deg2rad(d.lat))).mean(("lat", "lon")), lambda d: d.std("time"),
    lambda d: d.transpose("lon", "time", "lat"), lambda d: d.stack(place=("lat", "lon")),
    lambda d: d.roll(lon=2), lambda d: d.shift(time=1), lambda d: d.diff("time"), lambda d: d.max(),
    lambda d: xr.concat([d, d], "time"), lambda d: xr.dot(d, d, dim="time"),
    lambda d: d.cumsum("time"),
    lambda d: d.polyfit("time", 1).polyfit_coefficients, lambda d: d.median("time"),
    lambda d: d.resample(time="YS").mean(), lambda d: d.where(d > 0.5).fillna(0),
    lambda d: d.clip(-0.2, 0.8), lambda d: d.quantile(0.3, "time"), lambda d: d.argmax("time"),
    lambda d: d.isnull(), lambda d: d.rolling(time=3).mean(),
    lambda d: d.rolling(time=4, min_periods=1, center=True).max(),
    lambda d: d.argmax(["lat", "lon"])["lon"], lambda d: d.astype("float32"),
    lambda d: d.sel(time="2001").sum("lon"),
]  # fmt: skip


@pytest.mark.parametrize("work", WORK)
def test_arithmetic_stays_on_the_ranks(als: AlchemistSession, work: Callable[[Any], Any]) -> None:
    there = xr.DataArray(x, dims=tuple(COORDS), coords=COORDS)
    found, expected = work(there.copy(data=als.send_matrix(x))), work(there)
    assert isinstance(found.data, Handle)
    xr.testing.assert_allclose(found.copy(data=np.asarray(found.data)), expected)


@pytest.mark.parametrize("suffix", [".nc", ".zarr"])
def test_a_dataset_of_handles(als: AlchemistSession, tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"climate{suffix}"
    sst = xr.DataArray(x, dims=tuple(COORDS), coords=COORDS, attrs={"units": "K"})
    written = xr.Dataset(
        {"sst": sst, "packed": sst.where(sst > 0), "depth": ("lat", np.arange(6, dtype="i2")),
         "name": ("lat", list("abcdef"))},
        attrs={"title": "made"},
    )  # fmt: skip
    packed = {"dtype": "i2", "scale_factor": 0.001, "add_offset": 1.0, "_FillValue": -32768}
    if suffix == ".nc":
        written.to_netcdf(path, engine="h5netcdf", encoding={"packed": packed})
        expected = xr.open_dataset(path, engine="h5netcdf").load()
    else:
        written.drop_vars("name").to_zarr(path, encoding={"packed": packed}, consolidated=False)
        expected = xr.open_dataset(path, engine="zarr", consolidated=False).load()
    if suffix == ".nc":
        with pytest.warns(UserWarning, match=r"leaves out 'name' \(.*\): a handle has numbers"):
            found = als.open_dataset(path)
    else:
        found = als.open_dataset(path)
    assert sorted(found.data_vars) == ["depth", "packed", "sst"]
    assert (found.attrs, found.sst.attrs) == ({"title": "made"}, {"units": "K"})
    for name in found.data_vars:
        assert isinstance(found[name].data, Handle)
        fetched = found[name].copy(data=np.asarray(found[name].data))
        xr.testing.assert_allclose(fetched, expected[name])
    assert found.sst.dtype == expected.sst.dtype
    one = als.load_matrix(path, variable="sst")
    np.testing.assert_array_equal(one.fetch(), x)
    with pytest.raises(BadArgumentError, match=r"no variable of numbers 'ice'; it has .*sst"):
        als.open_dataset(path, ["ice"])
    with pytest.raises(FileError, match="ice"):
        als.load_matrix(path, variable="ice")
    if suffix == ".nc":
        with pytest.raises(BadArgumentError, match="read, and not written"):
            one.save(tmp_path / "b.nc")


@pytest.mark.filterwarnings("ignore:.*multiple fill values")
def test_variables_have_the_values_and_dtypes_of_xarray(
    als: AlchemistSession, tmp_path: Path
) -> None:
    path = tmp_path / "kinds.nc"
    stored: dict[str, tuple[np.ndarray, dict[str, Any]]] = {
        name: (np.array([0, 1, 1], name), {})
        for name in ("int8", "uint8", "int16", "uint16", "uint32", "uint64", "float16")
    }
    signed = np.array([-1, -30000, 5], "i2")
    stored["flag"] = np.array([-1, 0, 1], "i1"), {"_Unsigned": "true"}
    stored["radiance"] = signed, {"_Unsigned": "true", "scale_factor": np.float32(0.5)}
    stored["masked"] = signed, {"_Unsigned": "true", "_FillValue": np.int16(-1)}
    stored["wide"] = np.array([-1, 5, -7], "i8"), {"_Unsigned": "true"}
    stored["small"] = np.array([255, 5, 7], "u1"), {"_Unsigned": "false"}
    stored["small_masked"] = stored["small"][0], {"_Unsigned": "false", "_FillValue": np.uint8(255)}
    stored["no_mark"] = np.array([1, 2, 3]), {"missing_value": 1e20}
    stored["half"] = np.array([1, 2, 3], "f2"), {"_FillValue": np.float16(2)}
    stored["turned"] = (
        np.array([1, 2, 3], ">i4"), {"scale_factor": np.array([0.1]), "add_offset": np.float32(3.3)}
    )  # fmt: skip
    stored["marks"] = np.array([-9.0, -99, 1], "f4"), {"missing_value": np.array([-9, -99], "f4")}
    xr.Dataset({"yes": ("x", [True, False, True])}).to_netcdf(path, engine="h5netcdf")
    with h5netcdf.File(path, "a") as file:
        for name, (values, attrs) in stored.items():
            file.create_variable(name, ("x",), data=values).attrs.update(attrs)
    found = als.open_dataset(path)
    with xr.open_dataset(path, engine="h5netcdf") as expected:
        assert set(found) == {*stored, "yes"}
        for name in found:
            values = np.asarray(found[name].data)
            assert values.dtype == expected[name].dtype, name
            np.testing.assert_array_equal(values, expected[name], err_msg=str(name))
    (tmp_path / "text.nc").write_text("text")
    for other in ("text.nc", "missing.nc", "missing.zarr"):
        with pytest.raises(FileError, match=f"{other}: not a Dataset"):
            als.open_dataset(tmp_path / other)


@pytest.mark.parametrize("suffix", [".nc", ".zarr"])
def test_coordinates_are_those_of_xarray(
    als: AlchemistSession, tmp_path: Path, suffix: str
) -> None:
    path = tmp_path / f"packed{suffix}"
    lat = np.array([[50.0, 50.1, np.nan], [51.0, 51.1, 51.2]])
    days = pd.to_datetime(["1900-01-01", "1900-01-02", None])
    written = xr.Dataset(
        {"t": (("y", "x"), np.arange(6.0).reshape(2, 3))},
        coords={"x": [10.0, 10.5, 11.0], "y": [50.0, 51.0], "lat": (("y", "x"), lat),
                "day": ("x", days), "level": ("y", np.array([200, 100], "u1"))},
    )  # fmt: skip
    encoding: dict[str, Any] = {
        "lat": {"dtype": "i2", "scale_factor": 0.1, "add_offset": 40.0, "_FillValue": -99},
        "x": {"dtype": "i2", "scale_factor": 0.5, "_FillValue": -99},
        "day": {"units": "days since 1900-01-01", "dtype": "f8", "_FillValue": 1e30},
        "level": {"dtype": "i1", "_Unsigned": "true", "_FillValue": 100},
    }
    opening: dict[str, Any] = {"engine": "h5netcdf"}
    if suffix == ".nc":
        written.to_netcdf(path, engine="h5netcdf", encoding=encoding)
    else:
        written.to_zarr(path, encoding=encoding, consolidated=False)
        opening = {"engine": "zarr", "consolidated": False}
    found, expected = als.open_dataset(path), xr.open_dataset(path, **opening).load()
    xr.testing.assert_identical(found.coords.to_dataset(), expected.coords.to_dataset())
    assert found.lat.encoding["scale_factor"] == 0.1
    np.testing.assert_array_equal(found.t.sel(x=10.5).as_numpy(), [1.0, 4.0])
    assert float(found.t.where(found.lat > 50.5).sum()) == 12
    assert found.day.isnull().sum() == 1


@pytest.mark.parametrize("suffix", [".nc", ".zarr"])
def test_dates_and_groups(als: AlchemistSession, tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"dated{suffix}"
    days = pd.to_datetime(["1900-01-01T00:00", "2020-02-29T12:00", None])
    written = xr.Dataset(
        {"whole": ("x", days), "floats": ("x", days), "age": ("x", days - days[0]),
         "v": ("x", [1.0, 2.0, 3.0])},
        coords={"x": pd.date_range("2000-01-01", periods=3), "name": ("x", ["a", "b", "c"])},
    )  # fmt: skip
    encoding = {"whole": {"units": "hours since 1900-01-01", "dtype": "i8", "_FillValue": -1},
                "floats": {"units": "days since 1970-01-01", "dtype": "f8"}}  # fmt: skip
    opening: dict[str, Any] = {"engine": "h5netcdf", "group": "inner"}
    if suffix == ".nc":
        written.to_netcdf(path, engine="h5netcdf", encoding=encoding, group="inner")
    else:
        written = written.drop_vars("name")
        written.to_zarr(path, encoding=encoding, consolidated=False, group="inner")
        opening |= {"engine": "zarr", "consolidated": False}
    found, expected = als.open_dataset(path, group="inner"), xr.open_dataset(path, **opening)
    xr.testing.assert_identical(found.coords.to_dataset(), expected.coords.to_dataset().load())
    for name in written:
        A = found[name].data
        assert A.dtype == expected[name].dtype, name
        np.testing.assert_array_equal(np.asarray(A), expected[name], err_msg=str(name))
    late = found.whole.where(found.floats > np.datetime64("2000-01-01"))
    np.testing.assert_array_equal(late.isnull().as_numpy(), [True, False, True])
    assert (found.whole - found.floats).isel(x=1).data.item() == 0
    assert found.whole.max().data.dtype == expected.whole.dtype
    with pytest.raises(FileError, match="has no group 'outer'"):
        als.open_dataset(path, group="outer")


DECODING: list[dict[str, Any]] = [
    {}, {"decode_times": False}, {"decode_timedelta": True}, {"decode_timedelta": False},
    {"mask_and_scale": False}, {"mask_and_scale": False, "decode_times": False},
    {"decode_times": xr.coders.CFDatetimeCoder(time_unit="s")},
]  # fmt: skip


@pytest.mark.parametrize("decoding", DECODING, ids=lambda given: " ".join(given) or "default")
def test_times_and_packed_numbers_are_decoded_as_xarray_does(
    als: AlchemistSession, tmp_path: Path, decoding: dict[str, Any]
) -> None:
    """Also missing integers of durations: by default xarray shows the least int64 for them."""
    path = tmp_path / "units.nc"
    made, values = {}, np.array([1, 100, 3])
    for units in ("days", "hours", "minutes", "seconds", "s", "days since 2000-01-01"):
        for dtype in ("i4", "u1", "i8", "f4"):
            fill = values.astype(dtype)[1]
            attrs = {"units": units, "_FillValue": fill}
            made[f"{units[:6]}{len(units)}{dtype}"] = ("x", values.astype(dtype), attrs)
    packed = {"scale_factor": 0.5, "add_offset": 1.0, "_FillValue": np.int16(100)}
    made["packed"] = "x", values.astype("i2"), packed
    xr.Dataset(made, coords={"step": made["days4i4"]}).to_netcdf(path, engine="h5netcdf")
    found = als.open_dataset(path, **decoding)
    durations = {"decode_timedelta": False} | decoding
    with xr.open_dataset(path, engine="h5netcdf", **durations) as expected:
        assert set(found.variables) == set(expected.variables)
        for name, one in found.variables.items():
            assert one.dtype == expected[name].dtype, name
            np.testing.assert_array_equal(np.asarray(one.data), expected[name], err_msg=str(name))


def test_keywords_that_have_no_meaning_here_are_named(als: AlchemistSession) -> None:
    with pytest.raises(BadArgumentError, match=r"use_cftime=True .* decode_times=False"):
        als.open_dataset("a.nc", use_cftime=True)
    with pytest.raises(BadArgumentError, match=r"open_dataset has no chunks=: it has decode_times"):
        als.open_dataset("a.nc", chunks={})


def test_what_no_handle_can_be_is_named(als: AlchemistSession, tmp_path: Path) -> None:
    zarr = pytest.importorskip("zarr", reason="needs alchemist-on-ray[files]")
    path = tmp_path / "flags.zarr"
    group = zarr.open_group(path, mode="w", zarr_format=2)
    for name, dtype, fill in (("flag", "bool", True), ("v", "f8", 0.0)):
        array = group.create_array(name, shape=(2,), dtype=dtype, fill_value=fill)
        array.attrs["_ARRAY_DIMENSIONS"] = ["x"]
        array[:] = 1
    with pytest.warns(UserWarning, match=r"leaves out 'flag' \(object\).*dataset='flag'"):
        assert list(als.open_dataset(path)) == ["v"]
    with pytest.raises(BadArgumentError, match=r"of numbers 'flag'; it has v; load_matrix\(path"):
        als.open_dataset(path, ["flag"])
    assert als.load_matrix(path, dataset="flag").dtype == bool
    times = xr.Dataset({"t": ("time", [1.0, 2.0])}, coords={"time": [0.0, 1.0]})
    times.time.attrs.update(units="months since 1900-01-01", calendar="360_days_in_a_year")
    times.to_netcdf(tmp_path / "times.nc", engine="h5netcdf")
    with pytest.raises(FileError, match=r"times.nc cannot be decoded: .* variable 'time'"):
        als.open_dataset(tmp_path / "times.nc")


def test_points_and_idxmax_have_alternatives(als: AlchemistSession) -> None:
    """xarray refuses lists of points of every array of the standard's namespace."""
    there = xr.DataArray(x, dims=tuple(COORDS), coords=COORDS)
    d = there.copy(data=als.send_matrix(x))
    points = {name: xr.DataArray([0, 1], dims="point") for name in ("lat", "lon")}
    for work in (lambda: d.isel(points), lambda: d.idxmax("lat")):
        with pytest.raises(TypeError, match="Vectorized indexing is not supported"):
            work()
    np.testing.assert_array_equal(d.data[:, [0, 1], [0, 1]], there.isel(points))
    xr.testing.assert_equal(d.lat[d.argmax("lat").as_numpy()].drop_vars("lat"),
                            there.idxmax("lat").drop_vars("lat", errors="ignore"))  # fmt: skip
