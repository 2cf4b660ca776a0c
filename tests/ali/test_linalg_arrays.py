"""Matrices on a gang behave as NumPy's arrays do, in every layout, on any number of ranks."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest

from ali.linalg.arithmetic import common_layout, part_layout
from mpi_workers.matrix.layout import LAYOUTS, Distribution
from tests.support import launches

RANK_COUNTS = [1, 2, 3, 4, 6]
results = functools.partial(launches.results, "tests.ali.ranks_linalg_arrays:everything")


@pytest.mark.parametrize("ranks", RANK_COUNTS)
@pytest.mark.parametrize(
    ("function", "least"),
    [
        ("sums_of_two", 40),
        ("broadcasts", 80),
        ("operations", 100),
        ("functions_of_one", 200),
        ("reductions", 130),
        ("other_norms", 60),
        ("slices", 200),
        ("diagonals_and_fills", 200),
    ],
)
def test_it_agrees_with_numpy(ranks: int, function: str, least: int) -> None:
    done, wrong = results(ranks)[function]
    assert wrong == []
    assert done >= (least if ranks < 3 else least / 3)


@pytest.mark.parametrize("ranks", RANK_COUNTS)
def test_uniform_numbers_do_not_depend_on_the_number_of_ranks(ranks: int) -> None:
    assert results(ranks)["uniform_numbers"] == results(1)["uniform_numbers"]


def test_uniform_numbers_are_uniform_and_independent() -> None:
    found = results(1)["uniform_numbers"]
    assert 0 <= found["range"][0] < 1e-3
    assert 1 - 1e-3 < found["range"][1] < 1
    mean, second, fourth = found["moments"]
    # Four deviations of the moments of 60 000 numbers.
    assert abs(mean) < 4 * (1 / 12 / 60_000) ** 0.5
    assert abs(second - 1 / 12) < 4 * (1 / 180 / 60_000) ** 0.5
    assert abs(fourth - 1 / 80) < 4 * (1 / 3600 / 60_000) ** 0.5
    assert found["across"] < 0.45
    assert found["with normal"] < 0.02  # the same seed, and other numbers
    assert found["values"] == found["more rows"]
    assert not np.isin(found["values"], found["other seed"]).any()


@pytest.mark.parametrize("ranks", RANK_COUNTS)
def test_bad_calls_are_refused_by_all_ranks_alike(ranks: int) -> None:
    launches.check_refused_alike(results(ranks)["refused"], ranks)


class Operand:
    """The attributes of a matrix that the choice of a layout reads."""

    def __init__(self, layout: str, shape: tuple[int, int], itemsize: int = 8) -> None:
        self.distribution = Distribution(layout, shape, (2, 2))
        self.layout, self.shape, self.grid = layout, shape, (2, 2)
        self.nbytes = shape[0] * shape[1] * itemsize


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
