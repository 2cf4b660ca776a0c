"""Blocks one below the other travel to another node as one array."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from mpi_workers.data.node_connections import NodeConnections
from mpi_workers.data.streams import RowStack, Step, stacked
from mpi_workers.matrix.node_shares import Region
from mpi_workers.wire.blocking import Connection
from mpi_workers.wire.frames import Kind
from tests.mpi_workers.transfers import SINGLE, Array, fetch, numbers, sealed
from tests.support import ranks as support

Block = tuple[Array, tuple[int, int]]


def cut(array: Array, heights: list[int], col0: int = 0) -> list[Block]:
    """Copies of its rows, as many in each block as given in turn."""
    ends = itertools.accumulate(itertools.cycle(heights))
    edges = [0, *itertools.takewhile(lambda end: end < len(array), ends), len(array)]
    return [(array[a:b].copy(), (a, col0)) for a, b in itertools.pairwise(edges)]


@pytest.mark.parametrize("heights", [[3, 1, 7], [90, 10, 60]])  # copied together; sent in place
@pytest.mark.parametrize("name", SINGLE)
def test_elements_of_many_blocks_arrive_at_their_place(
    host: support.Host, gangs: dict[str, NodeConnections], name: str, heights: list[int]
) -> None:
    array = numbers((701, 1000))  # 5.6 MB: more than a piece of a stream
    blocks = cut(array[:, :900], heights) + cut(array[:, 900:], [300], 900)
    blocks[2] = np.asfortranarray(blocks[2][0]), blocks[2][1]
    blocks[4] = blocks[4][0].astype("int16"), blocks[4][1]
    with sealed(host, gangs["far"], array, name, blocks=blocks[::-1]) as target:
        assert np.array_equal(fetch(gangs["far"], target), array)


def test_many_blocks_are_few_frames(
    host: support.Host, gangs: dict[str, NodeConnections], monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[Kind] = []
    begin = Connection.begin

    def noted(self: Connection, kind: Kind, *rest: Any) -> None:
        begun.append(kind)
        begin(self, kind, *rest)

    monkeypatch.setattr(Connection, "begin", noted)
    array = numbers((4000, 1000))  # 32 MB: in two streams to each of two nodes
    with sealed(host, gangs["far"], array, blocks=cut(array, [20])) as target:
        assert begun.count(Kind.PUT) == 4
        assert np.array_equal(fetch(gangs["far"], target), array)


def test_a_stack_is_cut_like_its_array() -> None:
    array = numbers((20, 6))
    parts = [block for block, _ in cut(array, [3, 5, 1])]
    for start, stop in ((0, 20), (2, 9), (3, 8), (8, 9), (17, 20)):
        part = RowStack(parts)[start:stop, :]
        assert np.array_equal(np.concatenate(part.arrays), array[start:stop])
        assert part.shape == (stop - start, 6)
        assert part.nbytes == array[start:stop].nbytes


def test_blocks_that_do_not_follow_each_other_stay_apart() -> None:
    a, b, c = np.zeros((2, 4)), np.zeros((3, 4)), np.zeros((1, 4), "f4")
    steps = [
        Step(b, Region(5, 8, 0, 4)),
        Step(a, Region(3, 5, 0, 4)),
        Step(a, Region(0, 2, 0, 4)),  # rows 2 and 3 are missing
        Step(c, Region(8, 9, 0, 4)),  # of another dtype
        Step(a, Region(5, 7, 4, 8)),
    ]
    found = sorted(stacked(steps, np.dtype("f8")), key=lambda step: step.region[::-1])
    assert [step.region for step in found] == [
        Region(0, 2, 0, 4), Region(3, 8, 0, 4), Region(8, 9, 0, 4), Region(5, 7, 4, 8)
    ]  # fmt: skip
    assert isinstance(found[1].array, RowStack)
