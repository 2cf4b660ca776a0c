"""A climate scientist's program on 40 years of a daily field: handles against xarray on Dask.

``python -m benchmarks.climate`` starts a Ray for it (``YEARS=5``: a shorter field); not in
``make bench``. Both run the same functions of xarray on the same NetCDF-4 file and cores; their
results are compared with xarray on NumPy.

Dask gets what helps it: flox for `groupby` (of `peers.txt`), anomalies in chunks of the first size
(`groupby` leaves chunks of one day), one BLAS thread a task, the better of two sizes of chunks, and
the better of two ways: fields that are persisted, so that every step reads memory and not the file,
or one graph of all results.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import dask
import dask.array
import numpy as np
import pandas as pd
import xarray as xr
from scipy.sparse.linalg import svds
from threadpoolctl import threadpool_limits

from alchemist_ray import AlchemistSession
from benchmarks.harness import Report, Turns, alone, use_peers

CORES = min(2, len(os.sched_getaffinity(0)))
YEARS = int(os.environ.get("YEARS", "40"))
SHAPE = (YEARS * 365, 48, 96)  # days, latitudes, longitudes
CHUNKS = (365, 1825)  # days of Dask's chunks: 6.7 and 34 MB
RANK = 4
POWER = 3  # iterations of Dask's approximate SVD
ROUNDS = int(os.environ.get("ROUNDS", "5"))
TARGET = 0.7
STEPS = ("open", "anomalies", "trend", "weighted mean", "EOFs")

Array = np.ndarray[Any, Any]


# --- the program ---


def anomalies(t: xr.DataArray) -> xr.DataArray:
    months = t.groupby("time.month")
    normal = months.mean("time")
    if normal.chunks:  # else Dask has a chunk for each day from here on
        normal = normal.chunk(month=-1)
    found = months - normal
    return found.chunk(time=t.chunks[0][0]) if t.chunks else found


def trend(t: xr.DataArray) -> xr.DataArray:
    fit = t.polyfit("time", 1, skipna=False).polyfit_coefficients
    return fit.sel(degree=1) * (86400e9 * 3652.5)  # K a decade


def weighted_mean(t: xr.DataArray) -> xr.DataArray:
    return t.weighted(np.cos(np.deg2rad(t.lat))).mean(("lat", "lon"))


def matrix(t: xr.DataArray) -> Any:
    """Days by places, weighted by the root of the area."""
    root = np.sqrt(np.cos(np.deg2rad(t.lat))).astype(t.dtype)
    return (t * root).stack(place=("lat", "lon")).transpose("time", "place").data


class Way:
    """How the program opens the file, keeps a field, and finds singular vectors: here by NumPy."""

    def open(self, path: Path) -> xr.DataArray:
        return xr.open_dataset(path, engine="h5netcdf").t2m.load()

    def held(self, t: xr.DataArray) -> xr.DataArray:
        return t

    def svd(self, X: Any) -> tuple[Array, Array]:
        """The leading singular values, and right singular vectors as columns."""
        _, s, vh = svds(X, RANK)
        return s[::-1], vh[::-1].T


class Handles(Way):
    def __init__(self, als: AlchemistSession) -> None:
        self._als = als
        self._linalg = als.load_library("linalg")

    def open(self, path: Path) -> xr.DataArray:
        found: xr.DataArray = self._als.open_dataset(path).t2m
        return found

    def held(self, t: xr.DataArray) -> xr.DataArray:
        t.data.id  # computed now, if it was recorded  # noqa: B018
        return t

    def svd(self, X: Any) -> tuple[Array, Array]:
        S, _, V = self._linalg.truncated_svd(X, rank=RANK)
        return S.fetch(), V.fetch()


class OnDask(Way):
    def __init__(self, days: int) -> None:
        self._days = days

    def open(self, path: Path) -> xr.DataArray:
        chunks = {"time": self._days}
        return xr.open_dataset(path, engine="h5netcdf", chunks=chunks).t2m

    def held(self, t: xr.DataArray) -> xr.DataArray:
        return t.persist()

    def svd(self, X: Any) -> tuple[Array, Array]:
        S, V = dask.compute(*self.lazy_svd(X))
        return S, V.T

    @staticmethod
    def lazy_svd(X: Any) -> tuple[Any, Any]:
        X = X.rechunk({1: -1})
        # Without QR, float32 loses the smaller values in the iterations.
        _, S, V = dask.array.linalg.svd_compressed(X, RANK, "QR", POWER, seed=0)
        return S, V


def program(way: Way, path: Path, after: Callable[[str], None]) -> dict[str, Array]:
    """Run the program step by step; `after` is told of the end of each."""
    t = way.held(way.open(path))
    after("open")
    a = way.held(anomalies(t))
    after("anomalies")
    found = {"trend": np.asarray(trend(a))}
    after("trend")
    found["weighted mean"] = np.asarray(weighted_mean(a))
    after("weighted mean")
    found["S"], found["V"] = way.svd(matrix(a))
    after("EOFs")
    return found


def one_graph(way: OnDask, path: Path) -> dict[str, Array]:
    """All results of Dask from one graph: the field is read once, and streamed through it."""
    a = anomalies(way.open(path))
    S, V = way.lazy_svd(matrix(a))
    slope, mean, S, V = dask.compute(trend(a), weighted_mean(a), S, V)
    return {"trend": slope.values, "weighted mean": mean.values, "S": S, "V": V.T}


# --- the data, and the comparison ---


def make(path: Path) -> None:
    """Seasons, a warming, two oscillations and weather, as a NetCDF-4 file that xarray writes."""
    random = np.random.default_rng(0)
    days, lats, lons = SHAPE
    lat = np.linspace(-88.125, 88.125, lats)
    lon = np.arange(0, 360, 360 / lons)
    year = np.arange(days) / 365.0
    north = np.sin(np.deg2rad(lat))
    bump = np.exp(-((lat[:, None] / 15) ** 2) - ((lon - 210) / 50) ** 2)
    poles = np.exp(-(((lat[:, None] - 50) / 12) ** 2) - ((lon - 320) / 30) ** 2)
    field = random.standard_normal(SHAPE, dtype="float32")
    for start in range(0, days, 365):
        t = year[start : start + 365, None, None]
        field[start : start + 365] += (
            288 - 40 * north[:, None] ** 2
            - 10 * north[:, None] * np.cos(2 * np.pi * t) + 0.02 * (1 + north[:, None]) * t
            + 1.5 * bump * np.sin(2 * np.pi * t / 3.7) + poles * np.sin(2 * np.pi * t / 2.3)
        )  # fmt: skip
    time_ = pd.date_range("1981-01-01", periods=days, freq="D")
    coords = {"time": time_, "lat": lat, "lon": lon}
    made = xr.DataArray(field, coords, tuple(coords), name="t2m")
    made.to_dataset().to_netcdf(path, engine="h5netcdf")


def check(name: str, found: dict[str, Array], exact: dict[str, Array]) -> None:
    """Raises AssertionError."""
    for key, atol in (("trend", 1e-4), ("weighted mean", 1e-4)):
        np.testing.assert_allclose(found[key], exact[key], atol=atol, err_msg=f"{name}: {key}")
    np.testing.assert_allclose(found["S"], exact["S"], rtol=1e-4, err_msg=f"{name}: S")
    alike = np.abs((found["V"] * exact["V"]).sum(axis=0))  # but for their signs
    np.testing.assert_allclose(alike, 1, atol=1e-3, err_msg=f"{name}: V")


def run() -> Report:
    use_peers()
    report = Report("climate")
    with (
        tempfile.TemporaryDirectory(dir=os.environ.get("BENCH_FOLDER")) as folder,
        AlchemistSession(CORES, progress=False) as als,
        dask.config.set(scheduler="threads", num_workers=CORES),
    ):
        path = Path(folder, "t2m.nc")
        make(path)
        ways: dict[str, Way] = {
            "handles": Handles(als),
            **{f"Dask, chunks of {days} days": OnDask(days) for days in CHUNKS},
        }
        turns = Turns()

        def measured(name: str, way: Way) -> dict[str, Array]:
            begin = last = time.perf_counter()

            def after(step: str) -> None:
                nonlocal last
                now = time.perf_counter()
                turns.add((name, step), now - last)
                last = now

            found = program(way, path, after)
            took = time.perf_counter() - begin
            turns.add((name, "all"), took)
            print(f"  {name}: {took:.2f} s", flush=True)
            return found

        exact = measured("NumPy", Way())
        for number in range(ROUNDS):
            for name, way in ways.items():
                with threadpool_limits(1 if isinstance(way, OnDask) else None):
                    found = measured(name, way)
                    if not number:
                        check(name, found, exact)
                    if isinstance(way, OnDask):
                        begin = time.perf_counter()
                        found = one_graph(way, path)
                        turns.add((f"{name}, one graph", "all"), time.perf_counter() - begin)
                        if not number:
                            check(f"{name}, one graph", found, exact)
    _report(report, turns)
    return report


def _report(report: Report, turns: Turns) -> None:
    times = turns.times()
    dasks = {who: t for (who, step), t in times.items() if step == "all" and who.startswith("Dask")}
    best = min(dasks, key=lambda who: dasks[who])
    ours = times["handles", "all"]
    report.add(
        "the whole program", ours / dasks[best], TARGET, "x xarray on Dask", at_most=True,
        detail=f"{ours:.2f} s; {best} {dasks[best]:.2f}; NumPy {times['NumPy', 'all']:.2f}",
    )  # fmt: skip
    stepwise = min((who for who in dasks if (who, "open") in times), key=lambda who: dasks[who])
    for step in (*STEPS, "all"):
        for who in (stepwise, *(w for w, s in times if s == step and w != stepwise)):
            report.compare(step, who, times[who, step])
    days, lats, lons = SHAPE
    flox = "with" if xr.core.utils.module_available("flox") else "without"
    report.notes.append(
        f"{days:,} days x {lats} x {lons} of float32, {4 * days * lats * lons / 1e6:.0f} MB; "
        f"{CORES} ranks, Dask with {CORES} threads, {flox} flox; load average "
        f"{os.getloadavg()[0]:.1f} at the end."
    )


if __name__ == "__main__":
    alone(run, cpus=4)
