"""Every element of a matrix has exactly the owners that Elemental assigns to it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpi_workers.matrix.layout import (
    LAYOUTS,
    Distribution,
    as_slice,
    clip,
    copies,
    default_grid,
    intersect,
    local_indices,
    positions,
)
from tests.support.owned_indices import owned_indices

ELEMENTAL = json.loads((Path(__file__).parents[2] / "data" / "elemental_layouts.json").read_text())

layouts = st.sampled_from(LAYOUTS)
grids = st.tuples(st.integers(1, 6), st.integers(1, 6))
shapes = st.tuples(st.integers(1, 25), st.integers(1, 25))
progressions = st.builds(range, st.integers(0, 20), st.integers(0, 80), st.integers(1, 12))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_rank_owns_what_elemental_says(layout: str) -> None:
    cases = [case for case in ELEMENTAL["cases"] if case["dist"] == layout]
    assert len(cases) == len(ELEMENTAL["cases"]) // len(LAYOUTS)
    for case in cases:
        shape, grid = tuple(case["shape"]), tuple(case["grid"])
        for rank, owned in enumerate(case["owned"]):
            rows, cols = owned_indices(layout, shape, grid, rank)
            assert (rows.tolist(), cols.tolist()) == (owned["rows"], owned["cols"]), (case, rank)


def test_default_grid_has_the_height_of_elementals() -> None:
    for size, height in ELEMENTAL["default_grid_height"].items():
        assert default_grid(int(size)) == (height, int(size) // height)


@given(st.integers(1, 2000))
def test_default_grid_is_the_squarest_that_is_not_taller_than_wide(size: int) -> None:
    height, width = default_grid(size)
    assert height * width == size
    assert height <= width
    assert not [h for h in range(height + 1, size) if size % h == 0 and h * h <= size]


@given(layouts, shapes, grids)
def test_local_indices_cover_the_matrix_once_per_copy(
    layout: str, shape: tuple[int, int], grid: tuple[int, int]
) -> None:
    count = np.zeros(shape, int)
    for rank in range(grid[0] * grid[1]):
        count[np.ix_(*owned_indices(layout, shape, grid, rank))] += 1
    assert (count == copies(layout, grid)).all()


@given(layouts, shapes, grids)
def test_a_group_of_owners_holds_the_same_part_and_groups_are_disjoint(
    layout: str, shape: tuple[int, int], grid: tuple[int, int]
) -> None:
    distribution = Distribution(layout, shape, grid)
    count = np.zeros(shape, int)
    seen: list[int] = []
    for group in distribution.owners():
        seen += group
        assert {len(group)} == {copies(layout, grid)}
        assert len({distribution.local_indices(rank) for rank in group}) == 1
        rows, cols = distribution.local_indices(group[0])
        count[np.ix_(rows, cols)] += 1
    assert (count == 1).all()
    assert len(seen) == len(set(seen))
    for rank in set(range(distribution.size)) - set(seen):
        assert distribution.local_indices(rank).size == 0


@given(layouts, shapes, grids)
def test_local_indices_are_the_ranges_of_the_owned_indices(
    layout: str, shape: tuple[int, int], grid: tuple[int, int]
) -> None:
    for rank in range(grid[0] * grid[1]):
        held = local_indices(layout, shape, grid, rank)
        rows, cols = owned_indices(layout, shape, grid, rank)
        assert (list(held.rows), list(held.cols)) == (rows.tolist(), cols.tolist())
        assert held.shape == (len(rows), len(cols))
        assert held.size == len(rows) * len(cols)


@given(progressions, progressions)
def test_intersection_is_the_common_members(a: range, b: range) -> None:
    assert list(intersect(a, b)) == sorted(set(a) & set(b))


@given(progressions, st.integers(0, 90), st.integers(0, 90))
def test_clip_keeps_the_members_in_the_interval(owned: range, start: int, stop: int) -> None:
    kept = clip(owned, start, stop)
    assert list(kept) == [i for i in owned if start <= i < stop]
    assert kept.step == owned.step


@given(progressions, progressions)
def test_positions_select_a_part_of_the_block(owned: range, other: range) -> None:
    part = intersect(owned, other)
    assert np.array(owned)[positions(owned, part)].tolist() == list(part)


@given(progressions, st.integers(0, 20))
def test_as_slice_selects_a_part_of_the_whole(part: range, before: int) -> None:
    origin = max(0, part.start - before)
    whole = np.arange(origin, origin + 200)
    assert whole[as_slice(part, origin)].tolist() == list(part)


@pytest.mark.parametrize("layout", ["", "MC", "VC_STAR ", "vc_star", "MC_VR", "STAR"])
def test_an_unknown_layout_is_refused_with_the_list_of_layouts(layout: str) -> None:
    with pytest.raises(ValueError, match=r"layout must be one of .*MC_MR, .*CIRC_CIRC.*; got"):
        owned_indices(layout, (3, 3), (1, 2), 0)


@pytest.mark.parametrize("rank", [-1, 6, 100])
def test_a_rank_off_the_grid_is_refused(rank: int) -> None:
    with pytest.raises(ValueError, match="not on a 2 x 3 grid"):
        owned_indices("VC_STAR", (3, 3), (2, 3), rank)


def test_an_empty_grid_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one rank"):
        default_grid(0)
