"""Elemental, where there is a libEl: layouts, models, refusals, copies; a session that uses it."""

from __future__ import annotations

import functools
import os
from typing import TYPE_CHECKING

import numpy as np
import pytest

from alchemist_ray.errors import RoutineError, ShapeError
from tests.support import launches
from tests.support.suite import scaled

if TYPE_CHECKING:
    from alchemist_ray import AlchemistSession

RANK_COUNTS = scaled([1, 3, 4], [1, 2, 3, 4, 6])
results = functools.partial(launches.results, "tests.ali.ranks_elemental:everything")


@functools.cache
def missing() -> str:
    """Why there is no libEl for the ranks; empty if there is one."""
    return launches.run("tests.ali.ranks_elemental:found", 1)


@pytest.fixture(autouse=True)
def _libel() -> None:
    """Skip where a rank does not find libEl."""
    if missing():
        pytest.skip(missing())


@pytest.mark.parametrize("ranks", RANK_COUNTS)
@pytest.mark.parametrize(("function", "least"), [("layouts", 113), ("special", 100)])
def test_it_agrees_with_numpy(ranks: int, function: str, least: int) -> None:
    launches.check_right(results(ranks)[function], least)


@pytest.mark.parametrize("ranks", [ranks for ranks in RANK_COUNTS if ranks <= 3])
def test_factorizations_of_data_find_what_was_planted(ranks: int) -> None:
    launches.check_right(results(ranks)["factorised_data"], 7 if ranks > 2 else 14)


@pytest.mark.parametrize("ranks", RANK_COUNTS)
def test_bad_calls_are_refused_on_all_ranks_alike(ranks: int) -> None:
    found = results(ranks)["refusals"]
    assert [name for name, said in found.items() if len(said) != ranks or len(set(said)) > 1] == []
    words = {name: said[0] for name, said in found.items()}
    assert words.pop("after all") == "nothing"
    native = [words.pop(f"Elemental, {what}") for what in ("cholesky", "solve")]
    assert [w for w in words.values() if "Elemental's" in w or "Error: " not in w] == []
    assert {name: w.split(":")[0] for name, w in words.items() if "," not in name} == {
        "matmul": "ShapeError", "solve": "ShapeError", "cholesky": "ShapeError",
        "eigh": "ShapeError", "lstsq": "ShapeError", "ridge": "BadArgumentError",
        "norm": "BadArgumentError", "cond": "ShapeError", "interpolative": "BadArgumentError",
        "lasso": "ShapeError", "basis_pursuit": "ShapeError", "least_absolute": "ShapeError",
        "svm": "RoutineError", "nmf": "RoutineError",
    }  # fmt: skip
    assert "A is 4 x 3 (N) and B is 4 x 3 (N)" in words["matmul"]
    # What Elemental finds out itself comes with its own words.
    assert native == [
        "RoutineError: Elemental's ElCholeskyDist_d failed: A was not numerically HPD "
        "(EL_RUNTIME_ERROR)",
        "RoutineError: Elemental's ElLinearSolveDist_d failed: Matrix was singular "
        "(EL_RUNTIME_ERROR)",
    ]


@pytest.mark.parametrize("ranks", RANK_COUNTS)
def test_the_grid_outlives_failed_calls(ranks: int) -> None:
    launches.check_right(results(ranks)["renewal"])


@pytest.mark.parametrize("ranks", RANK_COUNTS[:3])
def test_nothing_is_copied_that_elemental_can_write_in_place(ranks: int) -> None:
    found = {name: copies for name, copies in results(ranks)["copies"].items() if copies}
    # pinv's result and its work are Elemental's, for only it knows their shapes on the way.
    assert found.pop("eigh", 0) == (1 if ranks > 1 else 0)
    assert found == {"pinv": 2, "lstsq": 1, "ridge": 1}


def test_control_structures_are_laid_out_as_elementals() -> None:
    expected = [True, True, 1000, 1.0, 6.0, 1e-5, 2, 500, 1.0, True, 100, 0.99, False, True]
    for found in results(1)["controls"].values():
        assert found == pytest.approx(expected)


@pytest.mark.parametrize("ranks", RANK_COUNTS[:2])
def test_what_elemental_cannot_count_is_refused(ranks: int) -> None:
    assert results(ranks)["too_large"].startswith("ShapeError: ")
    assert "the integers of this libEl end at" in results(ranks)["too_large"]


def test_a_session_uses_it(session: AlchemistSession) -> None:
    a = np.random.default_rng(1).standard_normal((60, 12))
    A = session.send_matrix(a)
    path = os.environ.get("ELEMENTAL_LIB")
    lib = session.load_library("elemental", path)
    assert "ELEMENTAL_LIB" in (lib.__doc__ or "")
    S, U, V = lib.svd(A)
    assert np.abs((U.fetch() * S.fetch()) @ V.fetch().T - a).max() < 1e-13
    assert abs(lib.norm(A, ord="2") - S.fetch()[0]) < 1e-13
    indefinite = session.send_matrix(np.diag([1.0, -1.0, 1.0]))
    for _ in range(2):  # a failure costs the gang its communicator
        with pytest.raises(RoutineError, match="not numerically HPD"):
            lib.cholesky(indefinite)
        with pytest.raises(ShapeError, match="60 x 12"):
            lib.cholesky(A)
        assert np.abs(lib.matmul(A, A, transpose_a="T").fetch() - a.T @ a).max() < 1e-12
    again = session.load_library("elemental")
    assert np.abs(again.singular_values(A).fetch() - S.fetch()).max() < 1e-13
