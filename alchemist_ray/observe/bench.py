"""``alchemist bench hpc``: a small HPC benchmark, to compare machines, containers and guests.

Rates of products and of memory, times of messages. The library ``hpc`` on the ranks (`ali.hpc`)
measures and validates.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import geometric_mean
from typing import Any

import ray

from alchemist_ray.cluster.ray_cluster import join_ray
from alchemist_ray.errors import AlchemistError
from alchemist_ray.observe.doctor.node import usable_cores
from alchemist_ray.plural import counted
from alchemist_ray.session.alchemist_session import AlchemistSession
from alchemist_ray.subcommands import add_options, parser_of, positive

FORMAT = 1
MEASURED_S = 1.0
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


def measure(session: AlchemistSession, label: str, seconds: float = MEASURED_S) -> Result:
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


def side_by_side(first: Result, others: Sequence[Result]) -> str:
    """Format results in columns, with ratios to the first; over 1 means better than the first.

    Raises
    ------
    BenchError
        If a result has no measure in common with the first.
    """
    gains = [ratios(its, first) for its in others]
    for its, gain in zip(others, gains, strict=True):
        if not gain:
            raise BenchError(f"{its.label} and {first.label} have no measure in common")
    columns = [
        {m.what: f"{m.value:.4g} ({gain.get(m.what, 1.0):.2f})" for m in its.measures}
        for its, gain in zip(others, gains, strict=True)
    ]
    rows = [["", first.label, *(its.label for its in others), ""]]
    for m in first.measures:
        cells = [column.get(m.what, "-") for column in columns]
        rows.append([m.what, f"{m.value:.4g}", *cells, m.unit])
    means = [f"({geometric_mean(gain.values()):.2f})" for gain in gains]
    rows.append(["geometric mean", "", *means, ""])
    results = [first, *others]
    same = len({(its.ranks, its.nodes) for its in results}) == 1
    sizes = "; ".join(f"{its.label}: {_size(its)}, {its.mpi}" for its in results)
    lines = [sizes if same else f"different sizes: {sizes}"]
    lines += [
        f"{name:44}{''.join(f'{cell:>18}' for cell in cells)}  {unit}".rstrip()
        for name, *cells, unit in rows
    ]
    lines.append(f"in brackets: ratio to {first.label}; over 1 is better than {first.label}")
    return "\n".join(lines) + "\n"


def goodness(one: Measure, other: Measure) -> float:
    """Return the ratio of two measures; over 1 means that `one` is better."""
    return one.value / other.value if one.more else other.value / one.value


def ratios(one: Result, other: Result) -> dict[str, float]:
    """Return the ratios of two results by measure."""
    theirs = {m.what: m for m in other.measures}
    return {m.what: goodness(m, theirs[m.what]) for m in one.measures if m.what in theirs}


USAGE = """\
Measure products, memory and messages on a gang, and validate the results.

  alchemist bench hpc                           measure on a gang
  alchemist bench hpc --json > other.json       on another machine, in a container, in guests
  alchemist bench hpc --compare other.json      measure and compare with it
  alchemist bench hpc --compare a.json b.json   compare results with the last, without measuring
"""


def main(argv: Sequence[str]) -> int:
    """Run ``alchemist bench``. Returns 0."""
    parser = parser_of("alchemist bench", USAGE)
    kinds = parser.add_subparsers(dest="kind", required=True)
    shown: Any = {"description": USAGE, "formatter_class": parser.formatter_class}
    add_options(kinds.add_parser("hpc", help="measure, or compare", **shown), OPTIONS)
    asked = parser.parse_args(argv[1:])
    results = [Result.read(path) for path in asked.compare]
    if len(results) < 2:
        results.insert(0, _measured(asked))
    *others, first = results
    if asked.json:
        found = [
            {"of": its.label, "to": first.label, "ratios": ratios(its, first)} for its in others
        ]
        text = "".join(json.dumps(its, indent=1) + "\n" for its in found) or first.to_json()
    else:
        text = side_by_side(first, others) if others else table(first)
    sys.stdout.write(text)
    return 0


def _measured(asked: argparse.Namespace) -> Result:
    join_ray(asked.workers)
    cluster = [node["Resources"].get("CPU", 0.0) for node in ray.nodes() if node["Alive"]]
    # At most one rank per core (of this machine): ranks poll.
    each = [min(cpus, usable_cores()) for cpus in cluster]
    workers = asked.workers or max(1, int(sum(each)))
    env = dict(variable.partition("=")[::2] for variable in asked.env)
    own = {"launcher": asked.launcher, "env": env}
    with AlchemistSession(workers, **own, strategy="SPREAD") as session:
        return measure(session, asked.label, asked.seconds)


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
     f"{MEASURED_S:g})", {"default": MEASURED_S}),
    ("--launcher", "auto", "launcher of the ranks (default: auto)"),
    ("--env NAME=VALUE env", [], "an environment variable of the ranks; more than once for more"),
    ("--compare FILE", Path,
     "one FILE: measure and compare with it; several: compare them with the last",
     {"nargs": "+", "default": []}),
)  # fmt: skip
