"""A job in an image: the command of each container runtime that runs a program in it.

The keeper and the supervisors stay outside, with the batch system. Ray, the user's program and
(with a site's own launcher) the ranks run inside. All of them share the node's network,
/dev/shm and temporary folder, as without an image.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from string import Template

from alchemist_ray.deploy.slurm.sites import RUNTIMES, Site
from alchemist_ray.errors import JobError
from alchemist_ray.launchers.base import CONTAINER
from alchemist_ray.launchers.mpmd import AprunLauncher, PalsLauncher
from alchemist_ray.launchers.srun import COMMAND

IMAGE, OPTIONS = "{image}", "{options}"
PODMAN = (
    "run", "--rm", "--network=host", "--ipc=host", "--pid=host", "--userns=keep-id", "--env-host",
    "--security-opt=label=disable", "--volume={tmp}:{tmp}", "--volume=$HOME:$HOME", "--entrypoint=",
)  # fmt: skip
# Apptainer and Shifter mount the home directory and /dev by themselves, Charliecloud /dev.
RECIPES: dict[str, tuple[str, ...]] = {
    "shifter": ("shifter", "--image={image}", OPTIONS),
    "apptainer": ("apptainer", "exec", "--bind={tmp}", OPTIONS, IMAGE),
    "singularity": ("singularity", "exec", "--bind={tmp}", OPTIONS, IMAGE),
    "podman": ("podman", *PODMAN, OPTIONS, IMAGE),
    "podman-hpc": ("podman-hpc", *PODMAN, OPTIONS, IMAGE),
    "charliecloud": ("ch-run", "--home", "--bind={tmp}:{tmp}", OPTIONS, IMAGE, "--"),
}
# The image gets the caller's environment, but not its Python.
INSIDE = (
    "/usr/bin/env", "-u", "PYTHONPATH", "-u", "PYTHONHOME", "-u", "VIRTUAL_ENV",
    "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
)  # fmt: skip
PYTHON = "python3"
RELAY = f"{PYTHON} -m alchemist_ray.deploy.slurm.relay"
# Launchers outside the image: their variables and default commands.
OUTSIDE = {
    COMMAND: "srun",
    **{each.variable: each.command for each in (PalsLauncher, AprunLauncher)},
}


@dataclass(frozen=True, slots=True)
class Image:
    """An image and its runtime.

    Attributes
    ----------
    name : str
        In the runtime's notation: ``docker:me/it:1``, ``it.sif``, an unpacked folder.
    runtime : str
        One of `RECIPES`.
    options : tuple of str
        The site's options to the runtime.
    tmp : str
        The nodes' temporary folder, which has the same path inside.
    """

    name: str
    runtime: str
    options: tuple[str, ...] = ()
    tmp: str = "/tmp"

    def recipe(self) -> list[str]:
        """Return the command prefix, with variables (``$HOME``) not expanded."""
        words: list[str] = []
        for word in RECIPES[self.runtime]:
            if word == OPTIONS:
                words += self.options
            else:
                words.append(word.replace("{tmp}", self.tmp).replace("{image}", self.name))
        return words

    def words(self, env: Mapping[str, str]) -> list[str]:
        """Return the command prefix, expanded, without the host's Python in the environment.

        Raises
        ------
        JobError
            If a variable is not set.
        """
        try:
            filled = [Template(word).substitute(env) for word in self.recipe()]
        except (KeyError, ValueError) as error:
            raise JobError(
                f"{' '.join(self.recipe())}: {error.args[0]} is not set: see software.modules and "
                "container.options of the site file"
            ) from None
        return [*filled, *INSIDE]


def chosen(site: Site, name: str | None, runtime: str | None) -> Image | None:
    """Return the requested image with the site's runtime; None without an image.

    Raises
    ------
    JobError
        If no runtime is known.
    """
    if not name:
        return None
    known = [word for word in RUNTIMES if word]
    runs = runtime or site.container.runtime
    if runs not in known:
        problem = f"unknown container runtime {runs!r}"
        if not runs:
            problem = f"site {site.name} names no container runtime (container.runtime)"
        raise JobError(f"{problem}: --container-runtime takes {', '.join(known)}")
    # The options are those of the site's own runtime.
    options = site.container.options if runs == site.container.runtime else ()
    return Image(name, runs, options, site.nodes.tmp)


def variables(words: list[str], env: Mapping[str, str]) -> dict[str, str]:
    """Return variables by which gangs in the image use the launchers outside."""
    told = {CONTAINER: shlex.join(words)}
    for name, usual in OUTSIDE.items():
        command = env.get(name) or usual
        told[name] = command if command.startswith(RELAY) else f"{RELAY} {command}"
    return told
