"""A block with its neighbours' elements is cut from the whole matrix with a margin around it."""

from __future__ import annotations

import pytest

from tests.support import launches
from tests.support.suite import scaled

RANKS = "tests.ali.ranks_halo:"


@pytest.mark.parametrize("ranks", scaled([1, 2, 3, 6], [1, 2, 3, 4, 6, 9]))
def test_a_halo_is_part_of_the_padded_matrix_and_wraps_around_if_it_is_periodic(ranks: int) -> None:
    launches.check_right(launches.run(RANKS + "halos", ranks), 110)


def test_what_has_no_halo_is_refused_by_all_ranks_alike() -> None:
    said = launches.run(RANKS + "refusals", 4)
    assert said[0].startswith("LayoutError: halo: the matrix is in MC_MR; convert it")
    assert said[1] == "BadArgumentError: halo: width must be an integer of at least 1; got 0"
    assert said[2] == "BadArgumentError: halo: width must be an integer of at least 1; got 1.5"
    assert "a width of 4 needs as many rows in a block; those of this matrix have 3" in said[3]
    assert "periodic, a width of 3 needs as many columns in every block; the last block" in said[4]
    assert "halo: out is (2, 2) of float64, not " in said[5]
