"""A rank is killed by the kernel's OOM killer; a resize has too little memory."""

from __future__ import annotations

import contextlib
import os
import uuid
from collections.abc import Iterator

import numpy as np
import pytest
import ray

from alchemist_ray import AlchemistSession
from alchemist_ray.errors import GroupFailedError, ResourceError
from alchemist_ray.runtime.cluster.actors import NAMESPACE, agent_name, edition
from mpi_workers.matrix.available_memory import MemoryCgroup
from tests.support import traces

LIMIT = 400 << 20  # 400 MiB: the processes of a gang with two ranks fit, a greedy rank does not


def greedy(comm, gib):
    if comm.rank == 1:
        np.ones(int(gib * (1 << 27)))
    comm.barrier()


@pytest.fixture
def limited(cluster: str) -> Iterator[int]:
    """Put the fork server of this node, and all processes it forks, in a memory cgroup."""
    found = MemoryCgroup.find()
    if found is None or os.getuid() != 0:
        pytest.skip("a memory cgroup can only be made by root, where there is a controller")
    above, limit_file = found.folder, found.names.limit
    folder = above / f"alchemist-test-{uuid.uuid4().hex[:8]}"
    with AlchemistSession(1):  # starts the agent
        name = agent_name(edition(), ray.get_runtime_context().get_node_id())
        fork_server: int = ray.get(ray.get_actor(name, namespace=NAMESPACE).pids.remote())[
            "fork-server"
        ]
    try:
        folder.mkdir()
        (folder / limit_file).write_text(f"{LIMIT}\n")
        (folder / "cgroup.procs").write_text(f"{fork_server}\n")
    except OSError as error:
        with contextlib.suppress(OSError):
            folder.rmdir()
        pytest.skip(f"no memory cgroup can be made here: {error}")
    yield fork_server
    (above / "cgroup.procs").write_text(f"{fork_server}\n")
    traces.wait_until(lambda: not (folder / "cgroup.procs").read_text(), 5.0, 0.05)
    folder.rmdir()


@pytest.mark.cell("rank", "in a call", "private", "lost")
def test_an_oom_kill_is_named_and_the_other_gang_unharmed(limited: int) -> None:
    with AlchemistSession(1) as neighbour, AlchemistSession(2) as als:
        x = neighbour.send_matrix(np.arange(12.0).reshape(4, 3))
        with pytest.raises(GroupFailedError) as outcome:
            als.run(greedy, 2.0)
        assert "rank 1" in str(outcome.value)
        assert "OOM killer (signal 9): the memory limit" in str(outcome.value)
        assert f"({LIMIT} bytes)" in str(outcome.value)
        assert outcome.value.rank == 1
        assert neighbour.run(lambda comm: comm.allreduce(1)) == 1
        np.testing.assert_array_equal(x.fetch(), np.arange(12.0).reshape(4, 3))


def test_a_resize_without_the_memory_for_both_is_refused(limited: int) -> None:
    with AlchemistSession(1) as als:
        A = als.send_matrix(np.ones((25, 1 << 20)))  # 200 MiB
        with pytest.raises(ResourceError, match=r"goes on with its 1 workers: .* left"):
            als.resize(2)
        assert A[:, :3].sum() == 75
        assert len(als.list_workers()) == 1
