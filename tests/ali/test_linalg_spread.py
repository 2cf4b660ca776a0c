"""Factorizations of large matrices agree with NumPy's, and no rank holds more than its share."""

from __future__ import annotations

import functools

import pytest

from tests.support import launches

RANK_COUNTS = [2, 3, 4]
results = functools.partial(launches.results, "tests.ali.ranks_linalg_spread:everything")
ORDER, RANKS = 1536, 4
SHARES = 6.0  # matrices, of which a rank holds its part
BUFFERS = 5  # of 128 columns of the whole matrix, which count less the larger it is


@pytest.mark.parametrize("ranks", RANK_COUNTS)
@pytest.mark.parametrize(
    ("function", "least"),
    [
        ("singular", 100),
        ("least_squares", 30),
        ("regularized", 30),
        ("hermitian", 20),
        ("tridiagonals", 18),
        ("exponentials", 8),
        ("determinants", 4),
    ],
)
def test_it_agrees_with_numpy(ranks: int, function: str, least: int) -> None:
    done, wrong = results(ranks)[function]
    assert wrong == []
    assert done >= least


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "routine",
    ["eigh", "svd", "qr", "polar", "lstsq", "pinv", "solve", "det", "ridge", "gram"],
)
def test_no_rank_holds_more_than_its_share_of_six_matrices(routine: str) -> None:
    found = launches.results("tests.ali.ranks_linalg_spread:memory", RANKS, ORDER, timeout=280)
    assert found[routine] <= SHARES + BUFFERS * 128 * RANKS / ORDER


@pytest.mark.parametrize("method", ["scalapack", "elemental"])
def test_a_native_library_is_used_on_request(method: str) -> None:
    found = launches.results("tests.ali.ranks_linalg_native:routed", 2, method)
    if "missing" in found:
        pytest.skip(found["missing"])
    assert found["checks"] == [6, []]
    assert set(found["layouts"]) == {"VC_STAR", "STAR_STAR"}
    assert found["layouts"].count("STAR_STAR") == 2
    assert (
        found["unknown"]
        == [
            "BadArgumentError: eigh: method must be one of auto, scalapack, elemental; got 'lapack'"
        ]
        * 2
    )
