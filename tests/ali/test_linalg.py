"""Every routine of linalg agrees with NumPy, on any number of ranks."""

from __future__ import annotations

import functools
import itertools

import numpy as np
import pytest

from ali.linalg.products import plan
from mpi_workers.matrix.layout import Distribution, default_grid
from tests.support import launches

RANK_COUNTS = [1, 2, 3, 4, 6]
results = functools.partial(launches.results, "tests.ali.ranks_linalg:everything")


@pytest.mark.parametrize("ranks", RANK_COUNTS)
@pytest.mark.parametrize(
    ("function", "least"),
    [
        ("products", 180),
        ("svds", 500),
        ("norms", 90),
        ("transposes", 160),
        ("nonfinite_passes", 4),
    ],
)
def test_it_agrees_with_numpy(ranks: int, function: str, least: int) -> None:
    done, wrong = results(ranks)[function]
    assert wrong == []
    assert done >= (least if ranks < 4 else least / 7)


@pytest.mark.parametrize("ranks", RANK_COUNTS[1:])
def test_random_numbers_do_not_depend_on_the_number_of_ranks(ranks: int) -> None:
    assert results(ranks)["random_numbers"] == results(1)["random_numbers"]


def test_random_numbers_are_normal_and_independent() -> None:
    found = results(1)["random_numbers"]
    mean, variance, skewness, kurtosis = found["moments"]
    deviations = np.sqrt(np.array([1, 2, 15, 96]) / 60_000)
    assert (np.abs([mean, variance - 1, skewness, kurtosis - 3]) < 4 * deviations).all()
    assert found["different"] == 60_000
    assert found["across"] < 0.45  # 45 000 pairs of rows of 200: 6 deviations
    assert not np.isin(found["values"], found["another seed"]).any()
    assert found["values"] == found["of more rows"]


@pytest.mark.parametrize("ranks", RANK_COUNTS)
def test_bad_calls_are_refused_before_any_message(ranks: int) -> None:
    said = results(ranks)["refusals"]
    assert {name: words.split(":")[0] for name, words in said.items()} == {
        "matmul": "ShapeError",
        "rank 0": "BadArgumentError",
        "rank 4": "BadArgumentError",
        "tol": "BadArgumentError",
        "tol nan": "BadArgumentError",
        "iterations": "BadArgumentError",
        "no rows": "ShapeError",
        "no columns": "ShapeError",
    }
    assert "A is 4 x 3 and B is 4 x 3" in said["matmul"]
    assert "rank=4; it must be 1 to 3 for a 4 x 3 matrix" in said["rank 4"]


@pytest.mark.parametrize("ranks", RANK_COUNTS)
def test_failures_during_a_computation_are_the_same_on_every_rank(ranks: int) -> None:
    found = results(ranks)["troubles"]
    assert all(len(said) == ranks and len(set(said)) == 1 for said in found.values())
    words = {name: said[0] for name, said in found.items()}
    assert words.pop("after all") == "nothing"
    restart = words.pop("one restart")
    assert restart.startswith("LinAlgError: truncated_svd: ARPACK found")
    assert "max_iterations" in restart
    assert len(words) == 7
    assert [w for w in words.values() if not w.startswith("LinAlgError: truncated_svd: A ")] == []
    assert all("NaN or infinity" in w for w in words.values())


@pytest.mark.parametrize("ranks", RANK_COUNTS)
def test_a_truncated_svd_is_reproducible_and_reports_its_progress(ranks: int) -> None:
    same, told = results(ranks)["reproducible"]
    assert same
    fractions = [fraction for fraction, _ in told]
    assert all(0 < fraction <= 1 for fraction in fractions)
    assert told[0][1].startswith("ARPACK")


@pytest.mark.parametrize(
    ("size", "shapes", "layouts", "way"),
    [
        (2, (4000, 4000, 4000), ("VC_STAR", "VC_STAR"), "rows"),
        (4, (4000, 4000, 4000), ("VC_STAR", "VC_STAR"), "rows"),
        (16, (4000, 4000, 4000), ("VC_STAR", "VC_STAR"), "grid"),
        (16, (4000, 4000, 4000), ("MC_MR", "MC_MR"), "grid"),
        (7, (4000, 4000, 4000), ("VC_STAR", "VC_STAR"), "rows"),
        (64, (10**6, 100, 10), ("VC_STAR", "VC_STAR"), "rows"),
        (64, (10, 100, 10**6), ("STAR_VC", "STAR_VC"), "cols"),
        (64, (100, 10**6, 100), ("STAR_VC", "VC_STAR"), "inner"),
        (2, (2000, 2000, 2000), ("STAR_VC", "VC_STAR"), "rows"),  # fewest words: inner
        (4, (1600, 1600, 1600), ("STAR_VC", "VC_STAR"), "rows"),
        (2, (4000, 4000, 4000), ("MC_MR", "MC_MR"), "grid"),
        (4, (1000, 1000, 1000), ("MC_MR", "STAR_STAR"), "rows"),
        (4, (1000, 1000, 1000), ("STAR_STAR", "MC_MR"), "cols"),
    ],
)
def test_the_plan_takes_the_least_time_to_move_words(
    size: int, shapes: tuple[int, int, int], layouts: tuple[str, str], way: str
) -> None:
    m, k, n = shapes
    grid = default_grid(size)
    assert (
        plan(Distribution(layouts[0], (m, k), grid), Distribution(layouts[1], (k, n), grid)) == way
    )


def test_no_plan_is_worse_than_gathering_one_side() -> None:
    """On one rank no algorithm communicates, and the first is chosen."""
    for left, right in itertools.product(("VC_STAR", "STAR_STAR"), repeat=2):
        assert (
            plan(Distribution(left, (5, 6), (1, 1)), Distribution(right, (6, 7), (1, 1))) == "rows"
        )
