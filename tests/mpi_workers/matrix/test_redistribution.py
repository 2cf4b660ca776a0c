"""Any layout to any layout, element for element, over real MPI."""

from __future__ import annotations

import pytest

from tests.support import launches
from tests.support.layouts import SOME_LAYOUTS
from tests.support.suite import scaled

RANKS = "tests.mpi_workers.matrix.ranks_redistribution:"


@pytest.mark.parametrize("ranks", scaled([3], [1, 2, 3, 4, 6]))
def test_every_layout_reaches_every_layout(ranks: int) -> None:
    shapes = [(5, 7), (13, 2), (1, 4)] if ranks < 6 else [(5, 7)]
    done, bad = launches.run(RANKS + "every_pair", ranks, shapes, 64)
    assert bad == []
    assert done >= len(SOME_LAYOUTS) ** 2 * len(shapes)


def test_every_dtype_survives_messages_of_any_size() -> None:
    assert launches.run(RANKS + "every_dtype", 3) == []


def test_shapes_and_dtypes_that_differ_are_refused_before_anything_is_sent() -> None:
    assert len(launches.run(RANKS + "refusals", 2)) == 2


def test_to_layout_copies_only_where_the_layout_changes() -> None:
    assert launches.run(RANKS + "to_layout", 3) == [True, "STAR_STAR", True, True, True, [1, 7]]
