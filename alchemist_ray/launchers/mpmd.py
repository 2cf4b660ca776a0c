"""Launchers with a part of the command line for each node: PALS, ALPS, Hydra.

``mpiexec OPTIONS PROGRAM : OPTIONS PROGRAM`` numbers the ranks part by part, so each node can have
any number of them. The launchers differ in the spelling only.
"""

from __future__ import annotations

import shlex
import shutil

from alchemist_ray.errors import LaunchError
from alchemist_ray.launchers.base import Launcher
from mpi_workers.node.specs import GangPlan, Start


class MpmdLauncher(Launcher):
    """One command with a part for each node.

    Attributes
    ----------
    variable : str
        Environment variable that names the program and its options.
    command : str
        The default of the variable.
    part : str
        Options of one node's part: ``{ranks}``, ``{host}`` and ``{threads}`` are replaced.
    advice : str
        Remedy if the ranks do not form one MPI world.
    """

    variable: str
    command: str
    part: str
    advice: str

    def __init_subclass__(cls) -> None:
        cls.settings = (cls.variable,)

    def start(self, plan: GangPlan) -> Start:
        argv = shlex.split(self.env.get(self.variable) or self.command)
        if shutil.which(argv[0]) is None:
            raise LaunchError(
                f"launcher {self.name!r}: there is no program {argv[0]!r}; {self.variable} "
                "sets one, with its options. launcher='pmi' needs none"
            )
        for number, node in enumerate(plan.nodes):
            part = self.part.format(ranks=node.ranks, host=node.name, threads=plan.options.threads)
            argv += [":"] * (number > 0) + [*shlex.split(part), *self.rank_program()]
        return Start(argv, self.rank_variables(), advice=self.advice, across_nodes=True)


class PalsLauncher(MpmdLauncher):
    """For HPE machines with PBS and PALS."""

    name = "pals"
    variable = "ALCHEMIST_PALS"
    command = "mpiexec --envall --line-buffer"
    part = "-n {ranks} --ppn {ranks} --hosts {host} --depth {threads} --cpu-bind none"
    advice = (
        "PALS supports --pmi=cray (Cray MPICH, the default) or --pmi=pmix: set ALCHEMIST_PALS="
        "'mpiexec --envall --pmi=pmix', and LD_LIBRARY_PATH to the MPI that fits"
    )


class AprunLauncher(MpmdLauncher):
    """For Cray XC with ALPS."""

    name = "aprun"
    variable = "ALCHEMIST_APRUN"
    command = "aprun -q"
    part = "-n {ranks} -N {ranks} -L {host} -d {threads} -cc none"
    advice = (
        "aprun starts Cray MPICH programs: add its ABI library to LD_LIBRARY_PATH "
        "(module load cray-mpich-abi)"
    )


class HydraLauncher(MpmdLauncher):
    """For MPICH's mpiexec on many nodes, by ssh or the batch system that it finds."""

    name = "hydra"
    variable = "ALCHEMIST_HYDRA"
    command = "mpiexec"
    part = "-n {ranks} -host {host}"
    advice = "Hydra serves PMI to MPICH and MPIs with its ABI: add one to LD_LIBRARY_PATH"
