"""Launchers, which start the ranks of a gang.

`pmi` (the default) forks the ranks from a fork server on every node and serves PMI itself. The
others use a site's launcher for the whole gang: `mpiexec` on one machine; `srun`, PALS' mpiexec,
`aprun` and `hydra` on the nodes that Ray has reserved.
"""

from __future__ import annotations

import os

from alchemist_ray.launchers.base import Launcher, PmiLauncher
from alchemist_ray.launchers.mpiexec import MpiexecLauncher
from alchemist_ray.launchers.mpmd import AprunLauncher, HydraLauncher, PalsLauncher
from alchemist_ray.launchers.srun import SrunLauncher

AUTO = "auto"
VARIABLE = "ALCHEMIST_LAUNCHER"  # set in jobs by the site file
LAUNCHERS: dict[str, type[Launcher]] = {
    kind.name: kind
    for kind in (
        PmiLauncher, MpiexecLauncher, SrunLauncher, PalsLauncher, AprunLauncher, HydraLauncher,
    )
}  # fmt: skip
SETTINGS = tuple(name for kind in LAUNCHERS.values() for name in kind.settings)


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
