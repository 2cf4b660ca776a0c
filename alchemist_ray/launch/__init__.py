"""How the ranks of a gang are started: one small interface, a file per way.

`pmi` (the default) forks the ranks from a warm process on every node and speaks
PMI with them itself. `mpiexec` hands the whole job to a site's own launcher, on
one machine.
"""

from alchemist_ray.launch.base import GangPlan, Launcher, NodePlan
from alchemist_ray.launch.mpiexec import MpiexecLauncher
from alchemist_ray.launch.pmi import PmiLauncher

LAUNCHERS: dict[str, type[Launcher]] = {"pmi": PmiLauncher, "mpiexec": MpiexecLauncher}

__all__ = ["LAUNCHERS", "GangPlan", "Launcher", "MpiexecLauncher", "NodePlan", "PmiLauncher"]
