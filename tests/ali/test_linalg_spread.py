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
        ("least_squares", 30),
        ("leading_vectors", 4),
        ("tridiagonals", 18),
        ("exponentials", 8),
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
