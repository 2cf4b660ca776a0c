"""The elements that ranks of a node hold together: each in one box, and copied for its rank."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpi_workers.matrix.copy_kernels import RankPart
from mpi_workers.matrix.layout import Distribution, default_grid
from mpi_workers.matrix.node_shares import (
    Region,
    boxes,
    elements_of,
    exchange,
    place,
    products,
    row_groups,
)
from tests.support.layouts import every_layout, owned_indices


@st.composite
def shares(draw: st.DrawFn) -> tuple[Distribution, list[int]]:
    """A matrix, and some ranks in a row: those of a node."""
    size = draw(st.integers(1, 24))
    shape = draw(st.tuples(st.integers(0, 40), st.integers(0, 40)))
    first = draw(st.integers(0, size - 1))
    last = draw(st.integers(first, size - 1))
    distribution = Distribution(draw(every_layout()), shape, default_grid(size))
    return distribution, list(range(first, last + 1))


def held(distribution: Distribution, ranks: list[int]) -> np.ndarray[Any, Any]:
    """How many of the ranks hold each element."""
    found = np.zeros(distribution.shape, int)
    for rank in ranks:
        found[indices(distribution, rank)] += 1
    return found


def part(distribution: Distribution, rank: int, array: np.ndarray[Any, Any]) -> RankPart:
    local_indices = distribution.local_indices(rank)
    local = np.empty(local_indices.shape, array.dtype, order="F")
    if local.size:
        local[...] = array[indices(distribution, rank)]
    return RankPart(rank, local_indices, local)


def indices(distribution: Distribution, rank: int) -> Any:
    name, shape, grid = distribution.layout, distribution.shape, distribution.grid
    return np.ix_(*owned_indices(name, shape, grid, rank))


@given(share=shares(), data=st.data(), chunk=st.sampled_from([16, 64, 1000]), tiled=st.booleans())
def test_boxes_cover_what_the_ranks_hold_of_a_region(
    share: Any, data: st.DataObject, chunk: int, tiled: bool
) -> None:
    distribution, ranks = share
    m, n = distribution.shape
    row0, row1 = sorted(data.draw(st.tuples(*2 * [st.integers(0, m)])))
    col0, col1 = sorted(data.draw(st.tuples(*2 * [st.integers(0, n)])))
    region = Region(row0, row1, col0, col1)
    array = np.arange(m * n, dtype="int64").reshape(m, n)
    parts = [part(distribution, rank, array) for rank in ranks]
    seen = np.zeros((m, n), int)
    whole = boxes(distribution, ranks, region)
    for box in whole:
        for piece in box.pieces(8, chunk, tiled=tiled):
            piece.view(seen, 0, 0)[...] += 1
            copied = np.full(piece.shape, -1)
            exchange(copied, piece, parts, distribution, into_parts=False)
            assert np.array_equal(copied, piece.view(array, 0, 0))
    inside = np.zeros((m, n), bool)
    inside[row0:row1, col0:col1] = True
    times = held(distribution, ranks) * inside
    assert np.array_equal(seen, np.minimum(times, 1))
    counts = [elements_of(whole, rank, distribution) for rank in ranks]
    assert sum(counts) == times.sum()
    blank = [its._replace(local=np.full_like(its.local, -1)) for its in parts]
    for box in whole:
        exchange(box.view(array, 0, 0), box, blank, distribution, into_parts=True)
    for (rank, _, wanted), (_, _, got), count in zip(parts, blank, counts, strict=True):
        mine = inside[indices(distribution, rank)]
        assert np.array_equal(got[mine], wanted[mine])
        assert (got[~mine] == -1).all()
        assert count == mine.sum()


@given(share=shares(), data=st.data())
def test_rows_in_any_order_arrive_at_their_ranks(share: Any, data: st.DataObject) -> None:
    distribution, ranks = share
    m, n = distribution.shape
    rows = np.array(sorted(data.draw(st.sets(st.integers(0, max(0, m - 1))))), np.int64)
    rows = rows[rows < m]
    array = np.arange(m * n, dtype="int64").reshape(m, n)
    blank = [part(distribution, rank, np.full((m, n), -1)) for rank in ranks]
    counts = dict.fromkeys(ranks, 0)
    for group in row_groups(distribution, ranks, rows):
        elements = array[np.ix_(group.rows, group.cols)]
        for rank, count in place(elements, group, blank, distribution):
            counts[rank] += count
    chosen = np.zeros((m, n), bool)
    chosen[rows] = True
    for rank, _, got in blank:
        mine = chosen[indices(distribution, rank)]
        if mine.size:
            assert np.array_equal(got[mine], array[indices(distribution, rank)][mine])
            assert (got[~mine] == -1).all()
        assert counts[rank] == mine.sum()


@pytest.mark.parametrize("shape", [(0, 3), (3, 0), (1, 1), (5, 7), (1, 3000), (3000, 1)])
@pytest.mark.parametrize("most", [0, 3, 1024])
def test_parts_cover_a_region_once(shape: tuple[int, int], most: int) -> None:
    covered = np.zeros(shape, int)
    for part in Region(2, 2 + shape[0], 3, 3 + shape[1]).parts(most):
        assert math.prod(part.shape) <= max(1, most)
        covered[part.row0 - 2 : part.row1 - 2, part.col0 - 3 : part.col1 - 3] += 1
    assert (covered == 1).all()


def test_ranks_off_the_diagonal_hold_nothing_of_a_box() -> None:
    """A layout on the diagonal of a 2 x 2 grid leaves rank 1 without elements."""
    distribution, array = Distribution("MD_STAR", (1, 1), (2, 2)), np.array([[7]])
    parts = [part(distribution, rank, array) for rank in (0, 1)]
    (box,) = boxes(distribution, [0, 1], Region(0, 1, 0, 1))
    copied = np.zeros(box.shape, int)
    exchange(copied, box, parts, distribution, into_parts=False)
    assert copied.item() == 7


def test_neighbouring_ranks_hold_one_product_at_scale() -> None:
    """64 nodes with 128 ranks each: a node's share is one run of rows or columns."""
    grid = default_grid(64 * 128)
    for node in (0, 17, 63):
        ranks = tuple(range(128 * node, 128 * node + 128))
        for name in ("VC_STAR", "STAR_VC", "MC_MR", "VR_STAR", "STAR_VR", "MR_MC"):
            ((rows, cols),) = products(Distribution(name, (10**6, 10**6), grid), ranks)
            assert rows.width * cols.width == 128 * rows.period * cols.period // (64 * 128)
