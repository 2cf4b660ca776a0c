"""The interface of launchers, and the launcher that needs no command."""

from __future__ import annotations

import os
import shlex
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

from mpi_workers.node.specs import RANK_PROGRAM, GangPlan, Start

CONTAINER = "ALCHEMIST_CONTAINER"  # in a job's image: the command prefix that runs a program in it
# A runtime may give each rank a user namespace of its own. MPI cannot read the memory of another
# rank (CMA) then. MPICH's variable for it, and Cray's.
NO_CMA = {"MPIR_CVAR_CH4_CMA_ENABLE": "0", "MPICH_SMP_SINGLE_COPY_MODE": "NONE"}


class Launcher(ABC):
    """How the ranks of a gang start.

    Parameters
    ----------
    env : mapping, optional
        The environment with the launcher's settings. Default: this process's.

    Attributes
    ----------
    name : str
        The value of ``launcher=``.
    settings : tuple of str
        Environment variables that it reads.
    """

    name: str
    settings: tuple[str, ...] = ()

    def __init__(self, env: Mapping[str, str] | None = None) -> None:
        self.env: Mapping[str, str] = os.environ if env is None else env

    @abstractmethod
    def start(self, plan: GangPlan) -> Start | None:
        """Return the command that starts the ranks; None: the proxies fork them.

        Raises
        ------
        LaunchError
            If this launcher cannot start such a gang; the message names one that can.
        """

    def order(self, names: Sequence[str]) -> list[int]:
        """Return the order in which this launcher numbers the nodes' ranks."""
        return list(range(len(names)))

    def rank_program(self) -> list[str]:
        """Return the command of a rank, also for a launcher outside the job's image."""
        return [*shlex.split(self.env.get(CONTAINER, "")), RANK_PROGRAM]

    def rank_variables(self) -> dict[str, str]:
        """Return variables that ranks in an image need, unless they are set."""
        inside = CONTAINER in self.env
        return {k: v for k, v in NO_CMA.items() if inside and k not in self.env}


class PmiLauncher(Launcher):
    """The default: each node's fork server starts the ranks, and its proxy serves PMI.

    For MPICH (the pip wheel) and its ABI relatives, on any number of nodes.
    """

    name = "pmi"

    def start(self, plan: GangPlan) -> Start | None:
        return None
