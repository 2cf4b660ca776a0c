"""Common code of the papers' experiments: scales, repeated runs, pages of results.

A page states what a paper claims, and whether that holds here; the table has our values and the
paper's printed ones.
"""

from __future__ import annotations

import json
import math
import os
import platform
import re
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal

import ray

from benchmarks.harness import (
    BLUE,
    ORANGE,
    RESULTS,
    blas_kernels,
    markdown,
    save_figure,
    table_line,
    timed,
    write_part,
)

SCALES = ("small", "node", "cluster")
PAGES = RESULTS / "papers"
GREY = "#9a9a9a"  # the paper's values in figures
PACKAGES = ("numpy", "ray", "pyspark")
PAPERS = {
    "2018": "https://arxiv.org/abs/1806.01270",  # Gittens et al., CUG
    "KDD 2018": "https://arxiv.org/abs/1805.11800",  # Gittens et al., KDD
    "2019": "https://arxiv.org/abs/1910.01354",  # Rothauge et al., CUG
    "report": "https://doi.org/10.2172/1367280",  # Younge et al., SAND2017-5325
}

__all__ = ["BLUE", "GREY", "ORANGE", "PAGES", "SCALES", "Page", "Sample", "Setting", "repeated"]


@dataclass(frozen=True, slots=True)
class Setting:
    """The scale of a run.

    Parameters
    ----------
    scale : {"small", "node", "cluster"}
    runs : int
        Of each measurement.
    divide : float, optional
        The paper's bytes divided by ours, instead of an experiment's own number for the scale.
    spark : bool
        Whether Spark is measured.
    spark_master : str, optional
        Spark's own cluster, for Spark alone. Default: the cores of this machine.
    """

    scale: str = "small"
    runs: int = 3
    divide: float | None = None
    spark: bool = True
    spark_master: str | None = None

    def divisor(self, divisors: dict[str, float]) -> float:
        """How many times fewer bytes than the paper's, at this scale."""
        return self.divide or divisors[self.scale]

    @property
    def cores(self) -> int:
        """Cores for ranks: of this machine, or of the cluster."""
        if self.scale == "cluster" and ray.is_initialized():
            return int(ray.cluster_resources()["CPU"])
        return len(os.sched_getaffinity(0))

    def gangs(self) -> list[int]:
        """Sizes of gangs: the powers of two up to the number of cores."""
        return [1 << k for k in range(self.cores.bit_length())]


def side(papers: int, divisor: float) -> int:
    """A side of a matrix of the paper: both sides shrink alike."""
    return max(1, round(papers / math.sqrt(divisor)))


ROUTES = ("shared memory", "TCP", "from an IndexedRowMatrix")  # for which a claim is judged


class Sample(tuple[float, ...]):
    """Several runs of one measurement."""

    __slots__ = ()

    @property
    def mean(self) -> float:
        return statistics.fmean(self)

    @property
    def spread(self) -> float:
        """Standard deviation of the runs; 0 for a single one."""
        return statistics.stdev(self) if len(self) > 1 else 0.0

    def __str__(self) -> str:
        if len(self) == 1:
            return f"{self.mean:.3g} (1 run)"
        return f"{self.mean:.3g} ± {self.spread:.1g}"


def known(stored: Any) -> Any:
    """A measurement that was kept as JSON, or the text that says why it is missing."""
    return stored if isinstance(stored, str) else Sample(stored)


EFFECT = (
    "A level has an effect where the quartiles of its ratios lie on one side of 1, so that the "
    "middle half of all settings agree; the ratios are of medians of the same settings."
)


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """Lower quartile, median, upper quartile; of one value three times itself."""
    if len(values) < 2:
        return values[0], values[0], values[0]
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high


def effect(ratios: Sequence[float]) -> int:
    """1 if ratios are above 1, -1 if they are below, 0 if that is noise; see `EFFECT`."""
    low, _, high = quartiles(ratios)
    return (low > 1) - (high < 1)


def less(one: Sample, other: Sample) -> bool:
    """Whether a mean is smaller by more than both standard deviations together."""
    return other.mean - one.mean > one.spread + other.spread


def cited(where: str) -> str:
    """A link to a place in a paper, as ``2018, IV-B``."""
    return f"[{where}]({PAPERS[where.partition(',')[0]]})"


def repeated(work: Callable[[], object], runs: int) -> Sample:
    """Seconds of several runs, after one that is not counted."""
    work()
    return Sample([timed(work) for _ in range(runs)])


def draw_bars(
    axes: Any,
    groups: Sequence[str],
    series: Mapping[str, Sequence[float | str]],
    colours: Sequence[str],
) -> None:
    """Bars side by side in each group, and a line at 1.

    Parameters
    ----------
    series : mapping of str to sequence
        By label: the heights in all groups, or a text that says why they are missing.
    """
    width = 0.8 / len(series)
    axes.axhline(1, color="black", lw=0.8)
    for k, ((label, its), colour) in enumerate(zip(series.items(), colours, strict=True)):
        at = [group + (k - (len(series) - 1) / 2) * width for group in range(len(groups))]
        heights = [0 if isinstance(value, str) else value for value in its]
        bars = axes.bar(at, heights, 0.9 * width, color=colour, label=label)
        words = [
            value if isinstance(value, str) else f"{value:.{1 if value >= 10 else 2}f}"
            for value in its
        ]
        for word, text in zip(words, axes.bar_label(bars, words, fontsize=8), strict=True):
            text.set_rotation(90 if " " in word else 0)
            text.set_bbox({"facecolor": "white", "edgecolor": "none", "pad": 0.5})
    axes.set_xticks(range(len(groups)), groups, fontsize=8)


@dataclass(slots=True)
class Page:
    """The results of one experiment.

    Parameters
    ----------
    name : str
        Of the files.
    source : str
        Paper, and its figure or table.
    rule : str
        How the sizes were scaled.
    """

    name: str
    source: str
    rule: str
    tables: list[tuple[tuple[str, ...], list[tuple[str, ...]]]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    verdicts: list[str] = field(default_factory=list)
    data: dict[str, Any] = field(default_factory=dict)
    draw: Callable[[Any], None] | None = None  # on a matplotlib figure
    figure_inches: tuple[float, float] = (8.0, 4.0)
    once: bool = False  # each measurement is a single run, whatever the setting says
    shown: str = "mean ± standard deviation"  # of the runs of a measurement
    stored: dict[str, Any] | None = None  # the JSON of the run that the data is from
    load: float = field(default_factory=lambda: os.getloadavg()[0])  # when it began
    begun: float = field(default_factory=time.monotonic)

    def table(self, *head: str) -> Callable[..., None]:
        """A new table; returns the function that adds a row and prints it."""
        rows: list[tuple[str, ...]] = []
        self.tables.append((head, rows))

        def add(*cells: object) -> None:
            if len(cells) != len(head):
                raise ValueError(f"{len(cells)} cells for {len(head)} columns: {cells}")
            rows.append(tuple(map(str, cells)))
            print(table_line(rows[-1]), flush=True)

        return add

    @property
    def loaded(self) -> bool:
        """Whether other work had the machine when the data were taken: its seconds say little."""
        machine = self.stored["machine"] if self.stored else {"load": self.load}
        return bool(machine["load"] > 2 * (machine.get("cpus") or os.cpu_count() or 1))

    @classmethod
    def read(cls, name: str, folder: Path = PAGES) -> Page:
        """The page of a run that is stored, with its data only."""
        stored = json.loads((folder / f"{name}.json").read_text())
        page = cls(name, stored["source"], stored["rule"], stored=stored)
        page.data = stored["data"]
        return page

    def conclude(
        self, holds: bool | Literal["noise"] | None, claim: str, where: str, because: str
    ) -> None:
        """State whether a claim of the paper holds here; None: it cannot be tested here.

        "noise": the runs differ by more than what the claim is about. `where` is the section of
        the claim (`cited`).
        """
        said = {
            True: "The paper's claim holds here",
            False: "The paper's claim does not hold here",
            "noise": "The paper's claim is neither confirmed nor refuted here",
            None: "The paper's claim cannot be tested here",
        }[holds]
        self._say(f"**{said}:** {claim} ({cited(where)}), because {because}.")

    @staticmethod
    def judged(verdict: str) -> tuple[str, str, str] | None:
        """Claim without its route, section and verdict, of a line of `verdicts`; None: no claim."""
        found = re.match(r"\*\*(.+?):\*\* (.+?) \(\[(.+?)\]\(", verdict)
        if found is None or found[1].startswith("Measured here"):
            return None
        said, claim, where = found.groups()
        return re.sub(rf" \((?:{'|'.join(ROUTES)})\)$", "", claim), where, said

    def not_comparable(self, claim: str, where: str, because: str) -> None:
        """The setting differs too much from the paper's to judge a claim by it."""
        self._say(f"**Not comparable with the paper:** {claim} ({cited(where)}); {because}.")

    def measured(self, text: str) -> None:
        """State a result that no paper makes a claim about."""
        self._say(f"**Measured here, no claim of the papers:** {text}.")

    def _say(self, verdict: str) -> None:
        self.verdicts.append(verdict)
        print(verdict, flush=True)

    def text(self, setting: Setting) -> str:
        """What stands between the markers of the page."""
        where = self.stored["where"] if self.stored else self._where(setting)
        parts = [where, f"Scale `{setting.scale}`: {self.rule}."]
        parts += [markdown(head, rows).rstrip() for head, rows in self.tables]
        parts += self.notes + self.verdicts
        if self.draw is not None:
            parts.append(f"![{self.source}]({self.name}.png)")
        return "\n\n".join(parts) + "\n"

    def _where(self, setting: Setting) -> str:
        seconds = time.monotonic() - self.begun
        runs = f"{setting.runs} runs of each measurement, {self.shown}"
        runs = "one run of each measurement" if self.once else runs
        cores = os.cpu_count() or 1
        versions = [f"Python {platform.python_version()}"]
        versions += [f"{name} {found}" for name in PACKAGES if (found := _version(name))]
        text = (
            f"{cores} cores, {_memory_gb():.0f} GB; {', '.join([*versions, *blas_kernels()])}; "
            f"{runs}; all took {seconds:.0f} s."
        )
        if self.loaded:  # the experiment before this one also counts
            text += f" **Taken on a loaded machine** (load {self.load:.1f} at the begin)."
        return text

    def save(self, setting: Setting, folder: Path = PAGES) -> None:
        """Write table and verdicts into ``<name>.md``, and ``<name>.json`` and ``<name>.png``."""
        folder.mkdir(parents=True, exist_ok=True)
        machine = {"cpus": os.cpu_count(), "python": platform.python_version(), "load": self.load}
        machine |= {name: _version(name) for name in PACKAGES}
        run = {"scale": setting.scale, "machine": machine, "where": self._where(setting)}
        self.stored = {key: self.stored[key] for key in run} if self.stored else run
        record = {"name": self.name, "source": self.source, "rule": self.rule}
        record |= self.stored | {"data": self.data, "verdicts": self.verdicts}
        (folder / f"{self.name}.json").write_text(json.dumps(record, indent=1) + "\n")
        if self.draw is None:
            (folder / f"{self.name}.png").unlink(missing_ok=True)
        else:
            save_figure(self.draw, folder / f"{self.name}.png", self.figure_inches)
        page = folder / f"{self.name}.md"
        if not page.exists():
            page.write_text(f"# {self.source}\n\n<!-- {self.name} -->\n<!-- /{self.name} -->\n")
        write_part(page, self.name, self.text(setting))


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _memory_gb() -> float:
    if sys.platform != "linux":
        return math.nan
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 1e9
