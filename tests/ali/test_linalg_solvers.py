"""Systems and decompositions agree with LAPACK's, on any number of ranks."""

from __future__ import annotations

import functools

import numpy as np
import pytest

from ali import linalg
from ali.linalg.systems import parity
from mpi_workers.wire.signature import Signature
from tests.support import launches

RANK_COUNTS = [1, 2, 3, 4, 6]
results = functools.partial(launches.results, "tests.ali.ranks_linalg_solvers:everything")


@pytest.mark.parametrize("ranks", RANK_COUNTS)
@pytest.mark.parametrize(
    ("function", "least"),
    [
        ("pivoting", 18),
        ("least_squares", 270),
        ("decompositions", 120),
        ("transposed_products", 3),
    ],
)
def test_it_agrees_with_lapack(ranks: int, function: str, least: int) -> None:
    done, wrong = results(ranks)[function]
    assert wrong == []
    assert done >= (least if ranks < 3 or least < 20 else least / 3)


@pytest.mark.parametrize("ranks", RANK_COUNTS)
def test_bad_calls_are_refused_by_all_ranks_alike(ranks: int) -> None:
    launches.check_refused_alike(results(ranks)["troubles"], ranks)


@pytest.mark.parametrize("seed", range(20))
def test_the_parity_of_a_permutation_is_its_determinant(seed: int) -> None:
    order = np.random.default_rng(seed).permutation(seed + 1)
    assert parity(order) == round(np.linalg.det(np.eye(seed + 1)[order]))


def routines() -> dict[str, Signature]:
    return {
        name: function.__alchemist__
        for name, function in vars(linalg).items()
        if isinstance(getattr(function, "__alchemist__", None), Signature)
    }


def test_all_exports_are_routines_of_that_name() -> None:
    assert sorted(routines()) == sorted(linalg.__all__)
    assert all(signature.name == name for name, signature in routines().items())
    assert all(name in (linalg.__doc__ or "") for name in linalg.__all__)


@pytest.mark.parametrize("name", linalg.__all__)
def test_every_docstring_describes_parameters_results_and_cost(name: str) -> None:
    signature = routines()[name]
    for section in ("Parameters", "Returns", "Notes"):
        assert f"\n{section}\n---" in signature.doc
    text = signature.doc.partition("\nParameters\n")[2].partition("\nReturns\n")[0]
    assert [p.name for p in signature.parameters if p.name not in text] == []


@pytest.mark.parametrize(
    ("name", "results_of"),
    [
        ("matmul", ["C"]), ("svd", ["S", "U", "V"]), ("truncated_svd", ["S", "U", "V"]),
        ("qr", ["Q", "R"]), ("eigh", ["W", "V"]), ("cholesky", ["L"]), ("solve", ["X"]),
        ("norm", ["norm"]),
    ],
)  # fmt: skip
def test_routines_of_all_libraries_have_the_agreed_results(
    name: str, results_of: list[str]
) -> None:
    signature = routines()[name]
    assert [result.name for result in signature.results] == results_of
    assert signature.parameters[0].name == "A"
