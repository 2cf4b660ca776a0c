"""Routines of linalg agree with NumPy and LAPACK, on any number of ranks.

The table of suites tells what each function of ranks_linalg*.py checks. Rows of the table of
routines are in test_routines.py and test_stated.py.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from ali import linalg
from ali.linalg.arithmetic import common_layout, part_layout
from ali.linalg.products import plan
from mpi_workers.matrix.layout import LAYOUTS, Distribution, default_grid
from mpi_workers.protocol.signature import Signature
from tests.support import launches
from tests.support.suite import scaled

RANK_COUNTS = [1, 2, 3, 4, 6]
# By file of ranks: functions, the least number of checks, and that from four ranks on.
SUITES: dict[str, dict[str, tuple[float, float]]] = {
    "linalg": {
        "products": (180, 25), "svds": (500, 71), "norms": (90, 12), "transposes": (160, 22),
        "nonfinite_passes": (4, 1),
    },
    # Matrices behave as NumPy's arrays do, in every layout.
    "linalg_arrays": {
        "sums_of_two": (40, 13), "broadcasts": (80, 26), "operations": (100, 33),
        "functions_of_one": (200, 66), "reductions": (130, 43), "other_norms": (60, 20),
        "slices": (200, 66), "diagonals_and_fills": (200, 66),
    },
    "linalg_solvers": {
        "pivoting": (18, 18), "least_squares": (270, 90), "decompositions": (120, 40),
        "transposed_products": (3, 3),
    },
    # Constant, duplicated and nearly dependent columns, scales from 1e-30 to 1e30, data far from
    # the origin, integers at the limits of their dtypes, no, one or two rows or columns, bool.
    "linalg_limits": {
        "factors": (200, 200), "components": (26, 26), "clusters": (50, 50), "searches": (15, 15),
        "integers": (13, 13), "sums": (49, 49), "triangles": (1000, 1000), "masks": (11, 11),
        "empty": (40, 40),
    },
    "linalg_learning": {"components": (200, 40), "clusters": (25, 25), "kernels": (12, 12)},
    # Factorizations of large matrices, on 2 to 4 ranks.
    "linalg_spread": {
        "least_squares": (30, 30), "leading_vectors": (4, 4), "tridiagonals": (18, 18),
        "exponentials": (8, 8),
    },
}  # fmt: skip
ON_THREE = {"linalg_arrays", "linalg_solvers"}  # fewer checks from three ranks on
# In `make test` on one rank, and on another number of them; `linalg_spread` on that alone.
OTHERS = {
    "linalg": 4, "linalg_arrays": 4, "linalg_solvers": 3, "linalg_limits": 2, "linalg_learning": 4,
}  # fmt: skip
COUNTS = {suite: scaled([1, other], RANK_COUNTS) for suite, other in OTHERS.items()}
COUNTS["linalg_spread"] = scaled([4], RANK_COUNTS[1:4])
CASES = [
    (suite, ranks, name)
    for suite, names in SUITES.items()
    for ranks in COUNTS[suite]
    for name in names
]
REFUSALS = ["linalg", "linalg_arrays", "linalg_solvers", "linalg_learning"]


def results(suite: str, ranks: int) -> dict[str, Any]:
    return launches.results(f"tests.ali.ranks_{suite}:everything", ranks)


@pytest.mark.parametrize(("suite", "ranks", "name"), CASES)
def test_it_agrees_with_numpy(suite: str, ranks: int, name: str) -> None:
    found = results(suite, ranks)[name]
    least, fewer = SUITES[suite][name]
    launches.check_right(
        found["checks"] if isinstance(found, dict) else found,
        fewer if ranks >= (3 if suite in ON_THREE else 4) else least,
    )


@pytest.mark.parametrize(
    ("suite", "ranks"), [(suite, ranks) for suite in REFUSALS for ranks in COUNTS[suite]]
)
def test_bad_calls_are_refused_by_all_ranks_alike(suite: str, ranks: int) -> None:
    launches.check_refused_alike(results(suite, ranks)["refused"], ranks)


def test_random_numbers_do_not_depend_on_the_number_of_ranks() -> None:
    for ranks in COUNTS["linalg"][1:]:
        assert results("linalg", ranks)["random_numbers"] == results("linalg", 1)["random_numbers"]


@pytest.mark.parametrize(
    ("name", "moments", "variances"),
    [
        ("normal", [0, 1, 0, 3], [1, 2, 15, 96]),
        ("uniform", [0, 1 / 12, 0, 1 / 80], [1 / 12, 1 / 180, 1 / 448, 1 / 3600]),
    ],
)
def test_random_numbers_have_their_distribution_and_are_independent(
    name: str, moments: list[float], variances: list[float]
) -> None:
    both = results("linalg", 1)["random_numbers"]
    found = both[name]
    deviations = np.sqrt(np.array(variances) / 60_000)
    assert (np.abs(np.array(found["moments"]) - moments) < 4 * deviations).all()
    assert found["different"] == 60_000
    assert found["across"] < 0.45  # 45 000 pairs of rows of 200: 6 deviations
    assert not np.isin(found["values"], found["another seed"]).any()
    assert found["values"] == found["of more rows"]
    assert both["both"]["correlation"] < 0.02  # the same seed, and other numbers
    if name == "uniform":
        assert 0 <= found["range"][0] < 1e-3
        assert 1 - 1e-3 < found["range"][1] < 1


@pytest.mark.parametrize("ranks", COUNTS["linalg"])
def test_a_truncated_svd_is_reproducible_and_reports_its_progress(ranks: int) -> None:
    same, told = results("linalg", ranks)["reproducible"]
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
    grid, (m, k, n) = default_grid(size), shapes
    left, right = map(Distribution, layouts, ((m, k), (k, n)), (grid, grid))
    assert plan(left, right) == way


def test_no_plan_is_worse_than_gathering_one_side() -> None:
    """On one rank no algorithm communicates, and the first is chosen."""
    for left, right in itertools.product(("VC_STAR", "STAR_STAR"), repeat=2):
        way = plan(Distribution(left, (5, 6), (1, 1)), Distribution(right, (6, 7), (1, 1)))
        assert way == "rows"


class Operand:
    """The attributes of a matrix that the choice of a layout reads."""

    def __init__(self, layout: str, shape: tuple[int, int], itemsize: int = 8) -> None:
        self.distribution = Distribution(layout, shape, (2, 2))
        self.layout, self.shape, self.grid = layout, shape, (2, 2)
        self.dtype = np.dtype((np.void, itemsize))


@pytest.mark.parametrize(
    ("layouts", "chosen"),
    [
        (("VC_STAR", "VC_STAR"), "VC_STAR"),
        (("VC_STAR", "STAR_VC"), "VC_STAR"),  # a tie: the first
        (("STAR_STAR", "MC_MR"), "MC_MR"),  # cut from what is everywhere, for nothing
        (("CIRC_CIRC", "MC_MR"), "MC_MR"),  # not all to one rank
        (("MC_STAR", "VC_STAR"), "VC_STAR"),  # fewer copies
    ],
)
def test_the_cheaper_side_moves(layouts: tuple[str, str], chosen: str) -> None:
    operands: Any = [Operand(layout, (100, 50)) for layout in layouts]
    assert common_layout(operands, (100, 50)) == chosen


def test_the_smaller_dtype_moves() -> None:
    operands: Any = [Operand("VC_STAR", (9, 9), 4), Operand("MC_MR", (9, 9), 16)]
    assert common_layout(operands, (9, 9)) == "MC_MR"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_row_or_column_is_on_the_ranks_of_the_matrix(layout: str) -> None:
    rows, cols = layout.split("_")
    circ = layout == "CIRC_CIRC"
    assert part_layout(layout, (1, 7), (5, 7)) == (layout if circ else f"STAR_{cols}")
    assert part_layout(layout, (5, 1), (5, 7)) == (layout if circ else f"{rows}_STAR")
    assert part_layout(layout, (1, 1), (5, 7)) == (layout if circ else "STAR_STAR")
    assert part_layout(layout, (5, 7), (5, 7)) == layout


@pytest.mark.parametrize("ranks", COUNTS["linalg_learning"][1:])
@pytest.mark.parametrize("data", ["float64", "float32", "int32", "uneven"])
def test_clusters_do_not_depend_on_the_number_of_ranks(ranks: int, data: str) -> None:
    inertia, *found = results("linalg_learning", ranks)["clusters"][data]
    alone, *expected = results("linalg_learning", 1)["clusters"][data]
    assert found == expected
    assert inertia == pytest.approx(alone, rel=1e-4 if data == "float32" else 1e-12)


@pytest.mark.parametrize("ranks", COUNTS["linalg_learning"])
def test_random_features_approximate_the_kernel(ranks: int) -> None:
    found, alone = (results("linalg_learning", size)["kernels"] for size in (ranks, 1))
    # Products of 2000 features are the kernel within 4 deviations of sqrt(1 / 2000) or so.
    assert found["off"] < 0.1
    assert found["fit"] < 0.5
    assert np.allclose(found["values"], alone["values"], rtol=0, atol=1e-13)


@pytest.mark.parametrize("ranks", COUNTS["linalg_limits"][1:])
def test_difficult_clusters_do_not_depend_on_the_number_of_ranks(ranks: int) -> None:
    found, alone = (results("linalg_limits", size)["clusters"] for size in (ranks, 1))
    differences = [name for name in alone if name != "checks" and found[name] != alone[name]]
    assert differences == []


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


ORDER, RANKS = 1024, 4
SHARES = 6.0  # matrices, of which a rank holds its part
BUFFERS = 6  # of 128 columns of the whole matrix, which count less the larger it is, and MPI's own


@pytest.mark.parametrize(
    "routine", ["eigh", "svd", "qr", "polar", "lstsq", "pinv", "solve", "det", "ridge", "gram"]
)
def test_no_rank_holds_more_than_its_share_of_six_matrices(routine: str) -> None:
    found = launches.results(
        "tests.ali.ranks_linalg_spread:memory", RANKS, ORDER, timeout=280, shared=False
    )
    assert found[routine] <= SHARES + BUFFERS * 128 * RANKS / ORDER
