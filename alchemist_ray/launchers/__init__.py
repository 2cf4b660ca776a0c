"""Launchers, which start the ranks of a gang.

`pmi` (the default) forks the ranks from a fork server on every node and serves PMI itself. The
others use a site's launcher for the whole gang: `mpiexec` on one machine; `srun`, PALS' mpiexec,
`aprun` and `hydra` on the nodes that Ray has reserved.
"""

from alchemist_ray.launchers.base import GangPlan, Launcher, NodePlan
from alchemist_ray.launchers.choice import AUTO, LAUNCHERS, chosen, settings
from alchemist_ray.launchers.mpiexec import MpiexecLauncher
from alchemist_ray.launchers.pmi import PmiLauncher
from alchemist_ray.launchers.srun import SrunLauncher

__all__ = [
    "AUTO",
    "LAUNCHERS",
    "GangPlan",
    "Launcher",
    "MpiexecLauncher",
    "NodePlan",
    "PmiLauncher",
    "SrunLauncher",
    "chosen",
    "settings",
]
