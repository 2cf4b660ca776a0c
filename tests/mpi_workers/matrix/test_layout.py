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
    Form,
    Runs,
    as_array,
    as_slice,
    clip,
    contiguous,
    copies,
    default_grid,
    evenly,
    form,
    layout_of,
    local_indices,
    mirrored,
    number_of,
    positions,
    selector,
    shape_of_parts,
    sibling,
    stored_shape,
)
from tests.support.layouts import every_layout, owned_indices

ELEMENTAL = json.loads((Path(__file__).parents[2] / "data" / "elemental_layouts.json").read_text())

layouts = every_layout()
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


@given(layouts, shapes, grids)
def test_the_shape_of_a_matrix_follows_from_those_of_its_parts(
    layout: str, shape: tuple[int, int], grid: tuple[int, int]
) -> None:
    ranks = range(grid[0] * grid[1])
    parts = [local_indices(layout, shape, grid, rank).shape for rank in ranks]
    assert shape_of_parts(layout, grid, parts) == shape


@given(st.none() | st.integers(2, 12), shapes, grids)
def test_every_rank_owns_the_blocks_that_scalapack_says(
    size: int | None, shape: tuple[int, int], grid: tuple[int, int]
) -> None:
    """None: BLOCK, whose blocks are so large that each rank has at most one."""
    layout = "BLOCK" if size is None else f"BLOCK_CYCLIC:{size}"
    block = [size or -(-length // ranks) for length, ranks in zip(shape, grid, strict=True)]
    assert Distribution(layout, shape, grid).block == tuple(block)
    owner = np.empty(shape, int)
    for i, j in np.ndindex(shape):
        owner[i, j] = i // block[0] % grid[0] + j // block[1] % grid[1] * grid[0]
    for rank in range(grid[0] * grid[1]):
        rows, cols = owned_indices(layout, shape, grid, rank)
        mine = np.zeros(shape, bool)
        mine[np.ix_(rows, cols)] = True
        assert np.array_equal(mine, owner == rank)


@given(st.integers(0, 5), st.integers(1, 9), st.integers(1, 6), st.integers(0, 90), st.data())
def test_indices_in_blocks_behave_as_a_tuple_of_them(
    first: int, width: int, ranks: int, stop: int, data: st.DataObject
) -> None:
    runs = Runs(first % ranks, 1, ranks).of_blocks(width)
    start = data.draw(st.integers(0, stop))
    found = runs.members(start, stop)
    expected = [i for i in range(start, stop) if i // width % ranks == first % ranks]
    assert list(found) == as_array(found).tolist() == np.array(found, int).tolist() == expected
    assert len(found) == len(expected)
    assert [i for part in contiguous(found) for i in part] == expected
    assert [i for i in range(-3, stop + 3) if i in found] == expected
    assert [found.index(i) for i in expected] == list(range(len(expected)))
    assert [found[k] for k in range(-len(expected), len(expected))] == 2 * expected
    low, high = sorted(data.draw(st.tuples(*2 * [st.integers(0, len(expected))])))
    assert list(found[low:high]) == expected[low:high]
    every = np.arange(stop)
    assert every[runs.holds(every)].tolist() == list(runs.members(0, stop))
    part = clip(found, low, high)
    assert list(part) == [i for i in expected if low <= i < high]
    assert as_array(found)[positions(found, part)].tolist() == list(part)
    assert every[selector(part)].tolist() == list(part)
    if part:
        assert hash(part) == hash(clip(clip(found, 0, part[-1] + 1), part[0], stop))


def test_indices_in_blocks_refuse_what_a_range_refuses() -> None:
    found = Runs(0, 2, 6).members(0, 20)
    for wrong in (2, 20, -1, "0"):
        with pytest.raises(ValueError, match="is not one of the indices"):
            found.index(wrong)
    for at in (len(found), -len(found) - 1):
        with pytest.raises(IndexError):
            found[at]
    with pytest.raises(ValueError, match="in steps of 2"):
        found[::2]


@given(every_layout())
def test_the_form_of_a_layout_has_its_name(layout: str) -> None:
    assert form(layout).layout == layout
    rows, cols, block = form(layout)
    assert form(Form(cols, rows, block).layout) == Form(cols, rows, block)  # a transpose
    assert sibling(sibling(layout, cols, rows), rows, cols) == layout
    assert sibling(layout, "STAR", "STAR") == "STAR_STAR"
    assert mirrored(layout) == Form(cols, rows, block).layout
    assert layout_of(number_of(layout)) == layout


def test_a_number_of_no_layout_is_refused() -> None:
    for number in (-1, 0, len(LAYOUTS) + 1, 1 << 31, 3 | 4 << 8):
        with pytest.raises(ValueError, match="layout"):
            layout_of(number)


def test_an_array_is_stored_as_rows_of_its_first_axis() -> None:
    shapes = [(), (5,), (0, 3), (2, 3, 4)]
    assert [*map(stored_shape, shapes)] == [(1, 1), (5, 1), (0, 3), (2, 12)]
    for wrong in ((1,) * 9, (2, -1), (0, 1 << 63), (1, 1 << 32, 1 << 31)):
        with pytest.raises(ValueError, match="at most 8 axes, not negative"):
            stored_shape(wrong)


@given(st.lists(st.integers(0, 9), max_size=4))
def test_positions_are_a_slice_only_if_it_selects_the_same(listed: list[int]) -> None:
    assert np.arange(10)[evenly(np.array(listed, int))].tolist() == listed


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
        held = local_indices(layout, shape, grid, rank)
        m, n = len(held.rows), len(held.cols)
        assert (held.shape, held.size) == ((m, n), m * n)
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


@given(st.data(), layouts, shapes, grids)
def test_the_holders_of_a_region_are_the_groups_with_an_element_of_it(
    data: st.DataObject, layout: str, shape: tuple[int, int], grid: tuple[int, int]
) -> None:
    distribution = Distribution(layout, shape, grid)
    bounds = [sorted(data.draw(st.tuples(*2 * [st.integers(0, n)]))) for n in shape]
    found = list(distribution.holders(*bounds[0], *bounds[1]))
    held = (
        (group, [clip(its, *ends) for its, ends in zip(part, bounds, strict=True)])
        for group in distribution.owners()
        for part in [distribution.local_indices(group[0])]
    )
    assert sorted(found) == sorted(group for group, (rows, cols) in held if rows and cols)


@given(progressions, st.integers(0, 90), st.integers(0, 90))
def test_clip_keeps_the_members_in_the_interval(owned: range, start: int, stop: int) -> None:
    kept = clip(owned, start, stop)
    assert list(kept) == [i for i in owned if start <= i < stop]
    assert isinstance(kept, range)
    assert kept.step == owned.step


@given(progressions, st.integers(0, 90), st.integers(0, 90), st.integers(1, 5))
def test_positions_select_a_part_of_the_block(
    owned: range, start: int, stop: int, step: int
) -> None:
    part = clip(owned, start, stop)[::step]
    assert np.array(owned)[positions(owned, part)].tolist() == list(part)


@given(progressions, st.integers(0, 20))
def test_as_slice_selects_a_part_of_the_whole(part: range, before: int) -> None:
    origin = max(0, part.start - before)
    whole = np.arange(origin, origin + 200)
    assert whole[as_slice(part, origin)].tolist() == list(part)


@pytest.mark.parametrize(
    "layout",
    ["", "MC", "VC_STAR ", "vc_star", "MC_VR", "STAR", "MC_MR:4", "MC_MR:BLOCK", "STAR_STAR:4",
     "CIRC_CIRC:BLOCK", "MD_STAR:4", "MC_STAR:1", "BLOCK_CYCLIC", "BLOCK:4", "BLOCK_CYCLIC:",
     "BLOCK_CYCLIC:0", "BLOCK_CYCLIC:-1", "BLOCK_CYCLIC:064", "BLOCK_CYCLIC:6 4", "BLOCK_CYCLIC:x",
     "BLOCK_CYCLIC:8388607", "BLOCK_CYCLIC:٤"],
)  # fmt: skip
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
