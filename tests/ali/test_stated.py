"""Errors and peak memory of every routine are those that its docstring states."""

from __future__ import annotations

import importlib
import re
from typing import Any

import numpy as np
import pytest

from ali import files, registry
from tests.support import launches
from tests.support.suite import scaled

LIMIT_S = 280.0  # on a busy machine; 20 on a quiet one
EPS = float(np.finfo("float32").eps)  # of the measurements
TOL = {"conjugate_gradient": 1e-5, "random_features_ridge": 1e-3, "rpca": 1e-4}  # of the cases
LIBRARIES = ("linalg", "scalapack", "elemental", "sparse")
RANK_COUNTS = scaled((1, 4), (1, 2, 3, 4))
MODULES = {name: importlib.import_module(registry.SHIPPED[name]) for name in LIBRARIES}
NAMES = {library: sorted(set(MODULES[library].__all__) - {"about"}) for library in LIBRARIES}
ROUTINES = [(library, name) for library in LIBRARIES for name in NAMES[library]]
STATED = r"Error: (\d[\d.]*) (eps|tol|times)\b.* Peak memory: (\d+\.\d) times arguments and results"
LOOSE = 10.0  # a docstring that states more than this times what was measured says nothing


def stated(library: str, name: str) -> tuple[float, str, float]:
    """Error, its unit, and peak memory in a docstring."""
    text = " ".join((getattr(MODULES[library], name).__doc__ or "").split())
    numbers = re.search(STATED, text)
    assert numbers, f"{name}: the docstring states no error or no peak memory"
    return float(numbers[1]), numbers[2], float(numbers[3])


def results(kind: str, ranks: int, library: str) -> dict[str, Any]:
    try:
        return launches.results(
            f"tests.ali.ranks_stated:{kind}", ranks, library,
            timeout=LIMIT_S, shared=kind == "errors",
        )  # fmt: skip
    except AssertionError as error:
        if "LibraryNotFoundError" in str(error):
            pytest.skip(f"{library} needs a shared object that is not installed")
        raise


@pytest.mark.parametrize("library", LIBRARIES)
def test_every_routine_is_measured(library: str) -> None:
    assert sorted(results("errors", 1, library)) == NAMES[library]


@pytest.mark.parametrize(("library", "name"), ROUTINES)
def test_the_error_is_at_most_the_stated_one(library: str, name: str) -> None:
    limit, unit, _ = stated(library, name)
    scale = {"eps": 1.0, "times": EPS, "tol": EPS / TOL.get(name, 1.0)}[unit]
    error = max(results("errors", ranks, library)[name] for ranks in RANK_COUNTS) * scale
    assert error <= limit
    assert (limit <= 1 and unit == "eps") or limit <= LOOSE * error


@pytest.mark.parametrize(("library", "name"), ROUTINES)
def test_the_peak_memory_is_at_most_the_stated_one(library: str, name: str) -> None:
    peak, limit = results("memory", 2, library)[name], stated(library, name)[2]
    assert peak <= 1.05 * limit + 0.1
    assert limit <= max(1.1, 1.4 * peak)


@pytest.mark.parametrize("name", ["save", "load"])
def test_the_peak_memory_of_files_is_at_most_the_stated_one(name: str) -> None:
    text = " ".join((getattr(files, f"{name}_routine").__doc__ or "").split())
    most, plain = (float(x) for x in re.findall(r"(\d\.\d) times", text)[-2:])
    peaks = launches.results("tests.ali.ranks_stated:files", 2, timeout=LIMIT_S, shared=False)
    for format in ("npy", "h5", "zarr", "parquet", "csv"):
        limit = most if format in ("parquet", "csv") else plain
        assert peaks[f"{name} {format}"] <= 1.05 * limit + 0.1, format
    assert most <= 1.3 * max(peaks[f"{name} {format}"] for format in ("parquet", "csv"))
