"""A small HPC benchmark, to compare a machine natively, in containers and in guests.

Like HPCC in Younge et al. (SAND2017-5325), in seconds instead of hours: products and copies on all
ranks at once, messages between two ranks of a node and of two nodes, sums over all ranks. The
library ``hpc`` on the ranks (`ali.hpc`) measures.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from alchemist_ray.errors import AlchemistError
from alchemist_ray.plural import counted
from alchemist_ray.session import AlchemistSession, WorkerInfo
from mpi_workers.matrix.sizes import readable

FORMAT = 1
SIZES = (8, 1 << 10, 1 << 16, 1 << 20, 1 << 22)
N, COPIED = 1000, 64 << 20
SECONDS = 1.0


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
        """Read a result of ``--json``. Raises `BenchError`."""
        try:
            told = json.loads(path.read_text())
            if told.pop("format") != FORMAT:
                raise KeyError("format")
            measures = tuple(Measure(**m) for m in told.pop("measures"))
            return cls(**told, measures=measures)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise BenchError(
                f"{path} is not a result of `alchemist bench hpc --json`: {error}"
            ) from None


def measure(session: AlchemistSession, label: str, seconds: float = SECONDS) -> Result:
    """Measure on a session's gang: `seconds` for the products, less for each other measure.

    The run takes about five times `seconds`, and 128 MiB of memory per rank.
    """
    hpc = session.load_library("hpc")
    workers = session.list_workers()
    found: list[Measure] = []
    for what, rates, unit in (
        (f"matmul {N} x {N}", hpc.matmul(N, seconds), "GFLOP/s"),
        (f"copy {readable(COPIED)}", hpc.copy(COPIED, seconds / 2), "GB/s"),
    ):
        found.append(Measure(f"{what}, per rank", median(rates), unit, True))
        found.append(Measure(f"{what}, slowest rank", min(rates), unit, True))
    for where, pair in pairs(workers).items():
        times = hpc.ping_pong(list(SIZES), *pair, seconds / 8)
        found += _messages(f"ping-pong {where}", times)
    if len(workers) > 1:
        for size, time in zip(SIZES, hpc.allreduce(list(SIZES), seconds / 8), strict=True):
            found.append(Measure(f"allreduce {readable(size)}", 1e6 * time, "us", False))
    return Result(
        label=label,
        ranks=len(workers),
        nodes=len({worker.node_id for worker in workers}),
        mpi=json.loads(hpc.about()[0])["version"],
        measures=tuple(found),
    )


def pairs(workers: Sequence[WorkerInfo]) -> dict[str, tuple[int, int]]:
    """Return two ranks of one node and two of two nodes, if they exist."""
    by_node: dict[str, list[int]] = defaultdict(list)
    for worker in workers:
        by_node[worker.node_id].append(worker.rank)
    found = {}
    for ranks in by_node.values():
        if len(ranks) > 1:
            found["within a node"] = (ranks[0], ranks[1])
            break
    if len(by_node) > 1:
        first, second = list(by_node.values())[:2]
        found["between nodes"] = (first[0], second[0])
    return found


def _messages(what: str, times: Sequence[float]) -> list[Measure]:
    found = [Measure(f"{what}, {readable(SIZES[0])}", 1e6 * times[0], "us", False)]
    for size, time in zip(SIZES[1:], times[1:], strict=True):
        found.append(Measure(f"{what}, {readable(size)}", 1e-9 * size / time, "GB/s", True))
    return found


# --- showing --------------------------------------------------------------------------


def _size(result: Result) -> str:
    return f"{counted(result.ranks, 'rank')} on {counted(result.nodes, 'node')}"


def table(result: Result) -> str:
    """Format a result for people."""
    head = f"{result.label}: {_size(result)}, {result.mpi}"
    lines = [f"  {m.what:44} {m.value:10.4g} {m.unit}" for m in result.measures]
    return "\n".join([head, *lines]) + "\n"


def compared(one: Result, other: Result) -> str:
    """Format two results with their ratios. A ratio over 1 means that `one` is better.

    Raises
    ------
    BenchError
        If they have no measure in common.
    """
    theirs: Mapping[str, Measure] = {m.what: m for m in other.measures}
    both = [(m, theirs[m.what]) for m in one.measures if m.what in theirs]
    if not both:
        raise BenchError(f"{one.label} and {other.label} have no measure in common")
    lines = [f"{'':44} {one.label:>12} {other.label:>12}   ratio (over 1: {one.label} is better)"]
    if (one.ranks, one.nodes) != (other.ranks, other.nodes):
        lines.insert(
            0,
            f"different sizes: {_size(one)}, and {_size(other)}",
        )
    quotients = []
    for mine, other_one in both:
        quotient = goodness(mine, other_one)
        quotients.append(quotient)
        lines.append(
            f"{mine.what:44} {mine.value:12.4g} {other_one.value:12.4g}   "
            f"{quotient:.2f}  ({mine.unit})"
        )
    mean = math.exp(sum(map(math.log, quotients)) / len(quotients))
    lines.append(f"{'geometric mean':44} {'':12} {'':12}   {mean:.2f}")
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
