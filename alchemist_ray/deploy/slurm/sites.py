"""Site files: the differences between machines, a small TOML file for each; jobs in an image.

Shipped files are in ``cray/sites``, a user's own in ``~/.alchemist/sites`` or anywhere by path.
Values may contain environment variables (``$SCRATCH``), which the job's shell expands.

In a job with an image, the keeper and the supervisors stay outside, with the batch system. Ray, the
user's program and (with a site's own launcher) the ranks run inside. All of them share the node's
network, /dev/shm and temporary folder, as without an image.
"""

from __future__ import annotations

import os
import re
import shlex
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from string import Template
from typing import Any, get_type_hints

from alchemist_ray.arguments import near
from alchemist_ray.errors import JobError, SiteError
from alchemist_ray.launchers import AUTO, LAUNCHERS
from alchemist_ray.launchers.base import CONTAINER
from alchemist_ray.launchers.mpmd import AprunLauncher, PalsLauncher
from alchemist_ray.launchers.srun import COMMAND

SHIPPED = Path(__file__).resolve().parents[3] / "cray" / "sites"
OWN = Path("~/.alchemist/sites")
VARIABLE = "ALCHEMIST_SITE"
DEFAULT = "generic-slurm"
SHARED = ("warn", "refuse", "allow")
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
FAMILIES = {"singularity": "apptainer"}  # one program under two names: the same options and paths
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
class Job:
    """How jobs are submitted.

    Attributes
    ----------
    options : tuple of str
        Options of sbatch or qsub for every job.
    nodes : str
        PBS only: the resource request; ``{nodes}`` and ``{cpus}`` are replaced.
    spare_s : int
        Seconds before the time limit at which a job gets SIGTERM.
    """

    options: tuple[str, ...] = ()
    nodes: str = "nodes={nodes}:ppn={cpus}"
    spare_s: int = 60


@dataclass(frozen=True, slots=True)
class Software:
    """Environment modules to load, then lines of shell to run, before anything else."""

    modules: tuple[str, ...] = ()
    setup: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Nodes:
    """The nodes.

    Attributes
    ----------
    interface : tuple of str
        Names or patterns (``hsn0``, ``ib*``) of the network interface between nodes, best first.
        Empty: the interface that leads to the job's first node.
    tmp : str
        A folder on the node's own disk, for sockets and logs; its path must be short.
    object_store : float
        Share of the job's memory on a node for Ray's object store.
    start : str
        PBS without Slurm: the command that runs a program once on every node of the job.
    shared : {"warn", "refuse", "allow"}
        Policy for jobs of several nodes on nodes that other users' jobs may share: they can
        reach the ports of MPI.
    metrics : bool
        Whether Ray's metrics ports are open. They require no token.
    """

    interface: tuple[str, ...] = ()
    tmp: str = "/tmp"
    object_store: float = 0.2
    start: str = "pbsdsh -u --"
    shared: str = "warn"
    metrics: bool = False


@dataclass(frozen=True, slots=True)
class Mpi:
    """The launcher and the MPI of the ranks.

    Attributes
    ----------
    launcher : str
        The default of ``AlchemistSession(launcher=...)`` in jobs.
    pmi : str
        Value of srun's ``--mpi``.
    command : str
        The launcher's program and options (``srun --network=...``).
    library : str
        The vendor's libmpi.so.12 (MPICH's ABI) for the ranks; empty: the wheel's.
    scalapack : str
        The library with ScaLAPACK's symbols (Cray: LibSci).
    """

    launcher: str = "pmi"
    pmi: str = "pmi2"
    command: str = ""
    library: str = ""
    scalapack: str = ""


@dataclass(frozen=True, slots=True)
class Container:
    """How images are run.

    Attributes
    ----------
    runtime : str
        One of `RECIPES`.
    options : tuple of str
        Options of the runtime, such as further folders to bind.
    library : str
        Path of the vendor's libmpi.so.12 inside the image; empty: the image's own MPI.
    """

    runtime: str = ""
    options: tuple[str, ...] = ()
    library: str = ""


@dataclass(frozen=True, slots=True)
class Site:
    """One machine. The attributes are the tables of the file."""

    name: str
    about: str = ""
    job: Job = field(default_factory=Job)
    software: Software = field(default_factory=Software)
    environment: Mapping[str, str] = field(default_factory=dict)
    nodes: Nodes = field(default_factory=Nodes)
    mpi: Mpi = field(default_factory=Mpi)
    container: Container = field(default_factory=Container)


def names() -> list[str]:
    """Return the names of all known sites."""
    return sorted({path.stem for folder in _folders() for path in folder.glob("*.toml")})


def _folders() -> tuple[Path, Path]:
    """The user's own site files come first."""
    return OWN.expanduser(), SHIPPED


def find(name: str | None = None) -> Path:
    """Return the file of a site, by name or path. None: `ALCHEMIST_SITE`, or the generic site.

    Raises
    ------
    SiteError
        If the file does not exist.
    """
    wanted = name or os.environ.get(VARIABLE) or DEFAULT
    if wanted.endswith(".toml"):
        path = Path(wanted).expanduser().absolute()
        if not path.is_file():
            raise SiteError(f"there is no site file {path}")
        return path
    for folder in _folders():
        if (path := folder / f"{wanted}.toml").is_file():
            return path
    raise SiteError(
        f"there is no site {wanted!r}; known sites are {', '.join(names())}. Name a file of your "
        f"own by its path, or put it into {OWN}"
    )


def load(name: str | None = None) -> Site:
    """Load a site by name or path (see `find`).

    Raises
    ------
    SiteError
        If the file does not exist, or has an unknown key or an invalid value.
    """
    path = find(name)
    try:
        told = tomllib.loads(path.read_text())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SiteError(f"{path}: {error}") from None
    return parse(told, str(path), path.stem)


def parse(told: Mapping[str, Any], where: str, name: str) -> Site:
    """Convert the content of a site file. Raises `SiteError`."""
    site = Site(**{"name": name, **_checked(Site, told, where, "")})
    for key, value, known in (
        ("mpi.launcher", site.mpi.launcher, (AUTO, *LAUNCHERS)),
        ("container.runtime", site.container.runtime, ("", *RECIPES)),
        ("nodes.shared", site.nodes.shared, SHARED),
    ):
        if value not in known:
            raise SiteError(
                f"{where}: {key} must be one of {', '.join(filter(None, known))}; got {value!r}"
            )
    if not 0 < site.nodes.object_store < 1:
        raise SiteError(f"{where}: nodes.object_store must be between 0 and 1")
    if site.job.spare_s < 0:
        raise SiteError(f"{where}: job.spare_s must not be negative; got {site.job.spare_s}")
    if wrong := [name for name in site.environment if not re.fullmatch(r"[A-Za-z_]\w*", name)]:
        raise SiteError(f"{where}: environment: {wrong[0]!r} is not the name of a variable")
    try:
        site.job.nodes.format(nodes=1, cpus=1)
    except (LookupError, ValueError, AttributeError):
        raise SiteError(
            f"{where}: job.nodes = {site.job.nodes!r}: only {{nodes}} and {{cpus}} are replaced"
        ) from None
    for key, command in (("nodes.start", site.nodes.start), ("mpi.command", site.mpi.command)):
        try:
            words = shlex.split(command)
        except ValueError as error:
            raise SiteError(f"{where}: {key} = {command!r}: {error}") from None
        if not words and key == "nodes.start":
            raise SiteError(f"{where}: nodes.start must name a command")
    return site


def _checked(kind: type, told: Mapping[str, Any], where: str, table: str) -> dict[str, Any]:
    """Check names and types of the keys of a table."""
    types = get_type_hints(kind)
    known = [f.name for f in fields(kind)]
    found: dict[str, Any] = {}
    for key, value in told.items():
        full = f"{table}{key}"
        if key not in known:
            listed = ", ".join(known)
            raise SiteError(
                f"{where}: unknown key {full!r}{near(key, known)}; known keys are {listed}"
            )
        found[key] = _value(types[key], value, where, full)
    return found


def _all_strings(values: Any) -> bool:
    return all(isinstance(value, str) for value in values)


# What values of each type must be, whether one is that, and the type to convert it to.
KINDS: dict[Any, tuple[str, Callable[[Any], bool], Callable[[Any], Any]]] = {
    str: ("a string", lambda v: isinstance(v, str), str),
    bool: ("true or false", lambda v: isinstance(v, bool), bool),
    int: ("a whole number", lambda v: type(v) is int, int),
    float: ("a number", lambda v: type(v) in (int, float), float),
    tuple[str, ...]: ("a list of strings", lambda v: type(v) is list and _all_strings(v), tuple),
    Mapping[str, str]: (
        "a table of strings", lambda v: type(v) is dict and _all_strings(v.values()), dict,
    ),
}  # fmt: skip


NO_TABLE = ("a table", lambda _: False, dict)


def _value(kind: Any, value: Any, where: str, full: str) -> Any:
    if hasattr(kind, "__dataclass_fields__") and isinstance(value, dict):
        return kind(**_checked(kind, value, where, f"{full}."))
    what, fits, convert = KINDS.get(kind, NO_TABLE)
    if not fits(value):
        raise SiteError(f"{where}: {full} = {value!r}: it must be {what}")
    return convert(value)


# --- jobs in an image ---


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


def image(site: Site, name: str | None, runtime: str | None) -> Image | None:
    """Return the requested image with the site's runtime; None without an image.

    Raises
    ------
    JobError
        If no runtime is known, or the site's options are for another one.
    """
    if not name:
        return None
    runs = runtime or site.container.runtime
    if runs not in RECIPES:
        problem = f"unknown container runtime {runs!r}"
        if not runs:
            problem = f"site {site.name} names no container runtime (container.runtime)"
        raise JobError(f"{problem}: --container-runtime takes {', '.join(RECIPES)}")
    own = site.container
    if _family(runs) != _family(own.runtime or runs) and (own.options or own.library):
        given = [f"container.{key}" for key in ("options", "library") if getattr(own, key)]
        raise JobError(
            f"{' and '.join(given)} of site {site.name} for {own.runtime} do not fit {runs}: copy "
            f"its file to {OWN}, and set for {runs} there what it needs (--site)"
        )
    return Image(name, runs, own.options, site.nodes.tmp)


def _family(runtime: str) -> str:
    """Return the runtime whose options and paths this one takes."""
    return FAMILIES.get(runtime, runtime)


def launchers_outside(words: list[str], env: Mapping[str, str]) -> dict[str, str]:
    """Return variables by which gangs in the image use the launchers outside."""
    told = {CONTAINER: shlex.join(words)}
    for name, usual in OUTSIDE.items():
        command = env.get(name) or usual
        told[name] = command if command.startswith(RELAY) else f"{RELAY} {command}"
    return told
