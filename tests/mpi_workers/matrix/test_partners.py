"""Every rank gets each of its elements from one rank, and both know it without a message."""

from __future__ import annotations

import itertools

import pytest

from mpi_workers.matrix.layout import Distribution, Grid
from mpi_workers.matrix.redistribution import exchanges, partners
from tests.support.layouts import SOME_LAYOUTS


@pytest.mark.parametrize("grid", [(1, 1), (2, 2), (2, 3), (3, 2), (1, 4), (4, 6)])
@pytest.mark.parametrize("shape", [(5, 7), (1, 30), (13, 1), (0, 3)])
def test_every_element_has_one_giver(grid: Grid, shape: tuple[int, int]) -> None:
    size = grid[0] * grid[1]
    for old, new in itertools.product(SOME_LAYOUTS, SOME_LAYOUTS):
        source, result = Distribution(old, shape, grid), Distribution(new, shape, grid)
        sent = {
            (rank, taker): part
            for rank in range(size)
            for taker, part in zip(*partners(source, result, rank, giving=True), strict=True)
        }
        for rank in range(size):
            mine, before = result.local_indices(rank), source.local_indices(rank)
            got = list(zip(*partners(source, result, rank, giving=False), strict=True))
            for giver, part in got:
                theirs = source.local_indices(giver)
                given = sent.pop((giver, rank))
                assert list(map(list, given)) == list(map(list, part))
                assert set(part.rows) <= set(theirs.rows), (old, new)
                assert set(part.cols) <= set(theirs.cols), (old, new)
            elements = [e for _, part in got for e in itertools.product(part.rows, part.cols)]
            assert sorted(elements) == sorted(itertools.product(mine.rows, mine.cols)), (old, new)
            if before.size and before == mine:
                assert [giver for giver, _ in got] == [rank]  # nothing moves
        assert not sent


def test_ranks_without_common_elements_are_not_visited() -> None:
    grid, shape = (64, 128), (10**6, 10**6)
    source, result = Distribution("MC_MR", shape, grid), Distribution("VC_STAR", shape, grid)
    steps = list(exchanges(source, result, 5))
    assert len(steps) == 128  # of 8192 ranks: those in its grid row
    assert sum(len(sends.rows) * len(sends.cols) for (_, sends), _ in steps) == (
        source.local_indices(5).size
    )
