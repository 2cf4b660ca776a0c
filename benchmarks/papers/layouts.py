"""Rothauge et al. (2019), Figure 5: layouts, buffer sizes and shapes; how much sends vary.

Sent from one array of this process, once through shared memory and once by TCP streams over
loopback, which is the route between nodes; and from an IndexedRowMatrix, as in the paper.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import pairwise, product
from statistics import median
from typing import Any

import numpy as np

from alchemist_ray import AlchemistSession
from benchmarks.clients_spark import in_jvm, local_spark
from benchmarks.harness import RESULTS, timed
from benchmarks.papers.experiment import (
    BLUE,
    EFFECT,
    GREY,
    ORANGE,
    Page,
    Sample,
    Setting,
    effect,
    quartiles,
)
from benchmarks.papers.spark import missing
from mpi_workers.data.description import DataEndpoints
from mpi_workers.data.node_connections import NodeConnections

LAYOUTS = ("VC_STAR", "MC_MR", "STAR_VC")
BUFFERS = {
    "100 KB": 10**5, "1 MB": 10**6, "10 MB": 10**7, "100 MB": 10**8, "1 GB": 10**9,
}  # fmt: skip
BASE = "VC_STAR", "100 MB"
SENDS = {"small": 10, "node": 50, "cluster": 50}
NBYTES = {"small": 120 * 10**6, "node": 2 * 10**9, "cluster": 2 * 10**9}
ASPECTS = {"narrow": 20.0, "wide": 1.25}  # the paper's rows / columns: both are tall
RANKS = 4  # a square grid; on fewer ranks MC_MR and STAR_VC are one distribution
ROUTES = ("shared memory", "TCP")
PARTITIONS = 4  # of the IndexedRowMatrix
SIMILAR = 2  # the longer of two similar times takes at most twice as long
LIMITS = 0.6, 1.8  # of the figure's axis; the paper's is from 1.0 to 1.8
WITHOUT_SPARK = "without Spark"


@contextmanager
def routed(als: AlchemistSession, route: str) -> Iterator[None]:
    """Send through shared memory, or as a process on another node would."""
    if route == "shared memory":
        yield
        return
    connection = als.connection
    near, known = connection.nodes, connection.endpoints
    nodes = tuple(
        replace(node, addresses=tuple(a for a in node.addresses if not a.startswith("unix:")))
        for node in known.nodes
    )
    connection.nodes = NodeConnections(DataEndpoints(known.token, nodes))
    try:
        yield
    finally:
        connection.nodes.close()
        connection.nodes = near


Case = tuple[str, str, str, str]  # route, shape, layout, buffer


def run(setting: Setting) -> Page:
    """Every layout, buffer and shape in turns; quartiles relative to `BASE`."""
    nbytes = int(NBYTES[setting.scale] / (setting.divide or 1))
    sends = SENDS[setting.scale] if setting.divide is None else setting.runs
    shapes = {
        name: (round((nbytes / 8 * aspect) ** 0.5), round((nbytes / 8 / aspect) ** 0.5))
        for name, aspect in ASPECTS.items()
    }
    sizes = " and ".join(f"{m} x {n} ({name})" for name, (m, n) in shapes.items())
    page = Page(
        "layouts",
        "Rothauge et al. 2019, Figure 5: layouts, buffer sizes and shapes",
        f"the paper's layouts, buffers and aspect ratios (20 and 1.25); {sends} sends of each (the "
        f"paper: 50) to {RANKS} ranks, {nbytes / 1e6:.0f} MB as {sizes}; "
        "a buffer is `AlchemistSession(buffer_bytes=...)`, the bytes that one step moves",
    )
    times: dict[Case, list[float]] = {}
    rows: dict[tuple[str, str], list[float]] = {}
    with AlchemistSession(RANKS, progress=False) as als:
        for shape, (m, n) in shapes.items():
            A = np.random.default_rng(0).random((m, n))
            for route in ROUTES:
                with routed(als, route):
                    _sends(als, A, sends, times, route, shape)
        if (reason := missing(setting)) is None:
            with local_spark() as spark:
                for shape, (m, n) in shapes.items():
                    _sends_of_rows(als, spark, (m, n), sends, rows, shape)
    page.data = {", ".join(case): found for case, found in [*times.items(), *rows.items()]}
    page.data |= {} if reason is None else {WITHOUT_SPARK: reason}
    fill(page)
    return page


def fill(page: Page) -> None:
    """Tables, verdicts and figure of the times that the page has."""
    cases = {tuple(case.split(", ")): found for case, found in page.data.items()}
    times: dict[Case, list[float]] = {case: its for case, its in cases.items() if len(case) == 4}
    rows = {case: its for case, its in cases.items() if len(case) == 2}
    _tables(page, times)
    _verdicts(page, times)
    _rows(page, rows, page.data.get(WITHOUT_SPARK))
    page.figure_inches = (11.0, 7.0)
    page.draw = lambda figure: _draw(figure, times)


def _sends(
    als: AlchemistSession, A: Any, sends: int, times: dict[Case, list[float]], *where: str
) -> None:
    """Sends of an array in turns, so that noise meets all cases alike."""
    route, shape = where
    for turn in range(sends + 1):
        for layout in LAYOUTS:
            for name, nbytes in BUFFERS.items():
                als.connection.options = replace(als.connection.options, buffer_bytes=nbytes)
                took = timed(partial(_send, als, A, layout))
                if turn:  # the first one maps memory and opens streams
                    times.setdefault((route, shape, layout, name), []).append(took)


def _sends_of_rows(
    als: AlchemistSession,
    spark: Any,
    size: tuple[int, int],
    sends: int,
    rows: dict[tuple[str, str], list[float]],
    shape: str,
) -> None:
    handle = als.send_matrix(np.random.default_rng(0).random(size))
    with in_jvm(spark, handle, PARTITIONS) as matrix:
        handle.free()
        for turn in range(sends + 1):
            for layout in LAYOUTS:
                took = timed(partial(_send, als, matrix, layout))
                if turn:
                    rows.setdefault((shape, layout), []).append(took)


def _send(als: AlchemistSession, A: Any, layout: str) -> None:
    als.send_matrix(A, layout=layout).free()


def _relative(times: dict[Case, list[float]], case: Case) -> list[float]:
    """The times of a case by the mean of the base of its route and shape."""
    base = Sample(times[(*case[:2], *BASE)]).mean
    return [took / base for took in times[case]]


def _tables(page: Page, times: dict[Case, list[float]]) -> None:
    add = page.table(
        "route", "shape", "layout", *(f"{name}: median (quartiles)" for name in BUFFERS)
    )
    for route, shape, layout in dict.fromkeys(case[:3] for case in times):
        cells = []
        for name in BUFFERS:
            low, middle, high = quartiles(_relative(times, (route, shape, layout, name)))
            cells.append(f"{middle:.2f} ({low:.2f}-{high:.2f})")
        add(route, shape, layout, *cells)
    page.notes.append(
        "Relative to the mean of VC_STAR with a buffer of 100 MB on the same route with the same "
        "shape, as in the figure (its axis ends at 1.8)."
    )
    add = page.table(
        "route", "shape", "seconds, VC_STAR, 100 MB", "spread / mean", "longest / shortest"
    )
    for route, shape in dict.fromkeys(case[:2] for case in times):
        found = Sample(times[route, shape, *BASE])
        longest = max(found) / min(found)
        add(route, shape, found, f"{found.spread / found.mean:.2f}", f"{longest:.2f}")


def _ratios(
    times: dict[Case, list[float]], route: str, place: int, level: str, base: str
) -> list[float]:
    """Medians with a level by those with another one, all else alike; `place`: in the case."""
    return [
        median(times[(*case[:place], level, *case[place + 1 :])]) / median(found)
        for case, found in times.items()
        if case[0] == route and case[place] == base
    ]


def _verdicts(page: Page, times: dict[Case, list[float]]) -> None:
    page.notes.append(EFFECT)
    for route in ROUTES:
        found = _ratios(times, route, 3, "100 KB", "100 MB")
        page.conclude(
            effect(found) > 0,
            f"larger buffers are faster ({route})",
            "2019, VI-C",
            f"100 KB takes {quartiles(found)[1]:.1f} times as long as 100 MB: each step "
            + ("is a message to the ranks' node and back" if route == "TCP" else
               "costs a call, but no message: elements are copied straight into the ranks' memory"),
        )  # fmt: skip
        _order(page, [_ratios(times, route, 2, name, "VC_STAR") for name in LAYOUTS], route)
        _wide(page, _ratios(times, route, 1, *reversed(ASPECTS)), route,
              "steps are cut by bytes, and no row is a message")  # fmt: skip
        boxes = [_box(times, route, name) for name in BUFFERS]
        heights = ", ".join(f"{1e3 * height:.2g}" for height, _ in boxes)
        shares = ", ".join(f"{100 * share:.2g}" for _, share in boxes)
        lower = [before > after for (before, _), (after, _) in pairwise(boxes)]
        best = list(BUFFERS)[[*lower, False].index(False)]
        page.conclude(
            all(lower),
            f"times vary less as buffers grow ({route})",
            "2019, Figure 5",
            f"the boxes of {', '.join(BUFFERS)} are {heights} ms high, {shares} % of their "
            f"medians: they become lower from step to step as far as {best}",
        )
    page.not_comparable(
        "larger buffers are better up to a point, with 100 MB a good compromise", "2019, VI-C",
        "that needs matrices that are many times as large as the buffers (the paper: 400 GB); of "
        "these, 100 MB move nearly all in one step. Spark's executors, the paper's route, have no "
        "such option: they cut rows into blocks of a fixed size",
    )  # fmt: skip
    _elsewhere(page)


def _elsewhere(page: Page) -> None:
    """Claims about layouts whose data are of the benchmarks `linalg` and `clients_spark`."""
    products = {
        row["what"].split(", ")[1]: row["measured"]
        for row in json.loads((RESULTS / "linalg.json").read_text())["rows"]
        if row["what"].startswith("matmul 4000 x 4000, ") and row["what"].endswith(", compute")
    }
    mine = products.pop("MC_MR")
    page.conclude(
        mine < min(products.values()), "most operations are faster in [MC,MR]", "2019, VI-C",
        f"a product of 4000 x 4000 takes {mine:.2f} times as long as NumPy's in MC_MR, and "
        + " and ".join(f"{ratio:.2f} in {name}" for name, ratio in products.items())
        + " ([linalg](../linalg.md)); of one operation, on two ranks, whose grid has one row",
    )  # fmt: skip
    rows = json.loads((RESULTS / "spark.json").read_text())["rows"]
    back = [
        (there, here)
        for kind in ("RowMatrix", "DataFrame")
        if (there := _seconds(rows, f"Spark → gang, {kind}, 100 columns, 2 partitions"))
        and (here := _seconds(rows, f"gang → Spark, {kind}, 100 columns, every row"))
    ]
    page.conclude(
        all(max(pair) < SIMILAR * min(pair) for pair in back) if back else None,
        "transfers back to Spark take similar times", "2019, VI-C",
        "there and back take "
        + " and ".join(f"{there:.3f} and {here:.3f} s" for there, here in back)
        + " for a RowMatrix and a DataFrame ([spark](../spark.md)); similar are times of which the "
        f"longer is less than {SIMILAR} times the other",
    )  # fmt: skip


def _seconds(rows: list[dict[str, Any]], what: str) -> float | None:
    """The first time in the details of a row of a benchmark."""
    for row in rows:
        if row["what"] == what and (found := re.search(r"(\d\.\d+) s\b", row["detail"])):
            return float(found[1])
    return None


def _order(page: Page, ratios: list[list[float]], where: str) -> None:
    """Both halves of the claim about layouts: which is fastest, and which is slowest."""
    _, blocks, columns = ratios
    middles = [quartiles(found)[1] for found in ratios]
    told = f"by the medians of the ratios MC_MR takes {middles[1]:.2f} and STAR_VC {middles[2]:.2f}"
    page.conclude(
        effect(blocks) > 0 and effect(columns) > 0,
        f"VC_STAR is faster than MC_MR and STAR_VC ({where})",
        "2019, VI-C",
        f"{told} of the time of VC_STAR",
    )
    page.conclude(
        effect(columns) > 0 and effect([c / b for b, c in zip(blocks, columns, strict=True)]) > 0,
        f"STAR_VC, for which rows are cut into columns, is slowest ({where})",
        "2019, VI-C",
        f"{told} of the time of VC_STAR: one pass copies the elements and cuts them by layout",
    )


def _wide(page: Page, ratios: list[float], where: str, why: str) -> None:
    page.conclude(
        effect(ratios) < 0,
        f"wide matrices are faster than narrow ones ({where})",
        "2019, VI-C",
        f"wide takes {quartiles(ratios)[1]:.2f} of the time of narrow: {why}",
    )


def _rows(page: Page, rows: dict[tuple[str, str], list[float]], reason: str | None) -> None:
    """Sends from Spark: table and verdicts."""
    where = "from an IndexedRowMatrix"
    add = page.table(where, *(f"{name}, s: median (quartiles)" for name in LAYOUTS))
    if reason is not None:
        add(f"not measured: {reason}", *["-"] * len(LAYOUTS))
        return
    for shape in ASPECTS:
        boxes = [quartiles(rows[shape, layout]) for layout in LAYOUTS]
        add(shape, *(f"{middle:.3g} ({low:.3g}-{high:.3g})" for low, middle, high in boxes))
    middles = {case: median(found) for case, found in rows.items()}
    relative = [
        [middles[shape, layout] / middles[shape, LAYOUTS[0]] for shape in ASPECTS]
        for layout in LAYOUTS
    ]
    _order(page, relative, where)
    wide = [middles["wide", layout] / middles["narrow", layout] for layout in LAYOUTS]
    _wide(page, wide, where, "rows travel in blocks, not one by one")


def _box(times: dict[Case, list[float]], route: str, buffer: str) -> tuple[float, float]:
    """Medians of the heights of boxes, lower to upper quartile: in seconds, by their medians."""
    found = [quartiles(its) for case, its in times.items() if case[::3] == (route, buffer)]
    return (
        median(high - low for low, _, high in found),
        median((high - low) / middle for low, middle, high in found),
    )


def _draw(figure: Any, times: dict[Case, list[float]]) -> None:
    """The paper's figure, on its axis; the median of a box above it is a number at the top."""
    axes = figure.subplots(len(ROUTES), len(ASPECTS), sharex=True, sharey=True, squeeze=False)
    for (i, route), (j, shape) in product(enumerate(ROUTES), enumerate(ASPECTS)):
        panel = axes[i, j]
        for k, (layout, colour) in enumerate(zip(LAYOUTS, (BLUE, ORANGE, GREY), strict=True)):
            at = np.arange(len(BUFFERS)) + 0.27 * (k - 1)
            found = [_relative(times, (route, shape, layout, name)) for name in BUFFERS]
            boxes = panel.boxplot(
                found, positions=at, widths=0.22, showfliers=False, patch_artist=True,
                manage_ticks=False, medianprops={"color": "black"},
            )  # fmt: skip
            for box in boxes["boxes"]:
                box.set_facecolor(colour)
            boxes["boxes"][0].set_label(layout)
            for x, its in zip(at, found, strict=True):
                if (middle := median(its)) > LIMITS[1]:
                    panel.annotate(f"{middle:.1f} ↑", (x, LIMITS[1]), rotation=90, fontsize=8,
                                   ha="center", va="top")  # fmt: skip
        panel.axhline(1, color="black", lw=0.6)
        panel.set_ylim(LIMITS)
        panel.set_xticks(range(len(BUFFERS)), list(BUFFERS))
        panel.set_title(f"{shape}, {route}", fontsize=9)
    figure.supylabel("time / mean of VC_STAR, 100 MB", fontsize=9)
    axes[0, 1].legend(loc="upper right", frameon=False)
