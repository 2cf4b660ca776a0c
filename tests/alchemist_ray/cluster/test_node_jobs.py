"""Which objects of the store an agent opens at once, and which small blocks become one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from alchemist_ray.cluster.node_jobs import OPENED_NBYTES, PANEL_NBYTES, panels, together
from mpi_workers.matrix.copy_kernels import ArrayBlock

SIZES = st.lists(
    st.integers(0, 2 * OPENED_NBYTES) | st.integers(0, OPENED_NBYTES // 8), max_size=60
)


@given(sizes=SIZES)
def test_all_are_opened_once_in_order_and_never_much_at_once(sizes: list[int]) -> None:
    groups = [list(range(len(sizes)))[some] for some in together(sizes)]
    assert [i for group in groups for i in group] == list(range(len(sizes)))
    assert all(groups)
    for group in groups:  # an unknown size may be any: nothing is opened after it
        assert sum(sizes[i] or OPENED_NBYTES for i in group[:-1]) < OPENED_NBYTES


@given(sizes=SIZES)
def test_small_objects_are_opened_in_groups(sizes: list[int]) -> None:
    groups = [list(range(len(sizes)))[some] for some in together(sizes)]
    for group in groups[:-1]:
        assert sum(sizes[i] or OPENED_NBYTES for i in group) >= OPENED_NBYTES


# --- small blocks are joined ---

cuts = st.lists(st.integers(1, 39), max_size=12, unique=True).map(
    lambda some: [0, *sorted(some), 40]
)


def each(action: Callable[[int], object], numbers: Sequence[int]) -> None:
    for i in numbers:
        action(i)


def blocks_of(whole: Any, rows: list[int], cols: list[int]) -> list[ArrayBlock]:
    return [
        ArrayBlock(whole[r0:r1, c0:c1], (r0, c0))
        for r0, r1 in pairwise(rows)
        for c0, c1 in pairwise(cols)
    ]


@settings(max_examples=200)
@given(cuts, cuts, st.randoms(), st.integers(0, 1601), st.sampled_from(["f4", "f8"]))
def test_every_element_arrives_once(
    rows: list[int], cols: list[int], order: Any, least: int, dtype: str
) -> None:
    whole = np.arange(1600, dtype="f4").reshape(40, 40)
    blocks = blocks_of(whole, rows, cols)
    order.shuffle(blocks)
    seen, times = np.zeros((40, 40), dtype), np.zeros((40, 40), int)
    for some in panels(blocks, np.dtype(dtype), lambda array: array.size < least, each):
        for array, (row, col) in some:
            here = np.s_[row : row + array.shape[0], col : col + array.shape[1]]
            seen[here] = array
            times[here] += 1
    assert np.array_equal(seen, whole)
    assert (times == 1).all()


def test_large_blocks_are_not_joined() -> None:
    whole = np.arange(1600.0).reshape(40, 40)
    blocks = blocks_of(whole, [0, 20, 39, 40], [0, 40])
    below = ArrayBlock(whole[:1] + 1, (40, 0))
    large, small = panels([*blocks, below], whole.dtype, lambda array: array.shape == (1, 40), each)
    assert [id(block.array) for block in large] == [id(block.array) for block in blocks[:2]]
    assert [(block.origin, block.array.shape) for block in small] == [((39, 0), (2, 40))]


def test_a_panel_has_an_end() -> None:
    column = np.zeros((PANEL_NBYTES // 8 // 3, 1))  # a third: the fourth goes into the next
    blocks = [ArrayBlock(column, (i * len(column), 0)) for i in range(4)]
    shapes = [
        [block.array.shape for block in some]
        for some in panels(blocks, column.dtype, lambda array: True, each)
    ]
    assert shapes == [[column.shape], [(3 * len(column), 1)]]
