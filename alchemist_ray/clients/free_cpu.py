"""A check before tasks of Dask and Ray Data, which wait without a limit for CPUs of gangs."""

from __future__ import annotations

import time

import ray

from alchemist_ray.errors import ResourceError
from alchemist_ray.runtime.cluster.placement import Growth

FREE_CPU_S = 30.0  # time limit


def wait_for_cpu(system: str, ready: str) -> None:
    """Wait for a free CPU in the cluster, unless an autoscaler will add some for tasks that wait.

    Parameters
    ----------
    system : str
        That has tasks to run.
    ready : str
        The method that computes its data, for the message.

    Raises
    ------
    ResourceError
        After `FREE_CPU_S`.
    """
    deadline = time.monotonic() + FREE_CPU_S
    growth = Growth.here()
    while ray.available_resources().get("CPU", 0.0) < 1:
        total = ray.cluster_resources().get("CPU", 0)
        if growth is not None and growth.nodes * growth.cpus > total:
            return
        if time.monotonic() > deadline:
            raise ResourceError(
                f"{system} needs a CPU to compute the data, and all {total:g} of the cluster are "
                f"in use: request fewer workers, or call {ready}() before starting the gang"
            )
        time.sleep(0.2)
