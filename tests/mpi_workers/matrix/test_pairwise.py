"""Shares of an array are cut into messages."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpi_workers.matrix import pairwise
from mpi_workers.matrix.layout import Distribution
from mpi_workers.matrix.pairwise import Share, serves
from tests.support.layouts import every_layout

sizes = st.integers(0, 40)


@given(
    shape=st.tuples(sizes, sizes),
    itemsize=st.sampled_from([4, 8, 16]),
    message=st.integers(16, 5000),
    order=st.sampled_from(["C", "F"]),
    listed=st.booleans(),
)
def test_messages_cover_a_share_once_and_are_no_larger_than_the_limit(
    shape: tuple[int, int], itemsize: int, message: int, order: Any, listed: bool
) -> None:
    numbers = np.arange(shape[0] * shape[1]).reshape(shape, order=order)
    rows = np.arange(shape[0]) if listed else slice(0, shape[0])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pairwise, "MESSAGE", message)
        share = Share(numbers, rows, slice(0, shape[1]))
        pieces = [piece.elements() for piece in share.cuts(itemsize, order)]
    assert all(0 < piece.size * itemsize <= message for piece in pieces)
    found = np.concatenate([np.empty(0, int), *(piece.ravel(order) for piece in pieces)])
    assert sorted(found.tolist()) == list(range(numbers.size))


@given(every_layout(), st.tuples(st.integers(1, 4), st.integers(1, 4)))
def test_each_rank_is_served_by_itself_or_by_one_of_the_copies(
    layout: str, grid: tuple[int, int]
) -> None:
    copies = Distribution(layout, (9, 9), grid).owners()
    groups = {rank: group for group in copies for rank in group}
    ranks = range(grid[0] * grid[1])
    for taker in ranks:
        givers = [giver for giver in ranks if serves(groups, giver, taker)]
        assert sorted(map(copies.index, map(groups.__getitem__, givers))) == [*range(len(copies))]
        assert (taker in givers) == (taker in groups)
