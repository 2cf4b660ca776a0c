"""Younge et al. (SAND2017-5325), Table 4.2: spark-perf's core tests as their data grow, natively.

The rules of the verdicts are those of this page; the report's own table passes them. As a program
of its own (master, trials, limit in seconds, scales) it prints the seconds of each scale's tests.
"""

from __future__ import annotations

import json
import sys
import time
from collections import defaultdict
from collections.abc import Iterable
from itertools import pairwise
from typing import Any, Literal

from benchmarks.harness import printed
from benchmarks.papers import spark
from benchmarks.papers.experiment import BLUE, GREY, Page, Sample, Setting, cited, quartiles
from benchmarks.papers.spark_perf import core, timed
from benchmarks.spark_mllib import started

# At scale 1.0, of what the report says of 10.0: 4 billion records with 400 thousand keys.
RECORDS, KEYS = 400_000_000, 40_000
PARTITIONS = 400  # as spark-perf, grown with the scale, too
TASKS = 10_000
SCALES = {
    "small": (0.00001, 0.0001, 0.001, 0.01),
    "node": (0.001, 0.01, 0.1, 1.0),
    "cluster": (0.001, 0.01, 0.1, 1.0, 10.0),
}
LIMIT_S = {"small": 1200.0, "node": 3600.0, "cluster": 7200.0}  # no further trial begins after it
MEMORY_GB = 6
SCHEDULING, TESTS = (
    "scheduling-throughput",
    ("agg-by-key", "agg-by-key-int", "agg-by-key-naive", "sort-by-key", "sort-by-key-int",
     "count", "count-with-filter"),
)  # fmt: skip
AGGREGATIONS = TESTS[:3]
REPORTED = {  # Table 4.2, seconds by scale: scheduling, then TESTS
    0.001: (2.6585, 0.106, 0.1085, 0.199, 0.114, 0.1125, 0.034, 0.0575),
    0.01: (2.6285, 0.219, 0.1905, 0.437, 0.3065, 0.3765, 0.0395, 0.0935),
    0.1: (2.683, 0.474, 0.4135, 0.9605, 0.839, 0.7075, 0.056, 0.1495),
    1.0: (2.6975, 2.24, 1.886, 5.19, 2.976, 1.797, 0.162, 0.2665),
    10.0: (2.642, 15.429, 47.629, 32.9335, 5.378, 3.9455, 1.1095, 1.1935),
}
SMALL_STEPS = 2  # of scales, while problems are small; the next step is that of the aggregations
TWICE, FOUR_TO_FIVE, SCHEDULED_S = (1.4, 2.8), (3.5, 5.5), 2.7
PLACE = "report, chapter 4, Apache Spark"
RULE = (
    "All scales run in turns in one Spark. A growth is the median of the quotients of two scales "
    "in a turn; its range is that of their quartiles. It counts surely if its range is within the "
    f'limits, "roughly twice" {TWICE[0]} to {TWICE[1]}, "4 to 5 times" {FOUR_TO_FIVE[0]} to '
    f"{FOUR_TO_FIVE[1]}, and at most if a part of it is. A claim holds if enough growths count "
    "surely, does not hold if too few count at most, else it cannot be told. Problems are small in "
    f"the first {SMALL_STEPS} steps; aggregations are judged in the next one."
)

Table = dict[float, dict[str, Sample]]  # scale, test: seconds of the trials


def run(setting: Setting) -> Page:
    """Every test at each scale, the smallest first."""
    scales = [scale / (setting.divide or 1) for scale in SCALES[setting.scale]]
    page = Page(
        "spark_scales",
        "Younge et al. 2017, Table 4.2: spark-perf as data grow",
        f"Spark on {setting.cores} cores of one machine, natively (the report: guests on a Cray "
        f"XC30); scale 1.0 has {RECORDS / 1e6:.0f} million records, {KEYS} keys and {PARTITIONS} "
        "partitions",
        shown="median (lower to upper quartile)",
    )
    reason = spark.missing(setting) or spark.missing_master(setting)
    if reason is not None:
        page.notes.append(f"Not measured: {reason}.")
        return page
    limit_s = LIMIT_S[setting.scale]
    told = printed(
        "benchmarks.papers.spark_scales", spark.master(setting), setting.runs, limit_s, *scales,
        limit_s=4 * limit_s,
    )  # fmt: skip
    if isinstance(told, str):
        page.notes.append(f"Not measured: Spark {told}.")
        return page
    page.data = told[-1]
    fill(page)
    return page


def fill(page: Page) -> None:
    """Table, verdicts and figure of the times that the page has."""
    table: Table = {
        float(scale): {name: Sample(seconds) for name, seconds in its.items()}
        for scale, its in page.data.items()
    }
    report = reported()
    add = page.table("scale", "records", SCHEDULING, *TESTS)
    for scale, its in table.items():
        add(f"{scale:g}", f"{int(RECORDS * scale):,}",
            *(_cell(its[name]) for name in (SCHEDULING, *TESTS)))  # fmt: skip
    for scale, its in report.items():
        add(f"{scale} ({cited('report, Table 4.2')})", f"{int(RECORDS * scale):,}",
            *(f"{its[name].mean:.4g}" for name in (SCHEDULING, *TESTS)))  # fmt: skip
    add = page.table("growth, 10 times the data", *TESTS)
    for title, its in (("here", table), ("the report", report)):
        for small, large in pairwise(its):
            add(f"{small:g} to {large:g}, {title}",
                *(_cell(_growth(its, name, small, large)) for name in TESTS))  # fmt: skip
    page.notes.append(RULE)
    for claim, (holds, because) in verdicts(table, loaded=page.loaded).items():
        page.conclude(holds, claim, PLACE, because)
    page.draw = lambda figure: _draw(figure, table, report)


def reported() -> Table:
    """The report's Table 4.2."""
    return {
        scale: {name: Sample([s]) for name, s in zip((SCHEDULING, *TESTS), its, strict=True)}
        for scale, its in REPORTED.items()
    }


def verdicts(
    table: Table, *, loaded: bool = False
) -> dict[str, tuple[bool | Literal["noise"] | None, str]]:
    """Whether each of the report's three claims holds in a table, and why; None: no data.

    `loaded`: the machine had other work, so that too many seconds refute nothing.
    """
    steps = list(pairwise(table))
    small = [
        quartiles(_growth(table, name, *step)) for step in steps[:SMALL_STEPS] for name in TESTS
    ]
    large = [
        quartiles(_growth(table, name, *step))
        for step in steps[SMALL_STEPS : SMALL_STEPS + 1]
        for name in AGGREGATIONS
    ]
    scheduled = [quartiles(its[SCHEDULING]) for its in table.values()]
    within = [high < SCHEDULED_S for _, _, high in scheduled]
    beyond = [low >= SCHEDULED_S for low, _, _ in scheduled]
    middles = ", ".join(f"{middle:.2f}" for _, middle, _ in large)
    took = ", ".join(f"{middle:.2f}" for _, middle, _ in scheduled)
    twice = _counts(small, TWICE)
    return {
        "10 times the data take roughly twice the time in most tests while problems are small": (
            _told(*twice, len(small) // 2 + 1) if small else None,
            f"{twice[0]} of {len(small)} growths count surely and {twice[1]} at most; their median "
            f"is {quartiles([middle for _, middle, _ in small])[1] if small else 0:.2f}",
        ),
        "aggregation takes 4 to 5 times as long for 10 times the data as problems grow": (
            _told(*_counts(large, FOUR_TO_FIVE), len(AGGREGATIONS)) if large else None,
            f"the three aggregations take {middles or 'no'} times as long",
        ),
        "10,000 tasks are scheduled in under 2.7 s at all scales": (
            True if all(within) else False if any(beyond) and not loaded else "noise",
            f"they took {took} s, with {TASKS} tasks that return the number of their elements"
            + ", on a loaded machine, where more seconds refute nothing" * loaded,
        ),
    }


def _cell(sample: Sample) -> str:
    low, middle, high = quartiles(sample)
    return f"{middle:.3g}" + (f" ({low:.3g} to {high:.3g})" if len(sample) > 1 else "")


def _growth(table: Table, name: str, small: float, large: float) -> Sample:
    """How many times as long a test takes at a larger scale, by turns."""
    return Sample(b / a for a, b in zip(table[small][name], table[large][name], strict=True))


def _counts(
    growths: Iterable[tuple[float, float, float]], limits: tuple[float, float]
) -> tuple[int, int]:
    """How many are within limits as a whole, and how many with a part of their range."""
    low, high = limits
    ranges = [(least, most) for least, _, most in growths]
    return (
        sum(low <= least and most <= high for least, most in ranges),
        sum(least <= high and low <= most for least, most in ranges),
    )


def _told(surely: int, possibly: int, needed: int) -> bool | Literal["noise"]:
    return True if surely >= needed else False if possibly < needed else "noise"


def _draw(figure: Any, table: Table, report: Table) -> None:
    """Growth by step of every test, here and in the report."""
    axes = figure.subplots()
    axes.axhspan(*TWICE, color="#dddddd", lw=0)
    axes.axhspan(*FOUR_TO_FIVE, color="#eeeeee", lw=0)
    for its, colour, title in ((report, GREY, "the report"), (table, BLUE, "here")):
        steps = list(pairwise(its))
        for name in TESTS:
            marks = "o-" if name in AGGREGATIONS else "x--"
            growths = [quartiles(_growth(its, name, *step))[1] for step in steps]
            axes.plot(range(1, len(steps) + 1), growths, marks, color=colour, label=title, lw=1)
            title = None
    axes.axhline(10, color="black", lw=0.8)
    axes.set_xticks(range(1, 5))
    axes.set(
        xlabel="step of scale, each 10 times the data (circles: aggregations)",
        ylabel="time / time at the scale before",
    )
    axes.legend(frameon=False)


def main(master: str, trials: int, limit_s: float, *scales: float) -> None:
    """Run each test at all scales, in turns; the first turn does not count."""
    session = started(native=False, master=master, memory_gb=MEMORY_GB)
    works = {
        scale: core(
            session, max(1, int(RECORDS * scale)), max(2, int(KEYS * scale)),
            max(1, int(PARTITIONS * scale)), TASKS,
        )
        for scale in scales
    }  # fmt: skip
    took: dict[float, dict[str, list[float]]] = {scale: defaultdict(list) for scale in scales}
    begun = time.monotonic()
    for turn in range(1 + trials):
        if turn > 2 and time.monotonic() - begun > limit_s:
            break
        for name in (SCHEDULING, *TESTS):
            for scale in scales:
                seconds = timed(name, works[scale][name])
                if turn:
                    took[scale][name].append(seconds)
        print(json.dumps(took), flush=True)
    session.stop()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]), *map(float, sys.argv[4:]))
