"""The second launcher: a site's own mpiexec, for any MPI, on one machine."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

from alchemist_ray.errors import LaunchError
from alchemist_ray.launchers.base import GangPlan, Launcher, Start
from mpi_workers.node.specs import RANK_PROGRAM, ProxySpec

VARIABLE = "ALCHEMIST_MPIEXEC"


def find_mpiexec(env: Mapping[str, str] = os.environ) -> list[str]:
    """The command that starts ranks: `ALCHEMIST_MPIEXEC`, else the wheel's, else the path's.

    Raises
    ------
    LaunchError
        If there is none; says where was looked.
    """
    given = env.get(VARIABLE)
    if given:
        argv = shlex.split(given)
        if shutil.which(argv[0]) is None:
            raise LaunchError(f"{VARIABLE}={given!r}: there is no program {argv[0]!r}")
        return argv
    beside = Path(sys.executable).parent / "mpiexec"
    found = str(beside) if beside.is_file() else shutil.which("mpiexec")
    if found is None:
        raise LaunchError(
            f"no mpiexec: looked at {VARIABLE}, beside {sys.executable} and on PATH; "
            "`pip install mpich` brings one"
        )
    return [found]


class MpiexecLauncher(Launcher):
    """For an MPI whose PMI is its own secret. Slower to start: nothing is warm."""

    name = "mpiexec"

    def specs(self, plan: GangPlan) -> list[ProxySpec]:
        if len(plan.nodes) != 1:
            raise LaunchError(
                f"launcher 'mpiexec' works on one machine and the {plan.size} workers would lie on "
                f"{len(plan.nodes)}: ask for fewer workers, or use launcher='pmi' "
                "('srun' and 'hydra' start ranks on many nodes too)"
            )
        argv = [*find_mpiexec(self.env), "-n", str(plan.size), RANK_PROGRAM]
        return self._started(plan, Start(argv))
