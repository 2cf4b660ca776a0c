"""Norms, refusals, failures and the grid of scalapack; a session that uses it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from alchemist_ray import AlchemistSession
from alchemist_ray.errors import LibraryNotFoundError, RoutineError, ShapeError
from tests.support import launches
from tests.support.suite import scaled

RANK_COUNTS = scaled([1, 4], [1, 2, 3, 4, 6])


def results(ranks: int) -> dict[str, Any]:
    """The results of ranks_scalapack.py on this many ranks, from one launch."""
    found = launches.results("tests.ali.ranks_scalapack:everything", ranks)
    if "missing" in found:
        pytest.skip(found["missing"])
    return found


@pytest.mark.parametrize("ranks", RANK_COUNTS)
def test_numbers_are_those_of_numpy(ranks: int) -> None:
    launches.check_right(results(ranks)["numbers"], 130)


@pytest.mark.parametrize("ranks", RANK_COUNTS)
def test_bad_calls_and_failures_reach_every_rank_alike(ranks: int) -> None:
    launches.check_refused_alike(results(ranks)["refused"], ranks)


@pytest.mark.parametrize("ranks", RANK_COUNTS)
def test_the_grid_outlives_failed_calls_outside_of_native_code(ranks: int) -> None:
    launches.check_right(results(ranks)["renewal"])
    assert results(ranks)["exhausted"].startswith("ResourceError: MPI has no communicator left")


@pytest.mark.parametrize("ranks", RANK_COUNTS)
def test_an_error_of_mpi_that_native_code_ignores_fails_the_call(ranks: int) -> None:
    said = results(ranks)["ignored"]
    assert said.startswith(
        "RoutineError: scalapack: p?gemm on rank 0 ignored an error of MPI: Invalid rank"
    )


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_singular_vectors_of_bidiagonal_matrices_are_those_of_numpy(ranks: int) -> None:
    launches.check_right(launches.run("tests.ali.ranks_scalapack:bidiagonals", ranks), 200)


def test_a_user_solves_a_system(session: AlchemistSession) -> None:
    try:
        lib = session.load_library("scalapack")
    except LibraryNotFoundError as error:
        pytest.skip(str(error))
    assert "ScaLAPACK: /" in lib.about()
    rng = np.random.default_rng(5)
    a, b = rng.standard_normal((60, 60)), rng.standard_normal((60, 2))
    A, B = session.send_matrix(a), session.send_matrix(b)
    X = lib.solve(A, B)
    assert (X.shape, X.layout) == ((60, 2), "MC_MR")
    np.testing.assert_allclose(a @ X.fetch(), b, atol=1e-10)
    S, U, V = lib.svd(A)
    np.testing.assert_allclose((U.fetch() * S.fetch()) @ V.fetch().T, a, atol=1e-12)

    with pytest.raises(ShapeError, match="the numbers of rows must match"):
        lib.solve(A, session.send_matrix(b[:9]))
    with pytest.raises(RoutineError, match="singular"):
        lib.solve(session.send_matrix(np.zeros((60, 60))), B)
    with pytest.raises(RoutineError, match="on purpose"):  # one rank fails, the other waits
        session.load_library("echo").fail(rank=1)
    np.testing.assert_allclose(lib.solve(A, B).fetch(), X.fetch(), atol=1e-12)
    lib = session.load_library("scalapack")  # again: a grid of its own, the same library
    assert lib.norm(A) == pytest.approx(np.linalg.norm(a))
    assert lib.condest(A) == pytest.approx(np.linalg.cond(a, 1), rel=0.8)


def test_a_wrong_path_is_reported(session: AlchemistSession) -> None:
    with pytest.raises(LibraryNotFoundError, match=r"there is no file .*/nowhere/lib\.so"):
        session.load_library("scalapack", "/nowhere/lib.so")
