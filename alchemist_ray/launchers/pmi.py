"""The default launcher: each node's fork server starts the ranks; its proxy serves PMI."""

from __future__ import annotations

from alchemist_ray.launchers.base import GangPlan, Launcher, unique_kvs_name
from mpi_workers.node.specs import ProxySpec


class PmiLauncher(Launcher):
    """For MPICH (the pip wheel) and its ABI relatives, on any number of nodes."""

    name = "pmi"

    def specs(self, plan: GangPlan) -> list[ProxySpec]:
        kvs_name = unique_kvs_name()
        return [self._spec(plan, node, kvs_name, None) for node in range(len(plan.nodes))]
