"""Rothauge et al. (2019), VI: the factors of a send, all together, as one designed experiment.

The paper measures layouts, buffers and shapes, and leaves the study of all factors together to
future work. Here every combination of two levels of six factors is measured in turns.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from math import exp, log
from statistics import fmean, median, stdev
from typing import Any

import numpy as np

from alchemist_ray import AlchemistSession
from benchmarks.harness import ratio_axis, timed
from benchmarks.papers.experiment import BLUE, Page, Setting, side
from benchmarks.papers.layouts import routed

# Of each factor the level that it is compared with, and the other one.
FACTORS = {
    "elements": ("float64", "float32"),
    "shape": ("tall", "wide"),
    "layout": ("VC_STAR", "MC_MR"),
    "buffer": ("100 MB", "1 MB"),
    "route": ("shared memory", "TCP"),
    "receivers": ("1", "2"),
}
MARGIN = 1.05  # smaller differences are noise
# Of a factor: whether its other level takes less time, by a claim, and where the claim is.
CLAIMS = (
    ("elements", True, "floats take less time than doubles", "2019, VI-A"),
    ("buffer", False, "larger buffers are faster than smaller ones", "2019, VI-C"),
    ("layout", False, "MC_MR is slightly more expensive than VC_STAR", "2019, VI-C"),
)
BUFFERS = {"1 MB": 10**6, "100 MB": 10**8}
TALL = 512_000, 100  # 410 MB of float64 before it is divided
DIVISORS = {"small": 10.0, "node": 1.0, "cluster": 1.0}

Levels = tuple[str, ...]
Ratios = dict[str, list[float]]  # of each factor, one in each setting of the others


def run(setting: Setting) -> Page:
    """Measure every combination, and each factor's ratio in every setting of the others."""
    m, n = (side(length, setting.divisor(DIVISORS)) for length in TALL)
    page = Page(
        "factors",
        "Rothauge et al. 2019, VI: all factors of a send together",
        f"{m} x {n} (tall) and {n} x {m} (wide) from NumPy; {2 ** len(FACTORS)} combinations, "
        f"{setting.runs} sends of each in turns, medians",
    )
    times: dict[Levels, list[float]] = {levels: [] for levels in product(*FACTORS.values())}
    arrays = {
        (kind, shape): np.random.default_rng(0).random(size).astype(kind)
        for kind in FACTORS["elements"]
        for shape, size in zip(FACTORS["shape"], ((m, n), (n, m)), strict=True)
    }
    for receivers in FACTORS["receivers"]:
        with AlchemistSession(int(receivers), progress=False) as als:
            for turn in range(setting.runs + 1):
                for levels, found in times.items():
                    if levels[-1] == receivers:
                        took = _send(als, arrays[levels[:2]], *levels[2:5])
                        found += [took] if turn else []  # the first one maps memory
    page.data = {", ".join(levels): found for levels, found in times.items()}
    fill(page)
    return page


def fill(page: Page) -> None:
    """Table, verdicts and figure of the times that the page has."""
    times = {tuple(levels.split(", ")): found for levels, found in page.data.items()}
    ratios = _ratios({levels: median(found) for levels, found in times.items()})
    add = page.table("factor", "from", "to", "time", "smallest", "largest")
    for factor, its in ratios.items():
        middle = exp(fmean(map(log, its)))
        add(factor, *FACTORS[factor], *(f"{value:.2f} x" for value in (middle, min(its), max(its))))
    spreads = [stdev(found) / fmean(found) for found in times.values() if len(found) > 1]
    if spreads:
        page.notes.append(
            f"The sends of one combination vary by {100 * median(spreads):.0f} % (median of the "
            f"standard deviations), in the worst one by {100 * max(spreads):.0f} %."
        )
    _conclude(page, times, ratios)
    page.draw = lambda figure: _draw(figure, ratios)


def _conclude(page: Page, times: dict[Levels, list[float]], ratios: Ratios) -> None:
    middle = {factor: exp(fmean(map(log, its))) for factor, its in ratios.items()}
    page.notes.append(
        "A claim about a factor is judged by the geometric mean of its ratios (column `time`); "
        f"differences below {100 * (MARGIN - 1):.0f} % are noise. The matrices come from NumPy, "
        "where the paper's come from Spark."
    )
    for factor, less, claim, where in CLAIMS:
        ratio = middle[factor]
        holds = ratio < 1 / MARGIN if less else ratio > MARGIN
        page.conclude(holds, claim, where, f"{FACTORS[factor][1]} takes {ratio:.2f} of the time of "
                      f"{FACTORS[factor][0]}")  # fmt: skip
    page.not_comparable(
        "more workers cost more messages, which are shorter and move at the same time",
        "2019, VI-A",
        "the sentence says not which of the two wins, and messages are not counted here: "
        f"{FACTORS['receivers'][1]} ranks take {middle['receivers']:.2f} of the time of "
        f"{FACTORS['receivers'][0]}, on one machine, where they share the cores",
    )
    wide = {
        buffer: exp(fmean(log(median(times[levels[0], "wide", *levels[2:]]) / median(found))
                          for levels, found in times.items()
                          if levels[1] == "tall" and levels[3] == buffer))
        for buffer in BUFFERS
    }  # fmt: skip
    page.conclude(
        middle["shape"] < 1 / MARGIN, "short and wide is more efficient than tall and thin",
        "2019, VI-A",
        f"wide takes {middle['shape']:.2f} of the time of tall: {wide['100 MB']:.2f} with a buffer "
        f"of 100 MB, and {wide['1 MB']:.2f} with 1 MB, which cuts each long row into pieces; no "
        "row is a message here",
    )  # fmt: skip
    for i, levels, claim in (
        (1, ("wide", "tall"), "short and wide varies less than tall and thin"),
        (
            3,
            ("100 MB", "1 MB"),
            "a small number of large messages varies less than many small ones",
        ),
    ):
        low, high = (
            median(1e3 * stdev(found) for case, found in times.items() if case[i] == level)
            for level in levels
        )
        page.conclude(
            low * MARGIN < high, claim, "2019, VI-A",
            f"the standard deviation is {low:.2f} ms with {levels[0]}, and {high:.2f} ms with "
            f"{levels[1]} (medians of the combinations)",
        )  # fmt: skip
    strongest = max(middle, key=lambda factor: abs(log(middle[factor])))
    page.measured(
        f"the strongest factor is the {strongest}; where smallest and largest are on both sides of "
        "1, the other factors decide the sign. The paper does not vary the route. Interactive "
        "against batch jobs is not compared here, on one machine"
    )


def _send(als: AlchemistSession, A: Any, layout: str, buffer: str, route: str) -> float:
    als.connection.options = replace(als.connection.options, buffer_bytes=BUFFERS[buffer])
    with routed(als, route):
        als.send_matrix(A[:1], layout=layout).free()  # opens the streams
        return timed(lambda: als.send_matrix(A, layout=layout).free())


def _ratios(times: dict[Levels, float]) -> Ratios:
    """The time with a factor's other level by that with its first, all other factors alike."""
    found: Ratios = {factor: [] for factor in FACTORS}
    for levels, took in times.items():
        for i, (factor, (first, other)) in enumerate(FACTORS.items()):
            if levels[i] == first:
                found[factor].append(times[*levels[:i], other, *levels[i + 1 :]] / took)
    return found


def _draw(figure: Any, ratios: Ratios) -> None:
    axes = figure.subplots()
    names = [f"{factor}:\n{' → '.join(FACTORS[factor])}" for factor in ratios]
    axes.boxplot(
        list(ratios.values()), orientation="horizontal", whis=(0, 100), medianprops={"color": BLUE}
    )
    axes.set_yticks(range(1, len(names) + 1), names)
    axes.invert_yaxis()
    ratio_axis(axes)
    axes.set_xlabel("time with the second level, x that with the first")
