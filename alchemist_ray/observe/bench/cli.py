"""``alchemist bench hpc``."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import ray

from alchemist_ray.observe.bench import hpc, places
from alchemist_ray.observe.doctor.machine import usable_cores
from alchemist_ray.runtime.ray_cluster import join_ray
from alchemist_ray.session import AlchemistSession
from alchemist_ray.subcommands import positive

USAGE = """\
Run HPCC's measures and HPCG's kernel on a gang, and validate their results.

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
    others = [hpc.Result.read(path) for path in asked.compare or ()]
    result = others.pop(0) if len(others) == 2 else _measured(asked)
    if asked.json and others:
        text = json.dumps(hpc.ratios(result, others[0]), indent=1) + "\n"
    elif asked.json:
        text = result.to_json()
    else:
        text = hpc.table(result) if not others else hpc.compared(result, others[0])
    sys.stdout.write(text)
    return 0


def _measured(asked: argparse.Namespace) -> hpc.Result:
    join_ray(asked.workers)
    cluster = [node["Resources"].get("CPU", 0.0) for node in ray.nodes() if node["Alive"]]
    # At most one rank per core (of this machine): ranks poll.
    each = [min(cpus, usable_cores()) for cpus in cluster]
    workers = asked.workers or max(1, int(sum(each)))
    with AlchemistSession(workers, launcher=asked.launcher, strategy="SPREAD") as session:
        return hpc.measure(session, asked.label, asked.seconds)


def _compare_places(asked: argparse.Namespace) -> int:
    results, missing, notes = places.compare_places(
        asked.workers or int(usable_cores()), asked.seconds, asked.container, asked.guest
    )
    if asked.json:
        told = {"results": [asdict(its) for its in results], "missing": missing, "notes": notes}
        text = json.dumps(told, indent=1) + "\n"
    else:
        text = hpc.side_by_side(results, missing) + "".join(f"{note}\n" for note in notes)
    sys.stdout.write(text)
    return 0


def _count(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of ranks: give 1 or more")
    return int(text)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="alchemist bench",
        description=USAGE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    kinds = parser.add_subparsers(dest="kind", required=True)
    check = kinds.add_parser(
        "hpc",
        help="measure, or compare",
        description=USAGE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    check.add_argument("--workers", type=_count, help="MPI ranks (default: one for each core)")
    check.add_argument("--label", default=os.uname().nodename, help="name of the result")
    check.add_argument("--json", action="store_true", help="print JSON, for --compare and programs")
    check.add_argument(
        "--seconds",
        type=positive,
        default=hpc.SECONDS,
        help="seconds of the longest measurements; the whole run takes about seven times this "
        f"(default: {hpc.SECONDS:g})",
    )
    check.add_argument("--launcher", default="auto", help="launcher of the ranks (default: auto)")
    check.add_argument("--compare", nargs="*", type=Path, metavar="FILE",
                       help="no FILE: measure in plain MPI, a gang, a container and guests; one "
                       "FILE: measure and compare with it; two: compare them")  # fmt: skip
    check.add_argument(
        "--container",
        default=places.CONTAINER,
        metavar="COMMAND",
        help="--compare without FILE: the command that runs a command in a container (default: "
        f"{places.CONTAINER})",
    )
    check.add_argument(
        "--guest",
        default="vc",
        metavar="NAME",
        help="--compare without FILE: the virtual cluster, which this machine has joined "
        "(default: vc)",
    )
    return parser
