"""Copies a matrix from the ranks of one gang to those of another, by the agents of their nodes.

The gang on fewer nodes does it, so that most elements cross the network once: twice only where both
have several nodes. Runs in the user's process or in a gateway, which see no element.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

import ray

from alchemist_ray.attached.connection import GangConnection
from alchemist_ray.cluster.node_jobs import CopyJob
from alchemist_ray.transfer.object_store import agent_of, answer_of, wait_for_jobs
from mpi_workers.data.description import NodeTimes, TransferTarget, add_times
from mpi_workers.data.transfers import Progress
from mpi_workers.matrix.layout import Shape
from mpi_workers.matrix.node_shares import Region

JOB_BYTES = 128 << 20  # 128 MiB: what is copied on after an error or Ctrl-C
WATCH_S = 0.05  # between looks at the two gangs


def copy_matrix(
    source: GangConnection,
    read: TransferTarget,
    target: GangConnection,
    written: TransferTarget,
    name: str,
    progress: Progress | None = None,
) -> dict[int, NodeTimes]:
    """Copy every element; the times by node.

    Parameters
    ----------
    source, target : GangConnection
    read, written : TransferTarget
        The matrix on each gang, of the same shape; that of `target` is not sealed.
    name : str
        Of the matrix that is read, for messages.
    progress : callable(nbytes), optional

    Raises
    ------
    Failure, AlchemistError
        If a node could not copy its part, or either gang was lost. No agent writes any more.
    """
    addresses = source.address, target.address
    gangs = addresses[0].incarnation, addresses[1].incarnation
    endpoints = source.endpoints, target.endpoints
    nodes = min(addresses, key=lambda address: len(address.nodes)).node_ids
    waiting = deque(_regions(read.distribution.shape, JOB_BYTES // read.dtype.itemsize))
    idle = deque(nodes)
    running: dict[Any, str] = {}  # nodes, by job
    total: dict[int, NodeTimes] = {}
    try:
        while waiting or running:
            while waiting and idle:
                job = CopyJob(gangs, endpoints, read, written, waiting.popleft(), name)
                node = idle.popleft()
                running[agent_of(node).run.remote(job, [])] = node
            done, _ = ray.wait(list(running), num_returns=1, timeout=WATCH_S, fetch_local=False)
            if not done:
                source.ping()
                target.ping()
            for ref in done:
                node = running.pop(ref)
                idle.append(node)
                times = answer_of(ref, node)
                add_times(total, times)
                if progress is not None:
                    progress(sum(each.nbytes for each in times.values()))
    finally:
        wait_for_jobs(running)
    return total


def _regions(shape: Shape, most: int) -> Iterator[Region]:
    """A matrix in parts of whole columns, which are contiguous on ranks, or of parts of one."""
    m, n = shape
    if m and n:
        for col0, col1, row0, row1 in Region(0, n, 0, m).parts(most):
            yield Region(row0, row1, col0, col1)
