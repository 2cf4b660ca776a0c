"""The kernels of HPCC and HPCG that the papers' experiments measure."""

from __future__ import annotations

import numpy as np
import pytest

from mpi_workers.testing import local_gang

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


def test_bad_arguments_are_refused_and_the_gang_remains_usable() -> None:
    failures = local_gang.run("tests.benchmarks.ranks_hpcc:refusals", 2, list(WRONG.values()))
    for words, (kind, message) in zip(WRONG, failures, strict=True):
        assert kind == "BadArgumentError"
        assert words in message


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_wrong_result_fails_its_validation_on_all_ranks(ranks: int) -> None:
    failures = local_gang.run("tests.benchmarks.ranks_hpcc:refusals", ranks, list(FAULTS.values()))
    for words, (kind, message) in zip(FAULTS, failures, strict=True):
        assert kind == "RoutineError"
        assert words in message
        assert "exceeds the limit" in message


def test_an_error_within_the_benchmarks_limit_is_reported_only() -> None:
    call = ["random_access", {"nbytes": 1 << 16, "seconds": 0.0, "fault": 0.005}]
    assert local_gang.run("tests.benchmarks.ranks_hpcc:refusals", 1, [call]) == []


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_measured_rates_are_plausible_and_valid(ranks: int) -> None:
    found = local_gang.run("tests.benchmarks.ranks_hpcc:everything", ranks)
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


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_transform_and_transpose_are_numpys(ranks: int) -> None:
    transform, transpose = local_gang.run("tests.benchmarks.ranks_hpcc:transforms", ranks, 12)
    assert transform < 1e-12
    assert transpose == 0


@pytest.mark.parametrize(("ranks", "dims"), [(1, (1, 1, 1)), (2, (2, 1, 1)), (4, (2, 2, 1))])
def test_the_stencil_spans_the_grid_of_all_ranks(ranks: int, dims: tuple[int, ...]) -> None:
    n = 3
    found = local_gang.run("tests.benchmarks.ranks_hpcc:stencils", ranks, n)
    assert found["rows"] == 0
    assert found["corners"] == 8  # of the whole grid, not of each rank's
    assert found["solution"] < 1e-12
    assert found["nonzeros"] == np.prod([3 * n * d - 2 for d in dims])


def test_random_numbers_are_those_of_the_benchmark() -> None:
    """Words of the sequence by their place, and one after the other."""
    assert local_gang.run("tests.benchmarks.ranks_hpcc:sequence", 1) == []


@pytest.mark.parametrize("ranks", [1, 3])
def test_the_same_updates_restore_the_table(ranks: int) -> None:
    gups, errors = local_gang.run("tests.benchmarks.ranks_hpcc:all_updates", ranks)
    assert gups > 0
    assert errors == 0
