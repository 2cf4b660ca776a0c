"""Launchers with a part of the command line for each node: PALS, ALPS, Hydra.

``mpiexec OPTIONS PROGRAM : OPTIONS PROGRAM`` numbers the ranks part by part, so each node can have
any number of them. The launchers differ in the spelling only, which is configuration.
"""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Mapping
from dataclasses import dataclass

from alchemist_ray.errors import LaunchError
from alchemist_ray.launchers.base import (
    GangPlan,
    Launcher,
    NodePlan,
    Start,
    rank_program,
    rank_variables,
)
from mpi_workers.node.specs import ProxySpec


@dataclass(frozen=True, slots=True)
class Spelling:
    """The spelling of a launcher's command line.

    Attributes
    ----------
    name : str
        The value of ``launcher=``.
    variable : str
        Environment variable that names the program and its options.
    command : str
        The default of the variable.
    part : str
        Options of one node's part: ``{ranks}``, ``{host}`` and ``{threads}`` are replaced.
    advice : str
        Remedy if the ranks do not form one MPI world.
    """

    name: str
    variable: str
    command: str
    part: str
    advice: str

    def argv(self, nodes: tuple[NodePlan, ...], threads: int, env: Mapping[str, str]) -> list[str]:
        """Return the command line."""
        words = shlex.split(env.get(self.variable) or self.command)
        for number, node in enumerate(nodes):
            filled = self.part.format(ranks=node.ranks, host=node.name, threads=threads)
            words += [":"] * (number > 0) + [*shlex.split(filled), *rank_program(env)]
        return words


PALS = Spelling(
    name="pals",
    variable="ALCHEMIST_PALS",
    command="mpiexec --envall --line-buffer",
    part="-n {ranks} --ppn {ranks} --hosts {host} --depth {threads} --cpu-bind none",
    advice="PALS supports --pmi=cray (Cray MPICH, the default) or --pmi=pmix: set ALCHEMIST_PALS="
    "'mpiexec --envall --pmi=pmix', and LD_LIBRARY_PATH to the MPI that fits",
)
APRUN = Spelling(
    name="aprun",
    variable="ALCHEMIST_APRUN",
    command="aprun -q",
    part="-n {ranks} -N {ranks} -L {host} -d {threads} -cc none",
    advice="aprun starts Cray MPICH programs: add its ABI library to LD_LIBRARY_PATH "
    "(module load cray-mpich-abi)",
)
HYDRA = Spelling(
    name="hydra",
    variable="ALCHEMIST_HYDRA",
    command="mpiexec",
    part="-n {ranks} -host {host}",
    advice="Hydra serves PMI to MPICH and MPIs with its ABI: add one to LD_LIBRARY_PATH",
)


class MpmdLauncher(Launcher):
    """One command with a part for each node."""

    spelling: Spelling

    def specs(self, plan: GangPlan) -> list[ProxySpec]:
        spelling = self.spelling
        argv = spelling.argv(plan.nodes, plan.threads, self.env)
        if shutil.which(argv[0]) is None:
            raise LaunchError(
                f"launcher {self.name!r}: there is no program {argv[0]!r}; {spelling.variable} "
                "sets one, with its options. launcher='pmi' needs none"
            )
        start = Start(argv, rank_variables(self.env), advice=spelling.advice, across_nodes=True)
        return self._started(plan, start)


class PalsLauncher(MpmdLauncher):
    """For HPE machines with PBS and PALS."""

    name, spelling = "pals", PALS


class AprunLauncher(MpmdLauncher):
    """For Cray XC with ALPS."""

    name, spelling = "aprun", APRUN


class HydraLauncher(MpmdLauncher):
    """For MPICH's mpiexec on many nodes, by ssh or the batch system that it finds."""

    name, spelling = "hydra", HYDRA
