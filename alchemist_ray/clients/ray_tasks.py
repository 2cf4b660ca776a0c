"""Tasks of Dask and Ray Data on Ray: the CPU that they need, and how they fetch.

If gangs hold all CPUs, such tasks wait without a limit: `wait_for_cpu` raises an error instead.
"""

from __future__ import annotations

import time
from typing import Any

import ray
from numpy.typing import NDArray

from alchemist_ray.attached.matrix_ref import MatrixRef
from alchemist_ray.attached.registry import gang_of
from alchemist_ray.cluster.placement import Growth
from alchemist_ray.errors import ResourceError
from alchemist_ray.transfer import fetching

FREE_CPU_S = 30.0  # time limit
# Unused, the ranks' memory is unmapped: Ray's workers outlive gangs, and a mapping keeps its pages
# allocated, even those of a gang that has ended.
IDLE_S = 1.0


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


def fetch(handle: MatrixRef, rows: slice | None = None, cols: slice | None = None) -> NDArray[Any]:
    """Fetch a part of a matrix. Only the gang's owner keeps its memory mapped for longer."""
    connection = gang_of(handle)
    if not connection.owner:
        connection.nodes.idle_s = IDLE_S
    return fetching.fetch(connection, handle, rows, cols)
