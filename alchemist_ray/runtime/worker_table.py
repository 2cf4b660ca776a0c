"""Host and process of each rank: sent when a client asks, because it grows with the ranks."""

from __future__ import annotations

from alchemist_ray.runtime.nodes import Nodes
from mpi_workers.wire.frames import Body


def table_of(nodes: Nodes) -> list[Body]:
    """The fields of a `WorkerInfo` for each rank, without its status."""
    return [
        {
            "rank": rank,
            "node_id": nodes.node_ids[about["node"]],
            "hostname": about["hostname"],
            "address": nodes.data[about["node"]].addresses[-1],
            "pid": about["pid"],
        }
        for rank, about in sorted(nodes.ranks.items())
    ]
