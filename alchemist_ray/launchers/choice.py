"""The choice of a gang's launcher."""

from __future__ import annotations

import os

from alchemist_ray.launchers.base import Launcher
from alchemist_ray.launchers.mpiexec import VARIABLE as MPIEXEC
from alchemist_ray.launchers.mpiexec import MpiexecLauncher
from alchemist_ray.launchers.mpmd import (
    APRUN,
    HYDRA,
    PALS,
    AprunLauncher,
    HydraLauncher,
    PalsLauncher,
)
from alchemist_ray.launchers.pmi import PmiLauncher
from alchemist_ray.launchers.srun import COMMAND as SRUN
from alchemist_ray.launchers.srun import PMI as SRUN_PMI
from alchemist_ray.launchers.srun import SrunLauncher

AUTO = "auto"
VARIABLE = "ALCHEMIST_LAUNCHER"  # set in jobs by the site file
KINDS: tuple[type[Launcher], ...] = (
    PmiLauncher,
    MpiexecLauncher,
    SrunLauncher,
    PalsLauncher,
    AprunLauncher,
    HydraLauncher,
)
LAUNCHERS: dict[str, type[Launcher]] = {kind.name: kind for kind in KINDS}
SETTINGS = (MPIEXEC, SRUN, SRUN_PMI, *(style.variable for style in (PALS, APRUN, HYDRA)))


def settings() -> dict[str, str]:
    """Return this process's launcher settings, which override the manager's."""
    return {name: os.environ[name] for name in SETTINGS if name in os.environ}


def chosen(launcher: str) -> str:
    """Return the launcher's name; for ``"auto"`` the site's (`ALCHEMIST_LAUNCHER`), or pmi.

    Raises
    ------
    ValueError
        If the launcher does not exist.
    """
    asked, by = launcher, "launcher"
    if launcher == AUTO:
        asked, by = os.environ.get(VARIABLE) or PmiLauncher.name, VARIABLE
    if asked not in LAUNCHERS:
        raise ValueError(f"{by} must be one of {', '.join((AUTO, *LAUNCHERS))}; got {asked!r}")
    return asked
