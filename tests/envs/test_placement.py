"""Gangs on nodes that the config chooses by labels and resources."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest
import ray

from alchemist_ray.errors import ResourceError
from envs import EnvConfigError, GangLostError
from tests.envs.test_faults import pids
from tests.support import traces

MEMORY = 100 << 20


def free(name: str) -> float:
    return float(ray.available_resources().get(name, 0.0))


def test_ranks_go_to_nodes_with_labels_and_take_resources(make: Any) -> None:
    node = ray.nodes()[0]["NodeID"]
    before = free("memory")
    env = make(
        num_workers=2,
        placement={"labels": {"ray.io/node-id": node}, "resources": {"memory": MEMORY}},
    )
    env.reset(seed=1)
    assert env.step([0.5])[4]["ranks"] == 2.0
    wanted = before - 2 * MEMORY
    assert traces.wait_until(lambda: free("memory") <= wanted, 10.0, 0.2) is not None
    os.kill(pids(env)[1], signal.SIGKILL)
    with pytest.raises(GangLostError):
        [env.step([0.5]) for _ in range(9)]
    env.reset(seed=1)
    env.step([0.5])
    env.close()
    assert traces.wait_until(lambda: free("memory") == before, 20.0, 0.2) is not None
    assert traces.wait_until(lambda: free("CPU") == 8.0, 20.0, 0.2) is not None


def test_labels_that_no_node_has_are_named(make: Any) -> None:
    said = r"(?s)not enough free CPUs.*'zone': 'nowhere'"
    with traces.within(30.0), pytest.raises(ResourceError, match=said):
        make(placement={"labels": {"zone": "nowhere"}}, start_timeout_s=2).reset()
    for wrong in ({}, {"label": {}}, {"labels": "zone"}):
        with pytest.raises(EnvConfigError, match="'labels'"):
            make(placement=wrong)
