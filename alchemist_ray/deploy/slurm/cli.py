"""``alchemist slurm`` and ``alchemist pbs``."""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

from alchemist_ray.cluster.batch_job import FOLDER_VARIABLE, JobFolder
from alchemist_ray.deploy.slurm import allocation, program, script, sites
from alchemist_ray.deploy.slurm.keeper import RayInJob, up_text
from alchemist_ray.deploy.slurm.signals import Signals, Terminated, interrupt_on_termination
from alchemist_ray.errors import JobError
from alchemist_ray.gateway.protocol import PORT
from alchemist_ray.launchers import SETTINGS
from alchemist_ray.launchers import VARIABLE as LAUNCHER
from alchemist_ray.subcommands import add_verbs, parser_of, positive

USAGE = """\
Run Ray and gangs in a {system} job.

  alchemist {name} submit -N 3 -t 30 -- python app.py    submit a job
  alchemist {name} run -- python app.py                  in a job: start Ray, run it, stop Ray
  alchemist {name} start                                 in a job: start Ray and keep it
  alchemist {name} stop                                  in a job: stop the Ray of start
"""
START_S = 120.0
START_VARIABLE = "ALCHEMIST_START_TIMEOUT"  # seconds, overrides START_S
STOP_TIMEOUT_S = 30.0
POLL_INTERVAL_S = 0.1
SUBMIT = {"slurm": "sbatch", "pbs": "qsub"}
# Messages of `sbatch --test-only` about a request that no free node will ever satisfy.
BEYOND = ("PartitionConfig", "PartitionTimeLimit", "PartitionNodeLimit")  # reasons to wait
NEVER = re.compile(r"node configuration is not available|time limit is invalid|more .* than", re.I)


VERBS = {
    "submit": "write a job script and submit it",
    "run": "start Ray, run a program, stop Ray",
    "start": "start Ray on this job's nodes and keep it",
    "stop": "stop the Ray of `start`",
    "sites": "list all known sites",
}
# Subcommands that take the option, and its row (see `add_options`).
OPTIONS: tuple[tuple[Any, ...], ...] = (
    ("submit", "-N --nodes", 1, "number of nodes (default: 1)"),
    ("submit", "-t --time", "60", "time limit, in minutes or H:MM:SS (default: 60)"),
    ("submit", "-c --cpus", int, "CPUs on each node (default: whole nodes)"),
    ("submit", "--mem memory", "", "memory on each node, in the notation of the batch system"),
    ("submit", "-p --partition", "", "partition or queue"),
    ("submit", "-A --account", "", "account to charge"),
    ("submit", "-q --qos", "", "quality of service"),
    ("submit", "-J --name", "", "the job's name (default: the program's)"),
    ("submit", "-o --option options", [], "further option of the batch system, as --option=--x=y"),
    ("submit", "--folder", str,
     "folder for script, log and token (default: in ~/.alchemist/jobs)"),
    ("submit", "--dry-run", False, "only print the script"),
    ("run", "--spare SECONDS", int,
     "time from SIGTERM to the end of the job (default: the site's)"),
    ("start", "--foreground", False, "stay until Ctrl-C or `stop`"),
    ("start", "--gateway PORT", int,
     "also start a gateway for clients without Ray (default port: %(const)s)",
     {"nargs": "?", "const": PORT}),
    ("run start", "--cpus-per-node", int, "CPUs of each node for Ray (default: all)"),
    ("submit run start", "--container IMAGE", str,
     "run Ray, the program and the ranks in this image"),
    ("submit run start", "--container-runtime", str, "container runtime (default: the site's)"),
    ("submit run start", "--start-timeout SECONDS start_timeout_s", positive,
     f"time limit without progress (default: {START_VARIABLE}, or {START_S:.0f})"),
    ("submit run start", "--site", str,
     f"name or path of a site file (default: {sites.DEFAULT})"),
)  # fmt: skip


def main(argv: Sequence[str]) -> int:
    """Run a subcommand of ``alchemist slurm`` or ``alchemist pbs``. Returns the exit code."""
    words = list(argv)
    cut = words.index("--") if "--" in words else len(words)
    parser = _parser(words[0])
    options, unknown = parser.parse_known_args(words[1:cut])
    if unknown:
        parser.error(f"unrecognized arguments: {' '.join(unknown)} (COMMAND comes after --)")
    options.command = words[cut + 1 :]
    run = {"submit": _submit, "run": _run, "start": _start, "stop": _stop, "sites": _sites}
    try:
        return run[options.verb](options)
    except Terminated as ending:
        print(f"alchemist: ended by {ending}", file=sys.stderr)
        return 128 + ending.number


def _parser(system: str) -> argparse.ArgumentParser:
    usage = USAGE.format(system={"slurm": "Slurm", "pbs": "PBS"}[system], name=system)
    parser = parser_of(f"alchemist {system}", usage)
    parser.set_defaults(system=system)
    add_verbs(parser, VERBS, OPTIONS, "submit", "run")
    return parser


def _sites(options: argparse.Namespace) -> int:
    for name in sites.names():
        print(f"{name:16} {sites.load(name).about}")
    return 0


# --- submission ---


def _submit(options: argparse.Namespace) -> int:
    site = sites.load(options.site)
    options.name = options.name or _name(options.command)
    options.image = sites.image(site, options.container, options.container_runtime)
    request = script.Request(
        **{field.name: getattr(options, field.name) for field in fields(script.Request)}
    )
    folder = JobFolder(Path(options.folder).absolute() if options.folder else _fresh(request.name))
    # By its full path: the job starts in another folder.
    named = str(sites.find(options.site)) if site.name not in sites.names() else site.name
    log = folder.path / ("log-%j.txt" if options.system == "slurm" else "log.txt")
    written = str(log)
    if options.system == "slurm":  # which would fill in %j and the like in folders' names, too
        written = f"{str(folder.path).replace('%', '%%')}/{log.name}"
    binaries = str(Path(sys.executable).parent)
    place = script.Place(str(folder.path), written, binaries, named)
    text = script.render(site, request, options.command, place, options.system)
    if options.system == "slurm" and (warning := script.early_signal(site, request)):
        print(f"warning: {warning}", file=sys.stderr)
    if options.dry_run:
        print(text, end="")
        return 0
    tool = SUBMIT[options.system]
    if shutil.which(tool) is None:
        raise JobError(f"no program {tool} on this machine; --dry-run only prints the script")
    folder.make()
    path = folder.path / "job.sh"
    path.write_text(text)
    words = [tool, str(path)]
    if options.system == "pbs":  # Slurm's qsub does not read these from the script
        words[1:1] = ["-N", request.name, "-j", "oe", "-o", place.log]
    try:
        job = _queued(words)
    except JobError:
        if not options.folder:
            shutil.rmtree(folder.path, ignore_errors=True)
        raise
    print(f"job {job}\nscript {path}\nlog {log.with_name(log.name.replace('%j', job))}")
    if options.system == "slurm":
        _warn_of_limits(job)
    return 0


def _queued(words: list[str]) -> str:
    """Submit a script; the job's number."""
    if words[0] == SUBMIT["slurm"]:
        _check_possible(words[0], Path(words[-1]))
    done = _asked(*words)
    if done.returncode:
        said = (done.stderr or done.stdout).strip()
        raise JobError(f"{words[0]} failed: {said}\n--dry-run prints the script")
    return done.stdout.strip().split()[-1]


def _asked(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(words, capture_output=True, text=True, check=False)


def _check_possible(tool: str, script: Path) -> None:
    """Refuse a request that can never start: Slurm may keep it in the queue for ever."""
    tested = _asked(tool, "--test-only", str(script))
    said = " ".join(tested.stderr.split())
    if tested.returncode and NEVER.search(said):
        raise JobError(
            f"this job can never start ({said}): check --nodes, --cpus, --mem, --time and the "
            "partition against `sinfo -o '%P %D %c %m %l'`"
        )


def _warn_of_limits(job: str) -> None:
    """Warn if a submitted job exceeds its partition's limits: Slurm lets it wait for ever."""
    reason, partition, limit, nodes = allocation.squeue(job, "%r|%P|%l|%D") or [""] * 4
    if reason not in BEYOND:
        return
    about = ("--format", "%l (-t), %s nodes (-N)")
    allowed = _asked("sinfo", "--noheader", "--partition", partition, *about)
    print(
        f"warning: job {job} waits ({reason}): it requests {limit} (-t), {nodes} nodes (-N), but "
        f"partition {partition} allows {allowed.stdout.strip()}: `scancel {job}`",
        file=sys.stderr,
    )


def _name(command: Sequence[str]) -> str:
    """Return a job's name: the first script in the command, or the program."""
    files = [word for word in command if word.endswith((".py", ".sh"))]
    name = Path(files[0] if files else command[0]).stem if command else ""
    return _plain(name) or "alchemist"


def _plain(name: str) -> str:
    return re.sub(r"[^\w.+-]+", "-", name)


def _fresh(name: str) -> Path:
    return JobFolder.home() / f"{time.strftime('%Y%m%d-%H%M%S')}-{_plain(name)}-{os.getpid()}"


# --- inside a job ---


def _start_s() -> float:
    """Return the default time limit for Ray's start. Raises `JobError`."""
    try:
        return positive(os.environ.get(START_VARIABLE) or str(START_S))
    except argparse.ArgumentTypeError as error:
        raise JobError(f"{START_VARIABLE}, in seconds: it {error}") from None


def _folder() -> JobFolder:
    folder = JobFolder.of(os.environ)
    if folder is None:
        raise JobError(allocation.NOT_IN_A_JOB)
    return folder


def _cluster(options: argparse.Namespace, folder: JobFolder, signals: Signals) -> RayInJob:
    site = sites.load(options.site)
    image = sites.image(site, options.container, options.container_runtime)
    words = image.words(os.environ) if image is not None else []
    # A job script has set these; an interactive job of salloc has not.
    for name, value in script.settings(site, image=image is not None).items():
        os.environ.setdefault(name, os.path.expandvars(value))
    if words:
        os.environ.update(sites.launchers_outside(words, os.environ))
    return RayInJob(
        allocation.current(os.environ),
        site,
        folder,
        signals.check,
        container=words,
        settings={name: os.environ[name] for name in (LAUNCHER, *SETTINGS) if name in os.environ},
        cpus_per_node=options.cpus_per_node,
        start_timeout_s=options.start_timeout_s or _start_s(),
    )


def _run(options: argparse.Namespace) -> int:
    if not options.command:
        raise JobError("no command: give it after --, as in `-- python app.py`")
    folder = _folder()
    signals = Signals()
    run = partial(
        program.run, options.command, folder=folder, signals=signals, base=dict(os.environ),
        grace_s=program.grace_s(options.spare or sites.load(options.site).job.spare_s),
    )  # fmt: skip
    if (address := folder.live_cluster()) is not None:  # of `start`
        if options.container and not address.container:
            raise JobError(
                "this job's Ray runs outside an image: `alchemist slurm stop` stops it, "
                "`alchemist slurm start --container ...` starts it in one"
            )
        code = run(address=address, cluster=None)
    else:
        with _cluster(options, folder, signals) as cluster:
            code = run(address=cluster.address, cluster=cluster)
    if (ending := signals.received) is not None:  # the last line of the log
        why = f"{ending.name}{signals.time_left}"
        print(f"alchemist: the job was ended by {why}; exit code {code}", file=sys.stderr)
    return code


def _start(options: argparse.Namespace) -> int:
    folder = _folder()
    if (address := folder.live_cluster()) is not None:
        raise JobError(
            f"Ray already runs in this job, at {address.address}: use it, or `alchemist slurm stop`"
        )
    if not options.foreground:
        if folder.cluster() is not None:
            folder.clear()  # of a Ray whose keeper was killed
        return _in_background(options, folder)
    signals = Signals()
    with _cluster(options, folder, signals) as cluster:
        if options.gateway is not None:
            print(program.serve_gateway(cluster.address, folder, options.gateway), flush=True)
        try:
            while True:
                signals.check()
                cluster.watch()
        except Terminated:
            return 0


def _in_background(options: argparse.Namespace, folder: JobFolder) -> int:
    folder.make()
    log = folder.path / "keeper.log"
    words = [sys.executable, "-m", "alchemist_ray.cli", options.system, "start", "--foreground"]
    words += ["--start-timeout", str(options.start_timeout_s or _start_s())]
    for name in ("site", "cpus_per_node", "container", "container_runtime"):
        if value := getattr(options, name):
            words += [f"--{name.replace('_', '-')}", str(value)]
    interrupt_on_termination()
    with open(log, "wb") as out:
        keeper = subprocess.Popen(
            words, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True
        )
    try:
        while (address := folder.cluster()) is None:
            if keeper.poll() is not None:
                raise JobError(f"Ray did not start:\n{log.read_text(errors='replace').strip()}")
            time.sleep(POLL_INTERVAL_S)
    except KeyboardInterrupt:  # the keeper is in a session of its own
        keeper.terminate()
        raise
    host, _, port = address.address.rpartition(":")
    told = {k: v for k, v in folder.environment(address, {}).items() if k != FOLDER_VARIABLE}
    settings = " ".join(f"{k}={shlex.quote(v)}" for k, v in told.items())
    print(
        f"{up_text(address)}\n"
        f"  alchemist slurm run -- python app.py      runs a program in it\n"
        f"  AlchemistSession()                        joins it, on the nodes of this job\n"
        f'  als.connect_to_alchemist("{host}", {port})\n'
        f"  export {settings}\n"
        f"  alchemist slurm stop                      stops it"
    )
    if options.gateway is not None:
        print(program.serve_gateway(address, folder, options.gateway))
    return 0


def _stop(options: argparse.Namespace) -> int:
    folder = _folder()
    address = folder.cluster()
    if address is None:
        raise JobError(
            "no Ray of `alchemist slurm start` runs in this job: stop ends only such a Ray"
        )
    if address.keeper_host != os.uname().nodename:
        raise JobError(
            f"the keeper of this Ray runs on {address.keeper_host}: stop it there, or end its step "
            f"alchemist-ray (`squeue --steps` shows its number, scancel ends it)"
        )
    if not address.keeper_runs_here():
        folder.clear()
        return 0
    os.kill(address.keeper_pid, 15)
    deadline = time.monotonic() + STOP_TIMEOUT_S
    while folder.cluster() is not None:
        if time.monotonic() > deadline:
            raise JobError(
                f"the keeper, process {address.keeper_pid}, has not stopped Ray in "
                f"{STOP_TIMEOUT_S:.0f} s: end its step alchemist-ray with scancel"
            )
        time.sleep(POLL_INTERVAL_S)
    return 0
