"""Routines of linalg are right for difficult inputs, on any number of ranks.

Constant, duplicated and nearly dependent columns, scales from 1e-30 to 1e30, data far from the
origin, integers at the limits of their dtypes, no, one or two rows or columns, bool.
"""

from __future__ import annotations

import functools

import pytest

from tests.support import launches

RANK_COUNTS = [1, 2, 3, 4, 6]
results = functools.partial(launches.results, "tests.ali.ranks_linalg_limits:everything")


@pytest.mark.parametrize("ranks", RANK_COUNTS)
@pytest.mark.parametrize(
    ("function", "least"),
    [
        ("factors", 200),
        ("components", 26),
        ("clusters", 50),
        ("searches", 15),
        ("integers", 13),
        ("sums", 49),
        ("triangles", 1000),
        ("masks", 11),
        ("empty", 40),
    ],
)
def test_it_agrees_with_numpy(ranks: int, function: str, least: int) -> None:
    found = results(ranks)[function]
    done, wrong = found["checks"] if isinstance(found, dict) else found
    assert wrong == []
    assert done >= least


@pytest.mark.parametrize("ranks", RANK_COUNTS[1:])
def test_clusters_do_not_depend_on_the_number_of_ranks(ranks: int) -> None:
    found, alone = results(ranks)["clusters"], results(1)["clusters"]
    differences = [name for name in alone if name != "checks" and found[name] != alone[name]]
    assert differences == []
