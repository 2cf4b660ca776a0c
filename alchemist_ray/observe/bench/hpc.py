"""A small HPC benchmark, to compare a machine natively, in containers and in guests.

The measures of HPCC and HPCG, as in Younge et al. (SAND2017-5325), in seconds instead of hours. The
library ``hpc`` on the ranks (`ali.hpc`) measures and validates.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from alchemist_ray.errors import AlchemistError
from alchemist_ray.plural import counted
from alchemist_ray.session import AlchemistSession

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
    """Measure on a session's gang, in about seven times `seconds`, and 200 MiB of memory per rank.

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
    lines.append(f"{'geometric mean':44} {'':12} {'':12}   {geometric_mean(quotients):.2f}")
    return "\n".join(lines) + "\n"


def side_by_side(results: Sequence[Result], missing: Mapping[str, str]) -> str:
    """Format results in columns, with ratios to the first; over 1 means better than the first.

    Parameters
    ----------
    results : sequence of Result
        At least one.
    missing : mapping of str to str
        Labels of columns without a result, and the reasons.
    """
    first, *_ = results
    by_name = [{m.what: m for m in its.measures} for its in results]
    sizes = "; ".join(f"{its.label}: {_size(its)}, {its.mpi}" for its in results)
    labels = [its.label for its in results] + list(missing)
    lines = [sizes, f"{'':44}" + "".join(f"{label:>18}" for label in labels)]
    for measure in first.measures:
        cells = [f"{measure.value:.4g}"]
        for theirs in by_name[1:]:
            its = theirs.get(measure.what)
            cells.append("-" if its is None else f"{its.value:.4g} ({goodness(its, measure):.2f})")
        cells += ["-"] * len(missing)
        lines.append(
            f"{measure.what:44}" + "".join(f"{cell:>18}" for cell in cells) + f"  {measure.unit}"
        )
    means = []
    for theirs in by_name[1:]:
        both = [goodness(theirs[m.what], m) for m in first.measures if m.what in theirs]
        means.append(f"({geometric_mean(both):.2f})" if both else "-")
    means += ["-"] * len(missing)
    lines.append(f"{'geometric mean':44}{'':18}" + "".join(f"{mean:>18}" for mean in means))
    lines.append(f"in brackets: ratio to {first.label}; over 1 is better than {first.label}")
    lines += [f"{label}: not measured: {reason}" for label, reason in missing.items()]
    return "\n".join(lines) + "\n"


def geometric_mean(values: Sequence[float]) -> float:
    """Return the geometric mean of positive numbers."""
    return math.exp(sum(map(math.log, values)) / len(values))


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
