"""Job scripts for Slurm and PBS, from a site, a request and the program."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from alchemist_ray.deploy.slurm.sites import Image, Site
from alchemist_ray.errors import JobError
from alchemist_ray.launchers import LAUNCHERS
from alchemist_ray.launchers import VARIABLE as LAUNCHER
from alchemist_ray.launchers.mpiexec import MpiexecLauncher
from alchemist_ray.launchers.srun import PMI
from alchemist_ray.plural import counted

TIME = re.compile(r"(?:(\d+)-)?(\d+)(?::(\d{1,2}))?(?::(\d{1,2}))?")
SIGNAL_EARLY_S = 60  # "the signal may be sent up to 60 seconds earlier than specified" (sbatch)


@dataclass(frozen=True, slots=True)
class Request:
    """A request to the batch system.

    Attributes
    ----------
    nodes : int
    time : str
        Minutes, ``H:MM:SS`` or ``D-HH:MM:SS``.
    name : str
    cpus : int, optional
        CPUs on each node; other jobs may use the others. None: whole nodes.
    memory : str
        Memory on each node, in the notation of the batch system.
    partition, account, qos : str
        `partition` is the queue of PBS.
    options : sequence of str
        Further options, verbatim.
    start_timeout_s : float, optional
        Time limit for Ray's start.
    image : Image, optional
        Image for Ray, the program and the ranks.
    """

    nodes: int
    time: str
    name: str = "alchemist"
    cpus: int | None = None
    memory: str = ""
    partition: str = ""
    account: str = ""
    qos: str = ""
    options: Sequence[str] = ()
    start_timeout_s: float | None = None
    image: Image | None = None


@dataclass(frozen=True, slots=True)
class Place:
    """Paths: the job's folder, its log, the folder with `alchemist`, the site file."""

    folder: str
    log: str
    bin: str
    site: str


def seconds(time: str) -> int:
    """Convert a time limit of Slurm: minutes, ``M:SS``, ``H:MM:SS``, ``D-HH[:MM[:SS]]``.

    Raises
    ------
    JobError
        If it is not a time limit.
    """
    match = TIME.fullmatch(time.strip())
    if match is None:
        raise JobError(f"{time!r} is not a time limit: give minutes, H:MM:SS or D-HH:MM:SS")
    days, *rest = match.groups()
    numbers = [int(part) for part in rest if part is not None]
    if days is not None:
        hours, minutes, secs = (*numbers, 0, 0)[:3]
    elif len(numbers) == 3:
        hours, minutes, secs = numbers
    else:
        hours, (minutes, secs) = 0, (*numbers, 0)[:2]
    total = ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + secs
    if total <= 0:
        raise JobError(f"{time!r} is not a time limit: it must be at least a second")
    return total


def clock(total: int) -> str:
    """Format seconds as ``HH:MM:SS``."""
    return f"{total // 3600:02d}:{total // 60 % 60:02d}:{total % 60:02d}"


def spare_s(site: Site, request: Request) -> int:
    """Return the seconds between SIGTERM and the time limit; at most half of the limit."""
    return min(site.job.spare_s, seconds(request.time) // 2)


def directives(site: Site, request: Request, log: str, dialect: str) -> list[str]:
    """Return the lines of the script with options of the batch system."""
    limit = clock(seconds(request.time))
    image = request.image
    if dialect == "pbs":
        place = site.job.nodes.format(nodes=request.nodes, cpus=request.cpus or 1)
        told: list[tuple[str, Any]] = [
            ("-N {}", request.name),
            ("-l {}", place),
            ("-l walltime={}", limit),
            ("-l mem={}", request.memory),
            ("-q {}", request.partition),
            ("-A {}", request.account),
            ("-j {}", "oe"),
            ("-o {}", log),
        ]
        mark = "#PBS"
    else:
        told = [
            ("--job-name={}", request.name),
            ("--nodes={}", request.nodes),
            ("--ntasks-per-node={}", 1),
            ("--cpus-per-task={}", request.cpus),
            ("{}", "" if request.cpus else "--exclusive"),
            ("--mem={}", request.memory),
            ("--time={}", limit),
            ("--partition={}", request.partition),
            ("--account={}", request.account),
            ("--qos={}", request.qos),
            ("--output={}", log),
            ("--open-mode={}", "append"),
            # SIGTERM in time for an orderly end. Ray copes with lost nodes.
            ("--signal=B:TERM@{}", spare_s(site, request)),
            ("{}", "--no-kill"),
            # A program that has run halfway is not run again without its user's wish.
            ("{}", "--no-requeue"),
            # Shifter copies the image to the nodes before the job starts.
            ("--image={}", image.name if image and image.runtime == "shifter" else ""),
        ]
        mark = "#SBATCH"
    given = [form.format(_one_word(value)) for form, value in told if value not in ("", None)]
    return [f"{mark} {option}" for option in (*given, *site.job.options, *request.options)]


def _one_word(value: Any) -> str:
    """A value in a line of options, where a space would end it."""
    return f'"{value}"' if re.search(r"\s", str(value)) else str(value)


def early_signal(site: Site, request: Request) -> str:
    """A warning if Slurm may end the program before it has done much; empty for longer jobs."""
    left = seconds(request.time) - spare_s(site, request)
    if left > 2 * SIGNAL_EARLY_S:
        return ""
    return (
        f"of -t {request.time} the program has {max(0, left - SIGNAL_EARLY_S)} to {left} s, the "
        f"start of Ray included: Slurm sends SIGTERM {spare_s(site, request)} s before the time "
        f"limit, and up to {SIGNAL_EARLY_S} s earlier. Ask for more with -t"
    )


def settings(site: Site, *, image: bool = False) -> dict[str, str]:
    """Return the variables of a job of this site: its own, and those of launchers and ranks.

    In an image, paths of libraries are those inside the image.
    """
    mpi = site.mpi
    launcher = LAUNCHERS.get(mpi.launcher, MpiexecLauncher)
    told = {
        LAUNCHER: "" if mpi.launcher == "pmi" else mpi.launcher,
        PMI: mpi.pmi if mpi.launcher == "srun" else "",
        (launcher.settings or MpiexecLauncher.settings)[0]: mpi.command,
        "MPI4PY_LIBMPI": site.container.library if image else mpi.library,
        "SCALAPACK_LIB": "" if image else mpi.scalapack,
    }
    return dict(site.environment) | {name: value for name, value in told.items() if value}


def render(site: Site, request: Request, command: Sequence[str], place: Place, dialect: str) -> str:
    """Return the job script for ``"slurm"`` or ``"pbs"``. Raises `JobError`."""
    if request.nodes < 1:
        raise JobError(f"--nodes={request.nodes}: it must be at least 1")
    if not command:
        raise JobError("no command: give it after --, as in `-- python app.py`")
    lines = [
        "#!/bin/bash -l" if site.software.modules else "#!/bin/bash",
        *directives(site, request, place.log, dialect),
        "",
        f"# Alchemist on Ray on {counted(request.nodes, 'node')} of {site.name}.",
        "set -e",
    ]
    if dialect == "pbs":
        lines += ['cd "${PBS_O_WORKDIR:-.}"']
    if site.software.modules or site.software.setup:
        lines += ["", "# The site's software."]
        lines += [f"module load {' '.join(site.software.modules)}"] * bool(site.software.modules)
        lines += site.software.setup
    image = request.image
    variables = settings(site, image=image is not None)
    lines += [f"export {name}={_expandable(value)}" for name, value in variables.items()]
    run = ["--site", _expandable(place.site)]
    if request.start_timeout_s is not None:
        run += ["--start-timeout", f"{request.start_timeout_s:g}"]
    if (spare := spare_s(site, request)) != site.job.spare_s:
        run += ["--spare", str(spare)]
    if image is not None:
        run += ["--container-runtime", image.runtime, "--container", _expandable(image.name)]
    lines += [
        "",
        "# Token, address and log of this job; for this user only.",
        f"export ALCHEMIST_JOB_FOLDER={_expandable(place.folder)}",
        f'export PATH={_expandable(place.bin)}:"$PATH"',
        "",
        "# Starts Ray on every node, runs the program on the first, and stops Ray when the program",
        "# ends. The job ends with the program's exit code.",
        *([f"# In the image: {' '.join(image.recipe())} ..."] if image is not None else []),
        f"exec alchemist {dialect} run {' '.join(run)} -- {shlex.join(command)}",
        "",
    ]
    return "\n".join(lines)


def _expandable(text: str) -> str:
    """Quote a word for the shell so that only its variables are expanded."""
    if re.fullmatch(r"[\w@%+=:,./-]+", text):
        return text
    return '"' + re.sub(r'(["\\`]|\$(?!\w|\{))', r"\\\1", text) + '"'
