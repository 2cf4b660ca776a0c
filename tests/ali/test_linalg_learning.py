"""Components, clusters and kernel regression: right, and the same on any number of ranks."""

from __future__ import annotations

import functools

import numpy as np
import pytest

from tests.support import launches

RANK_COUNTS = [1, 2, 3, 4, 6]
results = functools.partial(launches.results, "tests.ali.ranks_linalg_learning:everything")


@pytest.mark.parametrize("ranks", RANK_COUNTS)
def test_components_are_those_of_the_centred_matrix(ranks: int) -> None:
    done, wrong = results(ranks)["components"]
    assert wrong == []
    assert done >= (200 if ranks < 4 else 40)


@pytest.mark.parametrize("ranks", RANK_COUNTS)
def test_clusters_are_found_and_are_a_fixed_point(ranks: int) -> None:
    done, wrong = results(ranks)["clusters"]["checks"]
    assert wrong == []
    assert done == 25


@pytest.mark.parametrize("ranks", RANK_COUNTS[1:])
@pytest.mark.parametrize("data", ["float64", "float32", "int32", "uneven"])
def test_clusters_do_not_depend_on_the_number_of_ranks(ranks: int, data: str) -> None:
    inertia, *found = results(ranks)["clusters"][data]
    alone, *expected = results(1)["clusters"][data]
    assert found == expected
    assert inertia == pytest.approx(alone, rel=1e-4 if data == "float32" else 1e-12)


@pytest.mark.parametrize("ranks", RANK_COUNTS)
def test_random_features_solve_the_normal_equations(ranks: int) -> None:
    found = results(ranks)["kernels"]
    done, wrong = found["checks"]
    assert wrong == []
    assert done == 12
    # Products of 2000 features are the kernel within 4 deviations of sqrt(1 / 2000) or so.
    assert found["off"] < 0.1
    assert found["fit"] < 0.5
    assert np.allclose(found["values"], results(1)["kernels"]["values"], rtol=0, atol=1e-13)


@pytest.mark.parametrize("ranks", RANK_COUNTS)
def test_bad_calls_are_refused_by_all_ranks_alike(ranks: int) -> None:
    launches.check_refused_alike(results(ranks)["refused"], ranks)
