"""Regions from frames are checked, and cut out of the parts of ranks."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpi_workers.failures import Failure
from mpi_workers.matrix.layout import LAYOUTS, Distribution, default_grid
from mpi_workers.matrix.neighbours import joined
from mpi_workers.matrix.node_shares import Region

sizes = st.integers(0, 40)


@given(data=st.data(), name=st.sampled_from(LAYOUTS), size=st.integers(1, 8))
def test_the_part_of_a_rank_in_a_region_is_the_intersection(
    data: st.DataObject, name: str, size: int
) -> None:
    m, n = data.draw(st.tuples(sizes, sizes))
    rows, cols = (
        sorted(data.draw(st.tuples(*2 * [st.integers(0, m)]))),
        sorted(data.draw(st.tuples(*2 * [st.integers(0, n)]))),
    )
    region = Region.checked([*rows, *cols], (m, n))
    local_indices = Distribution(name, (m, n), default_grid(size)).local_indices(
        data.draw(st.integers(0, size - 1))
    )
    wanted = {(i, j) for i in local_indices.rows for j in local_indices.cols} & {
        (i, j) for i in range(*rows) for j in range(*cols)
    }
    part = region.of(local_indices)
    assert {(i, j) for i in part.rows for j in part.cols} == wanted


@pytest.mark.parametrize(
    "value",
    [None, 7, "0101", [], [0, 1, 0], [0, 1, 0, 1, 0], (0, 1, 0, 1), [0, 4, 0, 1], [0, 1, 0, 5],
     [2, 1, 0, 1], [0, 1, 2, 1], [-1, 1, 0, 1], [0, True, 0, 1], [0, 1.0, 0, 1], [0, "1", 0, 1],
     [0, 1 << 70, 0, 1], [np.int64(0), 1, 0, 1], ["x" * 10_000] * 4],
)  # fmt: skip
def test_an_invalid_region_is_a_shape_error(value: Any) -> None:
    with pytest.raises(Failure, match="not a region of a 3 x 4 matrix") as caught:
        Region.checked(value, (3, 4))
    assert caught.value.kind == "ShapeError"
    assert len(caught.value.message) < 300


@given(
    rows=st.sets(st.integers(1, 19)), cols=st.sets(st.integers(1, 19)), order=st.randoms(),
    gone=st.sets(st.integers(0, 40)), axis=st.sampled_from([0, 1]), most=st.integers(1, 500),
)  # fmt: skip
def test_joined_blocks_fill_their_rectangle_in_order(
    rows: set[int], cols: set[int], order: Any, gone: set[int], axis: int, most: int
) -> None:
    down, across = (list(pairwise([0, *sorted(cuts), 20])) for cuts in (rows, cols))
    bounds = [(*r, *c) for r in down for c in across]
    order.shuffle(bounds)
    given = [(b, [i]) for i, b in enumerate(bounds) if i not in gone]
    numbers = [i for _, (i,) in given]
    found = joined(given, axis, most)
    assert sorted(i for _, members in found for i in members) == numbers
    for (row0, row1, col0, col1), members in found:
        first, last = bounds[members[0]], bounds[members[-1]]
        assert (row0, row1, col0, col1) == (first[0], last[1], first[2], last[3])
        assert (row1 - row0) * (col1 - col0) <= most or len(members) == 1
        edges = [bounds[i][2 * axis : 2 * axis + 2] for i in members]
        assert all(before[1] == after[0] for before, after in pairwise(edges))
