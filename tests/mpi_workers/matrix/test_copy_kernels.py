"""Tiled copies are plain copies, whatever the strides, the origin and the cut."""

from __future__ import annotations

import itertools
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpi_workers.matrix import copy_kernels
from mpi_workers.matrix.copy_kernels import ArrayBlock, RankPart
from mpi_workers.matrix.layout import Distribution, copies
from tests.support.layouts import every_layout


def parts_of(at: Distribution, dtype: Any = np.float64, most: int = 1) -> list[RankPart]:
    """Blocks filled with -1, for at most so many ranks of each group of owners."""
    ranks = [rank for group in at.owners() for rank in group[:most]]
    owned = [at.local_indices(rank) for rank in ranks]
    blocks = [np.full(its.shape, -1, dtype, order="F") for its in owned]
    return list(map(RankPart, ranks, owned, blocks))


@pytest.mark.parametrize("order", ["CC", "CF", "FC", "FF"])
@pytest.mark.parametrize("shape", [(700, 600), (3, 5), (1, 200_000), (200_000, 1)])
def test_copy_is_assignment(order: Any, shape: tuple[int, int]) -> None:
    src = np.arange(float(shape[0] * shape[1])).reshape(shape).copy(order=order[0])
    dst = np.zeros(shape, order=order[1])
    copy_kernels.copy(dst, src)
    assert np.array_equal(dst, src)


def test_copy_takes_any_strides() -> None:
    src = np.arange(900.0 * 800).reshape(900, 800)[::-2, ::3]
    whole = np.zeros((2 * src.shape[1], src.shape[0]))
    copy_kernels.copy(whole[::2].T, src)
    assert np.array_equal(whole[::2].T, src)
    assert not whole[1::2].any()


@settings(max_examples=60)
@given(
    every_layout(),
    st.sampled_from([(1, 1), (1, 3), (2, 2), (2, 3), (3, 2)]),
    st.tuples(st.integers(1, 60), st.integers(1, 60)),
    st.data(),
)
def test_exchange_serves_every_part_of_any_region(
    layout: str, grid: tuple[int, int], shape: tuple[int, int], data: st.DataObject
) -> None:
    row0, col0 = data.draw(st.integers(0, shape[0] - 1)), data.draw(st.integers(0, shape[1] - 1))
    row1, col1 = data.draw(st.integers(row0, shape[0])), data.draw(st.integers(col0, shape[1]))
    whole = np.arange(1.0, 1 + shape[0] * shape[1]).reshape(shape)
    region = whole[row0:row1, col0:col1]
    parts = parts_of(Distribution(layout, shape, grid))
    copied = copy_kernels.exchange([ArrayBlock(region, (row0, col0))], parts, into_parts=True)
    assert set(copied) == {part.rank for part in parts}
    assert sum(part.elements for part in copied.values()) == region.size
    inside = np.full(shape, -1.0)
    inside[row0:row1, col0:col1] = region
    for part in parts:
        assert np.array_equal(part.local, inside[np.ix_(*part.local_indices)])
    back = np.zeros_like(region)
    copy_kernels.exchange([ArrayBlock(back, (row0, col0))], parts, into_parts=False)
    assert np.array_equal(back, region)


@settings(max_examples=40)
@given(
    every_layout(),
    st.sets(st.integers(1, 399), max_size=20),
    st.sets(st.integers(1, 299), max_size=3),
    st.randoms(),
)
def test_blocks_one_below_the_other_are_exchanged_like_one(
    layout: str, rows: set[int], cols: set[int], random: Any
) -> None:
    whole = np.arange(400.0 * 300).reshape(400, 300)
    parts = parts_of(Distribution(layout, whole.shape, (2, 2)))
    blocks = []
    for r0, r1 in pairwise([0, *sorted(rows), 400]):
        for c0, c1 in pairwise([0, *sorted(cols), 300]):
            kind = random.choice(["of the whole", "C", "F", "f4", "left out"])
            array = whole[r0:r1, c0:c1]
            if kind == "f4":
                array = array.astype("f4")  # 120,000 numbers: exact
            elif kind != "of the whole":
                array = array.copy(order="F" if kind == "F" else "C")
            if kind != "left out":
                blocks.append(ArrayBlock(array, (r0, c0)))
    random.shuffle(blocks)
    expected = np.full(whole.shape, -1.0)
    for array, (r, c) in blocks:
        expected[r : r + array.shape[0], c : c + array.shape[1]] = array
    back = [ArrayBlock(np.zeros_like(block.array), block.origin) for block in blocks]
    with ThreadPoolExecutor(2) as executor:
        on: Any = {"executor": executor, "threads": random.choice([1, 2])}
        copied = copy_kernels.exchange(blocks, parts, into_parts=True, **on)
        copy_kernels.exchange(back, parts, into_parts=False, **on)
    assert sum(part.elements for part in copied.values()) == sum(b.array.size for b in blocks)
    for part in parts:
        assert np.array_equal(part.local, expected[np.ix_(*part.local_indices)])
    for sent, found in zip(blocks, back, strict=True):
        assert np.array_equal(sent.array, found.array)


@pytest.mark.parametrize("layout", ["VC_STAR", "MC_MR", "MD_STAR", "STAR_MR", "STAR_STAR"])
@pytest.mark.parametrize("dtype", ["float32", "complex128", "int64"])
@pytest.mark.parametrize(
    ("rows", "cols"), [([0, 1300], [0, 900]), ([0, 1, 350, 699, 1300], [0, 7, 900])]
)
def test_exchange_of_many_tiles_and_blocks_on_two_threads(
    layout: str, dtype: str, rows: list[int], cols: list[int]
) -> None:
    whole = np.arange(1300 * 900).reshape(1300, 900).astype(dtype)
    parts = parts_of(Distribution(layout, (1300, 900), (2, 2)), dtype, most=4)
    boxes = list(itertools.product(pairwise(rows), pairwise(cols)))

    def blocks(array: Any) -> list[ArrayBlock]:
        return [ArrayBlock(array[slice(*r), slice(*c)], (r[0], c[0])) for r, c in boxes]

    with ThreadPoolExecutor(2) as executor:
        copy_kernels.exchange(
            blocks(whole)[::-1], parts, into_parts=True, executor=executor, threads=2
        )
        for part in parts:
            assert np.array_equal(part.local, whole[np.ix_(*part.local_indices)])
        back = np.zeros_like(whole, order="F")
        copied = copy_kernels.exchange(
            blocks(back), parts, into_parts=False, executor=executor, threads=2
        )
    assert np.array_equal(back, whole)
    assert all(part.seconds > 0 for part in copied.values())
    assert sum(part.elements for part in copied.values()) == copies(layout, (2, 2)) * whole.size


def test_exchange_without_parts_or_elements() -> None:
    assert copy_kernels.exchange([ArrayBlock(np.zeros((3, 3)), (0, 0))], [], into_parts=True) == {}
    parts = parts_of(Distribution("VC_STAR", (3, 3), (1, 2)))
    copied = copy_kernels.exchange([ArrayBlock(np.zeros((0, 3)), (0, 0))], parts, into_parts=True)
    assert [copied[rank].elements for rank in (0, 1)] == [0, 0]
    assert (parts[0].local == -1).all()


def test_threads_are_cores_up_to_eight() -> None:
    assert 1 <= copy_kernels.default_threads() <= 8
