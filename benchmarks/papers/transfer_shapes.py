"""Gittens et al. (2018), Tables II and III: a tall and a wide matrix, senders and receivers."""

from __future__ import annotations

import statistics
from functools import partial
from typing import Any

import numpy as np
import ray

from alchemist_ray import AlchemistSession
from alchemist_ray.plural import counted
from benchmarks.clients_spark import cached_rows
from benchmarks.papers.experiment import (
    BLUE,
    GREY,
    ORANGE,
    Page,
    Sample,
    Setting,
    less,
    repeated,
    side,
)
from benchmarks.papers.spark import missing

SHAPES = {"tall": (5_120_000, 10_000), "wide": (40_000, 1_280_000)}
DIVISORS = {"small": 2500.0, "node": 100.0, "cluster": 10.0}
# Seconds for 400 GB: from and to the numbers of nodes that the paper varies.
PRINTED = {
    "tall": "62-94 s whatever the node counts",
    "wide": "53-60 s with 8 receiving nodes, 12-19 s with 40 to 56",
}
MARGIN = 1.5
CELLS, MIDDLE = (1.04, 6.8), 2.5  # times as long as wide, cell by cell of Tables II and III
FAR = 2  # "far less" is at most half
EXECUTOR_MEMORY = {"small": "2GB", "node": "4GB", "cluster": "8GB"}
Times = dict[tuple[str, int, int], Sample]  # shape, executors (0: NumPy), ranks


def run(setting: Setting) -> Page:
    """From NumPy, and from rows in the memory of Spark's executors on Ray."""
    divisor = setting.divisor(DIVISORS)
    sizes = {name: (side(m, divisor), side(n, divisor)) for name, (m, n) in SHAPES.items()}
    cpus = ray.cluster_resources()["CPU"]
    counts = [count for count in setting.gangs() if 2 * count <= cpus]  # executors and ranks
    nbytes = 8 * sizes["tall"][0] * sizes["tall"][1]
    page = Page(
        "transfer_shapes",
        "Gittens et al. 2018, Tables II and III: tall and wide matrices",
        f"the paper's shapes with bytes divided by {divisor:g} (each side by {divisor**0.5:.3g}), "
        f"{nbytes / 1e6:.0f} MB; senders and receivers are powers of two up to "
        f"{counts[-1]}",
    )
    times: Times = {}
    for ranks in counts:
        with AlchemistSession(ranks, progress=False) as als:
            for name, size in sizes.items():
                A = np.random.default_rng(0).random(size)
                times[name, 0, ranks] = repeated(partial(_send, als, A), setting.runs)
    reason = missing(setting)
    if reason is None:
        for executors in counts:
            _from_executors(setting, sizes, executors, counts, times)
    page.data = {", ".join(map(str, case)): found for case, found in times.items()}
    page.data |= {"sizes": sizes, "bytes": nbytes, "without Spark": reason}
    fill(page)
    return page


def fill(page: Page) -> None:
    """Table, verdicts and figure of the times that the page has."""
    sizes, reason = page.data["sizes"], page.data["without Spark"]
    times: Times = {}
    for case, values in page.data.items():
        if case.count(", ") == 2:
            shape, senders, ranks = case.split(", ")
            times[shape, int(senders), int(ranks)] = Sample(values)
    counts = sorted({ranks for _, _, ranks in times})
    receivers = [f"to {counted(ranks, 'rank')}, s" for ranks in counts]
    add = page.table("shape", "size", "senders", *receivers, "the paper, 400 GB")
    for name, (m, n) in sizes.items():
        for senders in (0, *counts):
            who = "NumPy, 1 process" if senders == 0 else counted(senders, "Spark executor")
            cells = [times.get((name, senders, ranks), reason or "-") for ranks in counts]
            add(name, f"{m} x {n}", who, *cells, PRINTED[name])
    _conclude(page, times, reason, page.data["bytes"])
    page.draw = lambda figure: _draw(figure, times)


def _send(als: AlchemistSession, data: Any) -> None:
    als.send_matrix(data).free()


def _from_executors(
    setting: Setting,
    sizes: dict[str, tuple[int, int]],
    executors: int,
    counts: list[int],
    times: Times,
) -> None:
    """Sends of a RowMatrix with a partition on each executor, to gangs of growing size."""
    from alchemist_ray.clients.spark import init_spark, stop_spark

    quiet = {"spark.log.level": "ERROR", "spark.ui.showConsoleProgress": "false"}
    memory = EXECUTOR_MEMORY[setting.scale]
    spark = init_spark("papers", executors, 1, memory, configs=quiet)
    try:
        for ranks in counts:
            with AlchemistSession(ranks, progress=False) as als:
                for name, size in sizes.items():
                    handle = als.send_matrix(np.random.default_rng(0).random(size))
                    with cached_rows(spark, handle, executors) as rows:
                        times[name, executors, ranks] = repeated(
                            partial(_send, als, rows), setting.runs
                        )
                    handle.free()
    finally:
        stop_spark()


def _conclude(page: Page, times: Times, reason: str | None, nbytes: int) -> None:
    claim = "messages of a row each make tall matrices slower than wide ones of the same bytes"
    ratios = {
        senders > 0: [
            times["tall", s, ranks].mean / times["wide", s, ranks].mean
            for _, s, ranks in times
            if (s > 0) == (senders > 0)
        ]
        for _, senders, _ in times
    }
    where = "2018, IV-C"
    if True not in ratios:
        page.conclude(None, claim, where, f"of Spark there are no times: {reason}")
    else:
        middle = statistics.median(ratios[True])
        page.conclude(
            middle > MARGIN,
            claim,
            where,
            f"from Spark tall takes {middle:.2f} times as long as wide (median of all numbers of "
            f"senders and receivers; by the paper's cells {CELLS[0]} to {CELLS[1]}, median "
            f"{MIDDLE}): "
            + (
                "each row is an object of the JVM that is copied into a block"
                if middle > MARGIN
                else "rows travel in blocks of 8 MiB, not one in each message"
            ),
        )
        _variability(page, times)
        _receivers(page, times)
    fastest = max(nbytes / found.mean / 1e6 for (_, s, _), found in times.items() if s == 0)
    page.notes.append(
        f"From NumPy tall takes {statistics.median(ratios[False]):.2f} times as long as wide; the "
        f"fastest of its sends moves {fastest:.0f} MB/s."
    )


def _variability(page: Page, times: Times) -> None:
    tall, wide = (
        statistics.median(
            1e3 * found.spread
            for (shape, s, _), found in times.items()
            if (shape, s > 0) == (name, True)
        )
        for name in SHAPES
    )
    page.conclude(
        wide <= tall / FAR, "wide matrices vary far less than tall ones", "2018, IV-C",
        f"from Spark the standard deviation is {wide:.0f} ms for wide, and {tall:.0f} ms for tall "
        f"(medians of all numbers of senders and receivers; far less: "
        f"at most 1/{FAR})",
    )  # fmt: skip


def _receivers(page: Page, times: Times) -> None:
    counts = sorted({ranks for _, _, ranks in times})
    if len(counts) < 2:
        return
    senders = sorted({s for _, s, _ in times} - {0})
    pairs = {
        shape: [(times[shape, s, counts[0]], times[shape, s, counts[-1]]) for s in senders]
        for shape in SHAPES
    }
    told = "; ".join(
        f"{shape} from " + ", ".join(f"{one} to {other} s" for one, other in found)
        for shape, found in pairs.items()
    )
    falls = {shape: sum(less(b, a) for a, b in found) for shape, found in pairs.items()}
    rises = sum(less(a, b) for a, b in pairs["wide"])
    page.conclude(
        True if falls["wide"] == len(senders) else False if rises else "noise",
        "the times of wide matrices fall as receivers are added", "2018, IV-C",
        f"with {counts[-1]} ranks instead of {counts[0]}, from 1 executor and from more, they go: "
        f"{told}. A change counts if it is larger than both standard deviations together: "
        f"{falls['wide']} falls and {rises} rises of wide do, and {falls['tall']} falls of tall. "
        "The claim holds if all of wide fall, and does not if one rises",
    )  # fmt: skip
    page.not_comparable(
        "tall matrices tend slightly to be quickest between equal numbers of nodes", "2018, IV-C",
        "here all senders and receivers share one node",
    )  # fmt: skip


def _draw(figure: Any, times: Times) -> None:
    """How many times as long tall takes as wide; a band for the paper's cells."""
    axes = figure.subplots()
    cases = sorted(case[1:] for case in times if case[0] == "tall")
    ratios = [times["tall", *case].mean / times["wide", *case].mean for case in cases]
    names = [
        f"{'NumPy' if s == 0 else counted(s, 'executor')}\nto {counted(ranks, 'rank')}"
        for s, ranks in cases
    ]
    axes.axhspan(*CELLS, color=GREY, alpha=0.25, lw=0, label="the paper's cells")
    axes.axhline(MIDDLE, color=GREY, label="their median")
    axes.bar(range(len(cases)), ratios, 0.6, color=[BLUE if s else ORANGE for s, _ in cases])
    axes.axhline(1, color="black", lw=0.8)
    axes.set_xticks(range(len(cases)), names, fontsize=8)
    axes.set_ylabel("time of tall / time of wide")
    figure.legend(loc="outside upper center", ncols=2, frameon=False)
