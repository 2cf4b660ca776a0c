"""Objects are located on their node; small local objects stay open until they are sent."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import ray

from alchemist_ray import AlchemistSession
from alchemist_ray.cluster.node_jobs import ArrayDecoder, OpenBlock
from alchemist_ray.transfer import object_store
from tests.support import traces

SHAPES = [(2, 3), (200, 1000), (1, 7)]
LABELS = ["a", "b", "c"]


@pytest.fixture
def refs(session: AlchemistSession) -> list[Any]:
    return [ray.put(np.full(shape, i)) for i, shape in enumerate(SHAPES)]


def test_small_objects_here_stay_open(refs: list[Any]) -> None:
    looked = object_store.inspect_objects(refs, LABELS, ArrayDecoder())
    assert [about for about, _ in looked] == [(shape, "<i8") for shape in SHAPES]
    for i, (_, source) in enumerate(looked):
        assert isinstance(source, OpenBlock)
        np.testing.assert_array_equal(source.arrays[0], np.full(SHAPES[i], i))


def test_larger_ones_do_not(refs: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(object_store, "OWN_BYTES", 1_000_000)
    looked = object_store.inspect_objects(refs, LABELS, ArrayDecoder())
    assert looked == [((shape, "<i8"), ref) for shape, ref in zip(SHAPES, refs, strict=True)]


def test_remote_objects_are_located_on_their_node(refs: list[Any], by_agents: None) -> None:
    looked = object_store.inspect_objects([refs[1], refs[0], refs[1]], LABELS, ArrayDecoder())
    assert looked == [((SHAPES[i], "<i8"), refs[i]) for i in (1, 0, 1)]


def test_sent_objects_are_freed_in_the_store(session: AlchemistSession) -> None:
    before = in_store()
    blocks = [(ray.put(np.full((1000, 4000), i)), 1000 * i, 0) for i in range(2)]  # 64 MB
    assert traces.wait_until(lambda: in_store() > before + 60e6, 20.0) is not None
    handle = session.send_matrix(blocks)
    del blocks
    assert traces.wait_until(lambda: in_store() < before + 1e6, 20.0) is not None
    assert handle.fetch(1999, 0) == 1


def in_store() -> float:
    total, free = ray.cluster_resources(), ray.available_resources()
    return total["object_store_memory"] - free.get("object_store_memory", 0.0)
