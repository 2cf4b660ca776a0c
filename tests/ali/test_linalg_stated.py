"""Errors and peak memory of every routine of linalg are those that its docstring states."""

from __future__ import annotations

import functools
import re

import pytest

from ali import linalg
from tests.ali import ranks_linalg_stated as measured
from tests.support import launches

errors = functools.partial(launches.results, "tests.ali.ranks_linalg_stated:errors")
memory = functools.partial(launches.results, "tests.ali.ranks_linalg_stated:memory")
STATED = r"Error: (\d[\d.]*) (eps|tol|times)\b.* Peak memory: (\d+\.\d) times arguments and results"
LOOSE = 10.0  # a docstring that states more than this times what was measured says nothing


def stated(name: str) -> tuple[float, str, float]:
    """Error, its unit, and peak memory in a docstring."""
    found = re.search(STATED, " ".join((getattr(linalg, name).__doc__ or "").split()))
    assert found, f"{name}: the docstring states no error or no peak memory"
    return float(found[1]), found[2], float(found[3])


def test_every_routine_is_measured() -> None:
    assert sorted(measured.CASES) == sorted(linalg.__all__)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("name", linalg.__all__)
def test_the_error_is_at_most_the_stated_one(name: str, ranks: int) -> None:
    limit, unit, _ = stated(name)
    units = {"eps": 1.0, "times": measured.EPS, "tol": measured.EPS / measured.TOL.get(name, 1.0)}
    error = errors(ranks)[name] * units[unit]
    assert error <= limit
    assert limit <= 1 or limit <= LOOSE * error


@pytest.mark.parametrize("name", linalg.__all__)
def test_the_peak_memory_is_at_most_the_stated_one(name: str) -> None:
    peak, limit = memory(2)[name], stated(name)[2]
    assert peak <= limit + 0.1
    assert limit <= max(1.1, 1.3 * peak)
