"""Tasks of Dask and Ray Data, where gangs hold all CPUs."""

from __future__ import annotations

import pytest
import ray

from alchemist_ray import AlchemistSession
from alchemist_ray.clients import ray_tasks
from alchemist_ray.errors import ResourceError
from alchemist_ray.runtime.cluster.autoscaling import VARIABLE


def test_tasks_wait_for_nodes_of_an_autoscaler(
    als: AlchemistSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_tasks, "FREE_CPU_S", 0.3)
    cpus = int(ray.cluster_resources()["CPU"])
    with AlchemistSession(cpus - len(als.list_workers())):
        monkeypatch.setenv(VARIABLE, f"2x{cpus}")
        ray_tasks.wait_for_cpu("Ray Data", "materialize")
        monkeypatch.setenv(VARIABLE, f"1x{cpus}")  # it has grown to that
        with pytest.raises(ResourceError, match="Ray Data needs a CPU"):
            ray_tasks.wait_for_cpu("Ray Data", "materialize")
