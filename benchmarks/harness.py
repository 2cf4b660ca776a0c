"""What every benchmark shares: ratios within one run, a table, JSON, a picture.

The machines are small and shared, so absolute times mean little. Each measure
is taken in turns with its own yardstick, and the best of several rounds of both
is compared: what is reported is a ratio.
"""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

RESULTS = Path(__file__).parent / "results"
README = Path(__file__).parent / "README.md"


@dataclass(slots=True)
class Row:
    """One target of the design and what was measured.

    `target` is a bound on `measured`: at least it, or at most it where `at_most`.
    """

    what: str
    measured: float
    target: float
    at_most: bool
    unit: str  # "x <yardstick>", "s", "ms", "% of a core"
    detail: str = ""

    @property
    def met(self) -> bool:
        return self.measured <= self.target if self.at_most else self.measured >= self.target

    def line(self) -> str:
        sign = "≤" if self.at_most else "≥"
        verdict = "met" if self.met else "**missed**"
        return (
            f"| {self.what} | {self.measured:.3g} {self.unit} | {sign} {self.target:g} | "
            f"{verdict} | {self.detail} |"
        )


@dataclass(slots=True)
class Report:
    """The rows of one benchmark."""

    name: str
    rows: list[Row] = field(default_factory=list)

    def add(
        self,
        what: str,
        measured: float,
        target: float,
        unit: str,
        *,
        at_most: bool = False,
        detail: str = "",
    ) -> None:
        row = Row(what, measured, target, at_most, unit, detail)
        self.rows.append(row)
        print(row.line(), flush=True)

    def table(self) -> str:
        head = "| what | measured | target | | detail |\n|---|---|---|---|---|\n"
        return head + "\n".join(row.line() for row in self.rows) + "\n"

    def save(self) -> None:
        """Write ``results/<name>.json`` and ``.png``, and the table into the README."""
        RESULTS.mkdir(exist_ok=True)
        machine = {"cpus": os.cpu_count(), "python": platform.python_version()}
        told = {"name": self.name, "machine": machine, "rows": [asdict(row) for row in self.rows]}
        (RESULTS / f"{self.name}.json").write_text(json.dumps(told, indent=1) + "\n")
        self._draw()
        begin, end = f"<!-- {self.name} -->\n", f"<!-- /{self.name} -->"
        text = README.read_text()
        if begin in text:
            before, _, rest = text.partition(begin)
            after = rest.partition(end)[2]
            README.write_text(f"{before}{begin}{self.table()}{end}{after}")

    def _draw(self) -> None:
        import matplotlib as mpl

        mpl.use("agg")
        from matplotlib import pyplot as plt

        figure, axes = plt.subplots(figsize=(8, 0.6 + 0.45 * len(self.rows)), layout="constrained")
        scores = [
            row.target / max(row.measured, row.target / 1000)
            if row.at_most
            else row.measured / row.target
            for row in self.rows
        ]
        colours = ["#3b7dd8" if row.met else "#d8743b" for row in self.rows]
        axes.barh([row.what for row in self.rows], scores, color=colours)
        axes.axvline(1, color="black", lw=1)
        axes.set_xscale("log")
        axes.invert_yaxis()
        axes.set_xlabel("times better than the target (right of the line: met)")
        axes.set_title(self.name)
        figure.savefig(RESULTS / f"{self.name}.png", dpi=90)
        plt.close(figure)


def best(work: Callable[[], object], rounds: int = 5) -> float:
    """The shortest of several runs, in seconds."""
    return min(timed(work) for _ in range(rounds))


def timed(work: Callable[[], object]) -> float:
    """One run, in seconds."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def in_turns(works: dict[str, Callable[[], object]], rounds: int = 7) -> dict[str, float]:
    """The shortest run of each, taken in turns, so that noise meets all of them alike."""
    shortest = dict.fromkeys(works, float("inf"))
    for _ in range(rounds):
        for name, work in works.items():
            shortest[name] = min(shortest[name], timed(work))
    return shortest
