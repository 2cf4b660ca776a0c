"""A rank is killed by the kernel's OOM killer; a resize has too little memory."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from alchemist_ray import AlchemistSession
from alchemist_ray.errors import GroupRecoveredError, ResourceError
from tests.faults.conftest import limited_gangs

LIMIT = 400 << 20  # 400 MiB: the processes of a gang with two ranks fit, a greedy rank does not


def greedy(comm, gib):
    if comm.rank == 1:
        np.ones(int(gib * (1 << 27)))
    comm.barrier()


@pytest.fixture
def limited(cluster: str) -> Iterator[None]:
    with limited_gangs(LIMIT):
        yield


@pytest.mark.cell("rank", "in a call", "private", "renewed")
def test_an_oom_kill_is_named_and_the_other_gang_unharmed(limited: None) -> None:
    with AlchemistSession(1) as neighbour, AlchemistSession(2) as als:
        A = als.send_matrix(np.arange(6.0))
        x = neighbour.send_matrix(np.arange(12.0).reshape(4, 3))
        with pytest.raises(GroupRecoveredError) as outcome:
            als.run(greedy, 2.0)
        assert "rank 1" in str(outcome.value)
        assert "OOM killer (signal 9): the memory limit" in str(outcome.value)
        assert f"({LIMIT} bytes)" in str(outcome.value)
        assert outcome.value.rank == 1
        assert als.run(lambda comm: comm.allreduce(1)) == 2
        np.testing.assert_array_equal(A.fetch(), np.arange(6.0))
        assert neighbour.run(lambda comm: comm.allreduce(1)) == 1
        np.testing.assert_array_equal(x.fetch(), np.arange(12.0).reshape(4, 3))


def test_a_resize_without_the_memory_for_both_is_refused(limited: None) -> None:
    with AlchemistSession(1) as als:
        A = als.send_matrix(np.ones((25, 1 << 20)))  # 200 MiB
        with pytest.raises(ResourceError, match=r"goes on with its 1 workers: .* left"):
            als.resize(2)
        assert A[:, :3].sum() == 75
        assert len(als.list_workers()) == 1
