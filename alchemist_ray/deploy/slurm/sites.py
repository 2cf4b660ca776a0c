"""Site files: what differs from one machine to the next, in one small TOML file each.

Shipped ones lie in ``cray/sites``; one's own in ``~/.alchemist/sites``, or anywhere by path.
Values may name environment variables (``$SCRATCH``), which the job's shell fills in.
"""

from __future__ import annotations

import difflib
import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, get_type_hints

from alchemist_ray.errors import SiteError
from alchemist_ray.launchers import AUTO, LAUNCHERS

SHIPPED = Path(__file__).resolve().parents[3] / "cray" / "sites"
OWN = Path("~/.alchemist/sites")
VARIABLE = "ALCHEMIST_SITE"
DEFAULT = "generic-slurm"
SCHEDULERS = ("slurm", "pbs")
RUNTIMES = ("", "shifter", "apptainer", "singularity", "podman", "podman-hpc", "charliecloud")


@dataclass(frozen=True, slots=True)
class Job:
    """How jobs are asked for.

    Attributes
    ----------
    scheduler : {"slurm", "pbs"}
    options : tuple of str
        Options that every job there needs, as sbatch or qsub takes them.
    nodes : str
        PBS only: how nodes are asked for; ``{nodes}`` and ``{cpus}`` are replaced.
    spare_s : int
        Seconds before the time limit at which a job is told to end.
    """

    scheduler: str = "slurm"
    options: tuple[str, ...] = ()
    nodes: str = "nodes={nodes}:ppn={cpus}"
    spare_s: int = 60


@dataclass(frozen=True, slots=True)
class Software:
    """What is loaded before anything runs: modules, then lines of shell."""

    modules: tuple[str, ...] = ()
    setup: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Nodes:
    """A node.

    Attributes
    ----------
    interface : tuple of str
        Names of the network interface that nodes talk over, best first (``hsn0``, or
        patterns: ``ib*``). Empty: the one that leads to the job's first node.
    tmp : str
        A folder of the node's own, for sockets and logs; its path must be short.
    object_store : float
        Share of the job's memory on a node that Ray's object store may take.
    start : str
        PBS without Slurm: the command that runs a program once on every node of the job.
    """

    interface: tuple[str, ...] = ()
    tmp: str = "/tmp"
    object_store: float = 0.2
    start: str = "pbsdsh -u --"


@dataclass(frozen=True, slots=True)
class Mpi:
    """How ranks are started, and on which MPI.

    Attributes
    ----------
    launcher : str
        As in ``AlchemistSession(launcher=...)``; its default in jobs.
    pmi : str
        What srun's ``--mpi`` gets.
    command : str
        The launcher's program with options of its own (``srun --network=...``).
    library : str
        The vendor's libmpi.so.12 (MPICH's ABI), for the ranks; empty: the wheel's.
    scalapack : str
        The library with ScaLAPACK's symbols (Cray: LibSci's).
    """

    launcher: str = "pmi"
    pmi: str = "pmi2"
    command: str = ""
    library: str = ""
    scalapack: str = ""


@dataclass(frozen=True, slots=True)
class Container:
    """How images are run there.

    Attributes
    ----------
    runtime : str
        One of `RUNTIMES`.
    options : tuple of str
        That it always needs: what else is to be seen inside.
    library : str
        The vendor's libmpi.so.12 as it is found inside; empty: the image's own MPI.
    """

    runtime: str = ""
    options: tuple[str, ...] = ()
    library: str = ""


@dataclass(frozen=True, slots=True)
class Site:
    """One machine. The parts are the file's tables."""

    name: str
    about: str = ""
    job: Job = field(default_factory=Job)
    software: Software = field(default_factory=Software)
    environment: Mapping[str, str] = field(default_factory=dict)
    nodes: Nodes = field(default_factory=Nodes)
    mpi: Mpi = field(default_factory=Mpi)
    container: Container = field(default_factory=Container)


def names() -> list[str]:
    """Sites that can be named."""
    return sorted({path.stem for path in (*SHIPPED.glob("*.toml"), *own().glob("*.toml"))})


def own() -> Path:
    """The folder of the user's own site files."""
    return OWN.expanduser()


def find(name: str | None = None) -> Path:
    """The file of a site: by name, by path, or (None) what `ALCHEMIST_SITE` says, or generic.

    Raises
    ------
    SiteError
        If there is none.
    """
    wanted = name or os.environ.get(VARIABLE) or DEFAULT
    if wanted.endswith(".toml"):
        path = Path(wanted).expanduser().absolute()
        if not path.is_file():
            raise SiteError(f"there is no site file {path}")
        return path
    for folder in (own(), SHIPPED):
        if (path := folder / f"{wanted}.toml").is_file():
            return path
    raise SiteError(
        f"there is no site {wanted!r}: known are {', '.join(names())}; a file of your own goes "
        f"by its path, or into {OWN}"
    )


def load(name: str | None = None) -> Site:
    """A site by name or path (see `find`).

    Raises
    ------
    SiteError
        If there is none, or the file says what no site can have.
    """
    path = find(name)
    try:
        told = tomllib.loads(path.read_text())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SiteError(f"{path}: {error}") from None
    return parse(told, str(path), path.stem)


def parse(told: Mapping[str, Any], where: str, name: str) -> Site:
    """A site from what its file says. Raises `SiteError`."""
    site = Site(**{"name": name, **_checked(Site, told, where, "")})
    for key, value, known in (
        ("job.scheduler", site.job.scheduler, SCHEDULERS),
        ("mpi.launcher", site.mpi.launcher, (AUTO, *LAUNCHERS)),
        ("container.runtime", site.container.runtime, RUNTIMES),
    ):
        if value not in known:
            raise SiteError(
                f"{where}: {key} = {value!r}: it is one of {', '.join(filter(None, known))}"
            )
    if not 0 < site.nodes.object_store < 1:
        raise SiteError(f"{where}: nodes.object_store is a share between 0 and 1")
    return site


def _checked(kind: type, told: Mapping[str, Any], where: str, table: str) -> dict[str, Any]:
    """The fields of a part, each of its type; unknown ones refused by name."""
    types = get_type_hints(kind)
    known = [f.name for f in fields(kind)]
    found: dict[str, Any] = {}
    for key, value in told.items():
        full = f"{table}{key}"
        if key not in known:
            near = difflib.get_close_matches(key, known, 1)
            hint = f"did you mean {table}{near[0]}?" if near else f"there are {', '.join(known)}"
            raise SiteError(f"{where}: no site has {full!r}; {hint}")
        found[key] = _value(types[key], value, where, full)
    return found


def _value(kind: Any, value: Any, where: str, full: str) -> Any:
    if isinstance(value, dict) and hasattr(kind, "__dataclass_fields__"):
        return kind(**_checked(kind, value, where, f"{full}."))
    if kind is str and isinstance(value, str):
        return value
    if kind in (int, float) and isinstance(value, int | float) and not isinstance(value, bool):
        return kind(value)
    if kind == tuple[str, ...] and isinstance(value, list) and _all_strings(value):
        return tuple(value)
    if kind == Mapping[str, str] and isinstance(value, dict) and _all_strings(value.values()):
        return dict(value)
    wanted = {
        str: "a string",
        int: "a number",
        float: "a number",
        tuple[str, ...]: "a list of strings",
    }
    raise SiteError(
        f"{where}: {full} = {value!r}: it must be {wanted.get(kind, 'a table of strings')}"
    )


def _all_strings(values: Any) -> bool:
    return all(isinstance(value, str) for value in values)
