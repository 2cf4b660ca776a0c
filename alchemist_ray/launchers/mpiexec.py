"""The launcher for a site's own mpiexec: any MPI, one machine."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

from alchemist_ray.errors import LaunchError
from alchemist_ray.launchers.base import Launcher
from mpi_workers.node.specs import RANK_PROGRAM, GangPlan, Start

VARIABLE = "ALCHEMIST_MPIEXEC"
# MPICH's gforker forks ranks and opens no port. Hydra, the usual mpiexec, listens for its proxies
# on all interfaces, whatever -iface, -localhost or -launcher say, and asks them for no token.
PROGRAMS = ("mpiexec.gforker", "mpiexec")


def find_mpiexec(env: Mapping[str, str] = os.environ) -> list[str]:
    """Return the command that starts ranks: `ALCHEMIST_MPIEXEC`, the wheel's, or that on PATH.

    Raises
    ------
    LaunchError
        If there is no mpiexec.
    """
    given = env.get(VARIABLE)
    if given:
        argv = shlex.split(given)
        if shutil.which(argv[0]) is None:
            raise LaunchError(f"{VARIABLE}={given!r}: there is no program {argv[0]!r}")
        return argv
    installed = [Path(sys.executable).parent / name for name in PROGRAMS]
    found = next((str(path) for path in installed if path.is_file()), shutil.which("mpiexec"))
    if found is None:
        raise LaunchError(
            f"no mpiexec was found in {VARIABLE}, next to {sys.executable} or on PATH; "
            "`pip install mpich` installs one"
        )
    return [found]


class MpiexecLauncher(Launcher):
    """For an MPI with a private PMI. It starts more slowly: no process is warm."""

    name = "mpiexec"
    settings = (VARIABLE,)

    def start(self, plan: GangPlan) -> Start:
        if len(plan.nodes) != 1:
            raise LaunchError(
                f"launcher 'mpiexec' works on one machine, but the {plan.size} workers are on "
                f"{len(plan.nodes)} nodes: ask for fewer workers, or use launcher='pmi' "
                "('srun' and 'hydra' start ranks on many nodes too)"
            )
        return Start([*find_mpiexec(self.env), "-n", str(plan.size), RANK_PROGRAM])
