"""What every launcher is given, and what it must say."""

from __future__ import annotations

import uuid
from abc import ABC, abstractmethod
from dataclasses import dataclass, field

from mpi_workers.specs import ProxySpec


@dataclass(frozen=True, slots=True)
class NodePlan:
    """A node's part of a gang."""

    node_id: str
    ip: str
    ranks: int


@dataclass(frozen=True, slots=True)
class GangPlan:
    """A gang before it is launched: which nodes, how many ranks on each, in rank order."""

    gang: str
    nodes: tuple[NodePlan, ...]
    threads: int
    token: str = field(repr=False)
    manager: tuple[str, ...]
    keep_bytes: int

    @property
    def size(self) -> int:
        return sum(node.ranks for node in self.nodes)


class Launcher(ABC):
    """Turns a plan into what each node's proxy has to do."""

    name: str

    @abstractmethod
    def specs(self, plan: GangPlan) -> list[ProxySpec]:
        """One spec per node of the plan, in order.

        Raises
        ------
        LaunchError
            If this launcher cannot start such a gang; says which can.
        """

    def _spec(self, plan: GangPlan, node: int, kvs_name: str, argv: list[str] | None) -> ProxySpec:
        return ProxySpec(
            gang=plan.gang,
            manager=list(plan.manager),
            token=plan.token,
            node=node,
            counts=[n.ranks for n in plan.nodes],
            host=plan.nodes[node].ip,
            kvs_name=kvs_name,
            threads=plan.threads,
            keep_bytes=plan.keep_bytes,
            mpiexec=argv,
        )


def unique_kvs_name() -> str:
    """MPICH derives shared memory names from it: a reused one meets a stale segment."""
    return f"alchemist_{uuid.uuid4().hex[:20]}"
