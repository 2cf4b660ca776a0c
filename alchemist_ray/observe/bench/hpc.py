"""A small HPC benchmark, to compare a machine natively, in containers and in guests.

``alchemist bench hpc``.

Rates of products and of memory, times of messages. The library ``hpc`` on the ranks (`ali.hpc`)
measures and validates. ``--compare`` measures each place by a command with its own processes, so
that nothing of one runs during the next.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import geometric_mean
from typing import Any

import ray

from alchemist_ray.deploy.virtual_cluster import cluster, host
from alchemist_ray.deploy.virtual_cluster.guests import PORT, Options
from alchemist_ray.errors import AlchemistError
from alchemist_ray.observe.doctor.node import usable_cores
from alchemist_ray.plural import counted
from alchemist_ray.runtime.cluster.ray_cluster import join_ray
from alchemist_ray.session import AlchemistSession
from alchemist_ray.subcommands import add_options, positive
from alchemist_ray.version import __version__

FORMAT = 1
SECONDS = 1.0
SETTLE_S = 2.0  # Ray starts spare processes for the next gang meanwhile, on the same cores


class BenchError(AlchemistError, ValueError):
    """A result that cannot be read or compared."""


@dataclass(frozen=True, slots=True)
class Measure:
    """One number. `what` is its name in all results; `more`: larger values are better."""

    what: str
    value: float
    unit: str
    more: bool


@dataclass(frozen=True, slots=True)
class Result:
    """All numbers of a run, and its ranks, nodes and MPI."""

    label: str
    ranks: int
    nodes: int
    mpi: str
    measures: tuple[Measure, ...]

    def to_json(self) -> str:
        return json.dumps({"format": FORMAT, **asdict(self)}, indent=1) + "\n"

    @classmethod
    def read(cls, path: Path) -> Result:
        """Read a result of ``--json`` from a file. Raises `BenchError`."""
        try:
            return cls.parse(path.read_text())
        except (OSError, BenchError) as error:
            raise BenchError(f"{path}: {error}") from None

    @classmethod
    def parse(cls, text: str) -> Result:
        """Read the output of ``--json``. Raises `BenchError`."""
        try:
            told = json.loads(text)
            if told.pop("format") != FORMAT:
                raise KeyError("format")
            measures = tuple(Measure(**m) for m in told.pop("measures"))
            return cls(**told, measures=measures)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise BenchError(f"not a result of `alchemist bench hpc --json`: {error}") from None


def measure(session: AlchemistSession, label: str, seconds: float = SECONDS) -> Result:
    """Measure on a session's gang, in about four times `seconds`, and 200 MiB of memory per rank.

    Raises
    ------
    RoutineError
        If the result of a measure is wrong.
    """
    library = session.load_library("hpc")
    time.sleep(SETTLE_S)
    return result(label, *library.suite(seconds))


def result(label: str, measures: Sequence[str], ranks: Sequence[str]) -> Result:
    """Read the results of the routine `ali.hpc.suite`."""
    about = [json.loads(rank) for rank in ranks]
    return Result(
        label=label,
        ranks=len(about),
        nodes=len({rank["host"] for rank in about}),
        mpi=about[0]["version"],
        measures=tuple(Measure(**json.loads(text)) for text in measures),
    )


# --- showing --------------------------------------------------------------------------


def _size(result: Result) -> str:
    return f"{counted(result.ranks, 'rank')} on {counted(result.nodes, 'node')}"


def table(result: Result) -> str:
    """Format a result for people."""
    head = f"{result.label}: {_size(result)}, {result.mpi}"
    lines = [f"  {m.what:44} {m.value:10.4g} {m.unit}" for m in result.measures]
    return "\n".join([head, *lines]) + "\n"


def side_by_side(results: Sequence[Result], missing: Mapping[str, str]) -> str:
    """Format results in columns, with ratios to the first; over 1 means better than the first.

    Parameters
    ----------
    results : sequence of Result
        At least one.
    missing : mapping of str to str
        Labels of columns without a result, and the reasons.

    Raises
    ------
    BenchError
        If a result has no measure in common with the first.
    """
    first, *others = results
    gains = [ratios(its, first)["ratios"] for its in others]
    for its, gain in zip(others, gains, strict=True):
        if not gain:
            raise BenchError(f"{its.label} and {first.label} have no measure in common")
    columns = [
        {m.what: f"{m.value:.4g} ({gain.get(m.what, 1.0):.2f})" for m in its.measures}
        for its, gain in zip(others, gains, strict=True)
    ]
    absent = ["-"] * len(missing)
    rows = [["", *(its.label for its in results), *missing, ""]]
    for m in first.measures:
        cells = [column.get(m.what, "-") for column in columns]
        rows.append([m.what, f"{m.value:.4g}", *cells, *absent, m.unit])
    means = [f"({geometric_mean(gain.values()):.2f})" for gain in gains]
    rows.append(["geometric mean", "", *means, *absent, ""])
    same = len({(its.ranks, its.nodes) for its in results}) == 1
    sizes = "; ".join(f"{its.label}: {_size(its)}, {its.mpi}" for its in results)
    lines = [sizes if same else f"different sizes: {sizes}"]
    lines += [
        f"{name:44}{''.join(f'{cell:>18}' for cell in cells)}  {unit}".rstrip()
        for name, *cells, unit in rows
    ]
    lines.append(f"in brackets: ratio to {first.label}; over 1 is better than {first.label}")
    lines += [f"{label}: not measured: {reason}" for label, reason in missing.items()]
    return "\n".join(lines) + "\n"


def goodness(one: Measure, other: Measure) -> float:
    """Return the ratio of two measures; over 1 means that `one` is better."""
    return one.value / other.value if one.more else other.value / one.value


def ratios(one: Result, other: Result) -> dict[str, Any]:
    """Return the ratios of two results by measure."""
    theirs = {m.what: m for m in other.measures}
    found: dict[str, Any] = {
        m.what: goodness(m, theirs[m.what]) for m in one.measures if m.what in theirs
    }
    return {"of": one.label, "to": other.label, "ratios": found}


LIMIT_S = 1800.0  # of a place; emulated guests are slow
LOOK_S = 20.0
IMAGE = f"alchemist-on-ray:{__version__}"
CONTAINER = f"podman run --rm --shm-size=2g {IMAGE}"
TAIL = 300  # characters of an error
EMULATED = (
    "guest: emulated by QEMU, because KVM does not work here: its ratios are those of the "
    "emulation, not of virtualization"
)


class NotMeasuredError(Exception):
    """Why a place has no result."""


def compare_places(
    workers: int, seconds: float, container: str, guest: str, ray_address: str | None = None
) -> tuple[list[Result], dict[str, str], list[str]]:
    """Measure in each place, with one BLAS thread per rank.

    Parameters
    ----------
    workers : int
        MPI ranks.
    seconds : float
        As for `hpc.measure`.
    container : str
        A command that runs the words after it in a container.
    guest : str
        Name of a virtual cluster that this machine has joined.
    ray_address : str, optional
        Ray cluster of the gang. Default: as a session finds it.

    Returns
    -------
    results : list of Result
    missing : dict of str to str
        Places without a result, and the reasons.
    notes : list of str

    Raises
    ------
    BenchError
        If not even the plain MPI program runs.
    """
    words = ["bench", "hpc", "--json", f"--workers={workers}", f"--seconds={seconds}"]
    cluster_of_gang = {"RAY_ADDRESS": ray_address} if ray_address else {}
    here = [sys.executable, "-m", "alchemist_ray.cli"]
    places: dict[str, Callable[[], Result]] = {
        "native": lambda: _native([*here, "run-routine", "hpc", "suite"], workers, seconds),
        "gang": lambda: _read([*here, *words, "--label=gang"], cluster_of_gang),
        "container": lambda: _container(container, [*words, "--label=container"]),
        "guest": lambda: _guest(guest, [*here, *words, "--label=guest"]),
    }
    results, missing = [], {}
    for name, measured in places.items():
        sys.stderr.write(f"measuring: {name}\n")
        try:
            results.append(measured())
        except NotMeasuredError as reason:
            missing[name] = str(reason)
    if not results:
        raise BenchError(f"nothing could be measured: {missing}")
    measured_guest = any(its.label == "guest" for its in results)
    notes = [EMULATED] if measured_guest and _options(guest).emulate else []
    return results, missing, notes


def _native(command: Sequence[str], workers: int, seconds: float) -> Result:
    """A plain program of mpiexec, without Ray."""
    said = _run([*command, f"seconds={seconds}", f"--ranks={workers}"], {})
    told = {
        name: ast.literal_eval(text)
        for name, text in re.findall(r"^(measures|ranks) = (\[.*\])$", said, re.MULTILINE)
    }
    return result("native", told["measures"], told["ranks"])


def _container(command: str, words: Sequence[str]) -> Result:
    program = shlex.split(command)
    if not shutil.which(program[0]):
        raise NotMeasuredError(f"no {program[0]} on this machine")
    if (
        command == CONTAINER
        and subprocess.run(
            ["podman", "image", "exists", IMAGE], capture_output=True, timeout=LOOK_S, check=False
        ).returncode
    ):
        raise NotMeasuredError(f"no image {IMAGE} here: `podman build -t {IMAGE} .` makes it")
    return _read([*program, "alchemist", *words], {})


def _options(name: str) -> Options:
    about = cluster.folder_of(name) / host.CLUSTER
    return Options(**json.loads(about.read_text())["options"])


def _guest(name: str, command: Sequence[str]) -> Result:
    folder = cluster.folder_of(name)
    try:
        options = _options(name)
    except OSError:
        raise NotMeasuredError(
            f"no virtual cluster {name!r}: `alchemist virtual-cluster up` starts one"
        ) from None
    return _read(
        command,
        {
            "RAY_ADDRESS": f"{options.address(0)}:{PORT}",
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(folder / host.TOKEN),
            "RAY_DEFAULT_PYTHON_VERSION_MATCH_LEVEL": "minor",
        },
    )


def _read(command: Sequence[str], variables: Mapping[str, str]) -> Result:
    said = _run(command, variables)
    try:
        return Result.parse(said[said.index("{") :])
    except (BenchError, ValueError) as error:
        raise NotMeasuredError(f"{shlex.join(command)}: {error}") from None


def _run(command: Sequence[str], variables: Mapping[str, str]) -> str:
    """Run a command to its end; its standard output."""
    try:
        done = subprocess.run(
            command, env={**os.environ, **variables}, stdin=subprocess.DEVNULL,
            capture_output=True, text=True, timeout=LIMIT_S, check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NotMeasuredError(str(error)) from None
    if done.returncode:
        said = " ".join((done.stderr or done.stdout).split())[-TAIL:]
        raise NotMeasuredError(f"exit code {done.returncode}: {said}")
    return done.stdout


USAGE = """\
Measure products, memory and messages on a gang, and validate the results.

  alchemist bench hpc                           measure on a gang
  alchemist bench hpc --compare                 here: plain MPI, a gang, a container, guests
  alchemist bench hpc --json > other.json       on another machine
  alchemist bench hpc --compare other.json      measure and compare with it
  alchemist bench hpc --compare a.json b.json   compare two results without measuring
"""


def main(argv: Sequence[str]) -> int:
    """Run ``alchemist bench``. Returns 0."""
    asked = _parser().parse_args(argv[1:])
    if asked.compare == []:
        return _compare_places(asked)
    others = [Result.read(path) for path in asked.compare or ()]
    result = others.pop(0) if len(others) == 2 else _measured(asked)
    if asked.json and others:
        text = json.dumps(ratios(result, others[0]), indent=1) + "\n"
    elif asked.json:
        text = result.to_json()
    else:
        text = table(result) if not others else side_by_side([*others, result], {})
    sys.stdout.write(text)
    return 0


def _measured(asked: argparse.Namespace) -> Result:
    join_ray(asked.workers)
    cluster = [node["Resources"].get("CPU", 0.0) for node in ray.nodes() if node["Alive"]]
    # At most one rank per core (of this machine): ranks poll.
    each = [min(cpus, usable_cores()) for cpus in cluster]
    workers = asked.workers or max(1, int(sum(each)))
    with AlchemistSession(workers, launcher=asked.launcher, strategy="SPREAD") as session:
        return measure(session, asked.label, asked.seconds)


def _compare_places(asked: argparse.Namespace) -> int:
    results, missing, notes = compare_places(
        asked.workers or int(usable_cores()), asked.seconds, asked.container, asked.guest
    )
    if asked.json:
        told = {"results": [asdict(its) for its in results], "missing": missing, "notes": notes}
        text = json.dumps(told, indent=1) + "\n"
    else:
        text = side_by_side(results, missing) + "".join(f"{note}\n" for note in notes)
    sys.stdout.write(text)
    return 0


def _count(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of ranks: give 1 or more")
    return int(text)


OPTIONS: tuple[tuple[Any, ...], ...] = (
    ("--workers", _count, "MPI ranks (default: one for each core)"),
    ("--label", os.uname().nodename, "name of the result"),
    ("--json", False, "print JSON, for --compare and programs"),
    ("--seconds", positive,
     "seconds of the longest measurements; the whole run takes about four times this (default: "
     f"{SECONDS:g})", {"default": SECONDS}),
    ("--launcher", "auto", "launcher of the ranks (default: auto)"),
    ("--compare FILE", Path,
     "no FILE: measure in plain MPI, a gang, a container and guests; one FILE: measure and compare "
     "with it; two: compare them", {"nargs": "*"}),
    ("--container COMMAND", CONTAINER,
     "--compare without FILE: the command that runs a command in a container (default: "
     "%(default)s)"),
    ("--guest NAME", "vc",
     "--compare without FILE: the virtual cluster, which this machine has joined (default: vc)"),
)  # fmt: skip


def _parser() -> argparse.ArgumentParser:
    shown: Any = {
        "description": USAGE,
        "formatter_class": argparse.RawDescriptionHelpFormatter,
    }
    parser = argparse.ArgumentParser(prog="alchemist bench", **shown)
    kinds = parser.add_subparsers(dest="kind", required=True)
    add_options(kinds.add_parser("hpc", help="measure, or compare", **shown), OPTIONS)
    return parser
