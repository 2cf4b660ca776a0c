"""Rothauge et al. (2019), VI: the factors of a send, all together, as one designed experiment.

The paper measures layouts, buffers and shapes, and leaves the study of all factors together to
future work. Here every combination of two levels of six factors is measured in turns.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from math import log
from statistics import fmean, median, stdev
from typing import Any

import numpy as np

from alchemist_ray import AlchemistSession
from benchmarks.harness import ratio_axis, timed
from benchmarks.papers.experiment import BLUE, EFFECT, Page, Setting, effect, quartiles, side
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
# Of a factor: its `effect` by a claim, and where the claim is.
CLAIMS = (
    ("elements", -1, "floats take less time than doubles", "2019, VI-A"),
    ("buffer", 1, "larger buffers are faster", "2019, VI-C"),
    ("layout", 1, "MC_MR is slightly more expensive than VC_STAR", "2019, VI-C"),
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
    add = page.table("factor", "from", "to", "median", "quartiles", "smallest", "largest")
    for factor, its in ratios.items():
        low, middle, high = (f"{value:.2f}" for value in quartiles(its))
        ends = (f"{value:.2f} x" for value in (min(its), max(its)))
        add(factor, *FACTORS[factor], f"{middle} x", f"{low}-{high}", *ends)
    spreads = [stdev(found) / fmean(found) for found in times.values() if len(found) > 1]
    if spreads:
        page.notes.append(
            f"The sends of one combination vary by {100 * median(spreads):.0f} % (median of the "
            f"standard deviations), in the worst one by {100 * max(spreads):.0f} %."
        )
    _conclude(page, times, ratios)
    page.draw = lambda figure: _draw(figure, ratios)


def _conclude(page: Page, times: dict[Levels, list[float]], ratios: Ratios) -> None:
    middle = {factor: quartiles(its)[1] for factor, its in ratios.items()}
    page.notes.append(
        f"{EFFECT} The matrices come from NumPy, where the paper's come from Spark; all have less "
        "than 100 MB, so that a buffer of 100 MB is one step."
    )
    for factor, sign, claim, where in CLAIMS:
        low, _, high = quartiles(ratios[factor])
        told = (
            f"{FACTORS[factor][1]} takes {middle[factor]:.2f} of the time of {FACTORS[factor][0]} "
            f"(quartiles {low:.2f} to {high:.2f})"
        )
        if factor == "buffer":
            told += _by_shape(times)
        page.conclude(effect(ratios[factor]) == sign, claim, where, told)
    page.not_comparable(
        "more workers cost more messages, which are shorter and move at the same time",
        "2019, VI-A",
        "the sentence says not which of the two wins, and messages are not counted here: "
        f"{FACTORS['receivers'][1]} ranks take {middle['receivers']:.2f} of the time of "
        f"{FACTORS['receivers'][0]}, on one machine, where they share the cores",
    )
    wide = {
        buffer: median(median(times[levels[0], "wide", *levels[2:]]) / median(found)
                       for levels, found in times.items()
                       if levels[1] == "tall" and levels[3] == buffer)
        for buffer in BUFFERS
    }  # fmt: skip
    page.conclude(
        effect(ratios["shape"]) < 0, "short and wide is more efficient than tall and thin",
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
        pairs = [
            (stdev(found), stdev(times[(*case[:i], levels[1], *case[i + 1 :])]))
            for case, found in times.items()
            if case[i] == levels[0]
        ]
        low, high = (median(1e3 * pair[k] for pair in pairs) for k in (0, 1))
        page.conclude(
            effect([other / one for one, other in pairs]) > 0, claim, "2019, VI-A",
            f"the standard deviation is {low:.2f} ms with {levels[0]}, and {high:.2f} ms with "
            f"{levels[1]} (medians of the combinations)",
        )  # fmt: skip
    strongest = max(middle, key=lambda factor: abs(log(middle[factor])))
    page.measured(
        f"by the medians the strongest factor is the {strongest}; where smallest and largest are "
        "on both sides of 1, the other factors decide the sign. The paper does not vary the route. "
        "Interactive against batch jobs is not compared here, on one machine"
    )


def _by_shape(times: dict[Levels, list[float]]) -> str:
    """Of each shape how many times as long a send in steps of 1 MB takes."""
    told = []
    for shape in FACTORS["shape"]:
        found = [
            median(times[(*levels[:3], "1 MB", *levels[4:])]) / median(its)
            for levels, its in times.items()
            if levels[1] == shape and levels[3] == "100 MB"
        ]
        told.append(f"{quartiles(found)[1]:.2f} for {shape}" + ", noise" * (not effect(found)))
    return f": {'; '.join(told)}"


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
