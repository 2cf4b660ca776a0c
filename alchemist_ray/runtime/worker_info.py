"""WorkerInfo: what a session knows about a rank."""

from __future__ import annotations

from dataclasses import dataclass

from alchemist_ray.gang.connection import GangConnection


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """A rank of a gang: where it runs, and whether it is idle or busy."""

    rank: int
    node_id: str
    hostname: str
    address: str
    pid: int
    status: str


def workers_of(connection: GangConnection) -> list[WorkerInfo]:
    """The ranks of a gang. Raises what ended it."""
    status = "busy" if connection.request({"op": "ping", "wait": True})["busy"] else "idle"
    nodes = connection.address.nodes
    return [
        WorkerInfo(
            rank=about["rank"],
            node_id=about["node_id"],
            hostname=about["hostname"],
            address=nodes[about["node"]].addresses[-1],
            pid=about["pid"],
            status=status,
        )
        for about in connection.address.workers
    ]
