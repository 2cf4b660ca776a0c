"""The kernels of HPCC and HPCG that the papers' experiments measure."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.support import launches
from tests.support.suite import scaled

WRONG = {
    "nbytes=7: it must be a whole number from 8": ["random_access", {"nbytes": 7}],
    "n=99999999: it must be": ["hpl", {"n": 99999999}],
    "n=201: it must be a whole number from 1 to 200": ["hpcg", {"n": 201}],
}
# An error that rank 0 (for `random_access`: every rank) makes before the validation.
FAULTS = {
    "ptrans: the error": ["ptrans", {"n": 50, "seconds": 0.0, "fault": 1e-8}],
    "fft: the error": ["fft", {"n": 400, "seconds": 0.0, "fault": 1e-8}],
    "random_access: share of wrong words: the error 0.02": [
        "random_access",
        {"nbytes": 1 << 16, "seconds": 0.0, "fault": 0.02},
    ],
    "hpl: the error": ["hpl", {"n": 50, "seconds": 0.0, "fault": 1e-6}],
    "hpcg: residual of the iteration: the error": [
        "hpcg",
        {"n": 4, "iterations": 3, "seconds": 0.0, "fault": 1e-6},
    ],
}


WITHIN = ["random_access", {"nbytes": 1 << 16, "seconds": 0.0, "fault": 0.005}]


@pytest.fixture(scope="module", params=scaled([1, 4], [1, 2, 3, 4]))
def found(request: pytest.FixtureRequest) -> dict[str, Any]:
    """All results on so many ranks, from one launch."""
    calls = [*WRONG.values(), *FAULTS.values(), WITHIN]
    ranks = request.param
    everything = launches.run("tests.benchmarks.ranks_hpcc:everything", ranks, calls, timeout=100)
    return {"ranks": ranks, **everything}


def test_bad_arguments_and_wrong_results_fail_on_all_ranks_and_the_gang_remains_usable(
    found: dict[str, Any],
) -> None:
    # An error within the benchmark's limit (`WITHIN`) is reported only.
    words = [*WRONG, *FAULTS]
    kinds = ["BadArgumentError"] * len(WRONG) + ["RoutineError"] * len(FAULTS)
    *refused, within = found["refused"]
    assert within == "nothing"
    for expected, kind, said in zip(words, kinds, refused, strict=True):
        assert said.startswith(f"{kind}: ")
        assert expected in said
        assert (kind == "RoutineError") == ("exceeds the limit" in said)


def test_measured_rates_are_plausible_and_valid(found: dict[str, Any]) -> None:
    for name in ("ptrans", "fft", "random_access", "hpl"):
        rate, error = found[name]
        assert 0 < rate < 10_000, name
        assert 0 <= error < 16, name
    assert found["hpl"][1] > 0
    assert found["random_access"][1] == 0
    gflops, residual, departure = found["hpcg"]
    assert gflops > 0
    assert residual < 0.1
    assert departure < 1


def test_transform_and_transpose_are_numpys(found: dict[str, Any]) -> None:
    transform, transpose = found["transforms"]
    assert transform < 1e-12
    assert transpose == 0


def test_the_stencil_spans_the_grid_of_all_ranks(found: dict[str, Any]) -> None:
    dims = {1: (1, 1, 1), 2: (2, 1, 1), 3: (3, 1, 1), 4: (2, 2, 1)}[found["ranks"]]
    stencil = found["stencils"]
    assert stencil["rows"] == 0
    assert stencil["corners"] == 8  # of the whole grid, not of each rank's
    assert stencil["solution"] < 1e-12
    assert stencil["nonzeros"] == np.prod([3 * 3 * d - 2 for d in dims])


def test_random_numbers_are_those_of_the_benchmark(found: dict[str, Any]) -> None:
    """Words of the sequence by their place, and one after the other."""
    assert found["sequence"] == []


def test_the_same_updates_restore_the_table(found: dict[str, Any]) -> None:
    gups, errors = found["all updates"]
    assert gups > 0
    assert errors == 0
