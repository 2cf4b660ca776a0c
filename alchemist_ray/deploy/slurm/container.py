"""A job in an image: how each container runtime is asked to run a program in it.

The keeper and the supervisors stay outside, where the batch system is. What they start goes
through the words made here: Ray, the user's program and, with a site's own launcher, the ranks.
All of them share the node's network, /dev/shm and temporary folder, as they do without an image.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from string import Template

from alchemist_ray.deploy.slurm.sites import RUNTIMES, Site
from alchemist_ray.errors import JobError
from alchemist_ray.launchers.base import CONTAINER
from alchemist_ray.launchers.mpmd import APRUN, PALS
from alchemist_ray.launchers.srun import COMMAND

IMAGE, OPTIONS = "{image}", "{options}"
PODMAN = (
    "run", "--rm", "--network=host", "--ipc=host", "--pid=host", "--userns=keep-id", "--env-host",
    "--security-opt=label=disable", "--volume={tmp}:{tmp}", "--volume=$HOME:$HOME", "--entrypoint=",
)  # fmt: skip
# Apptainer and Shifter mount the home directory and /dev themselves, Charliecloud the latter.
RECIPES: dict[str, tuple[str, ...]] = {
    "shifter": ("shifter", "--image={image}", OPTIONS),
    "apptainer": ("apptainer", "exec", "--bind={tmp}", OPTIONS, IMAGE),
    "singularity": ("singularity", "exec", "--bind={tmp}", OPTIONS, IMAGE),
    "podman": ("podman", *PODMAN, OPTIONS, IMAGE),
    "podman-hpc": ("podman-hpc", *PODMAN, OPTIONS, IMAGE),
    "charliecloud": ("ch-run", "--home", "--bind={tmp}:{tmp}", OPTIONS, IMAGE, "--"),
}
# The caller's environment comes along, and its Python must not: only the image's is there.
INSIDE = (
    "/usr/bin/env", "-u", "PYTHONPATH", "-u", "PYTHONHOME", "-u", "VIRTUAL_ENV",
    "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
)  # fmt: skip
PYTHON = "python3"
RELAY = f"{PYTHON} -m alchemist_ray.deploy.slurm.relay"
# Launchers that are not in the image: their variables, and what they are where those are not set.
OUTSIDE = {COMMAND: "srun", PALS.variable: PALS.command, APRUN.variable: APRUN.command}


@dataclass(frozen=True, slots=True)
class Image:
    """An image, and what runs it.

    Attributes
    ----------
    name : str
        As the runtime takes it: ``docker:me/it:1``, ``it.sif``, an unpacked folder.
    runtime : str
        One of `RECIPES`.
    options : tuple of str
        The site's options to the runtime.
    tmp : str
        The nodes' temporary folder, which is seen inside under the same path.
    """

    name: str
    runtime: str
    options: tuple[str, ...] = ()
    tmp: str = "/tmp"

    def recipe(self) -> list[str]:
        """The words before a command, with variables (``$HOME``) that are not filled in yet."""
        words: list[str] = []
        for word in RECIPES[self.runtime]:
            if word == OPTIONS:
                words += self.options
            else:
                words.append(word.replace("{tmp}", self.tmp).replace("{image}", self.name))
        return words

    def words(self, env: Mapping[str, str]) -> list[str]:
        """The words before a command, filled in, and what keeps the host's Python out of it.

        Raises
        ------
        JobError
            If they name a variable that is not set.
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
    """The image that is asked for, run as the site says; None if none is.

    Raises
    ------
    JobError
        If nothing says how it is run.
    """
    if not name:
        return None
    known = [word for word in RUNTIMES if word]
    runs = runtime or site.container.runtime
    if runs not in known:
        told = f"{runs!r} is none" if runs else f"site {site.name} (container.runtime) names none"
        raise JobError(
            f"an image needs a container runtime, and {told}: --container-runtime takes "
            f"{', '.join(known)}"
        )
    # The options are for the site's own runtime, and another does not know them.
    options = site.container.options if runs == site.container.runtime else ()
    return Image(name, runs, options, site.nodes.tmp)


def variables(words: list[str], env: Mapping[str, str]) -> dict[str, str]:
    """What launchers of gangs inside the image have to know; the machine's are only outside."""
    told = {CONTAINER: shlex.join(words)}
    for name, usual in OUTSIDE.items():
        command = env.get(name) or usual
        told[name] = command if command.startswith(RELAY) else f"{RELAY} {command}"
    return told
