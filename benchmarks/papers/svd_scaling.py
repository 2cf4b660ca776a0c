"""Gittens et al. (2018), Figures 3 and 4: truncated SVD, scaling and the share of transfers."""

from __future__ import annotations

from typing import Any

import numpy as np

from alchemist_ray import AlchemistSession
from benchmarks.papers.experiment import Page, Sample, Setting, side
from benchmarks.papers.phases import Phases, bars, means, measured
from benchmarks.papers.spark import LIMIT_S, Alone

ROWS = (312_500, 625_000, 1_250_000, 2_500_000, 5_000_000)
COLUMNS, RANK = 10_000, 20
PAPER_SHARE = 20.0  # % of the run are transfers
DIVISORS = {"small": 1000.0, "node": 100.0, "cluster": 10.0}
WEAK_ROWS = ROWS[-2]  # of the data set whose columns are replicated


def run(setting: Setting) -> Page:
    """Growing matrices; one matrix on more ranks; columns replicated with the ranks."""
    divisor = setting.divisor(DIVISORS)
    n = side(COLUMNS, divisor)
    sizes = [(side(m, divisor), n) for m in ROWS]
    gangs = setting.gangs()
    page = Page(
        "svd_scaling",
        "Gittens et al. 2018, Figures 3 and 4: truncated SVD",
        f"the paper's m x 10,000, bytes divided by {divisor:g} (each side by {divisor**0.5:.3g}), "
        f"rank {RANK}; weak scaling repeats the columns of one matrix once for each rank; a Spark "
        f"case has {LIMIT_S[setting.scale]:.0f} s",
        figure_inches=(11.0, 4.0),
    )
    random = np.random.default_rng(0)
    plain, tuned = Alone(setting), Alone(setting, "--native")
    growing: list[Phases] = []
    with AlchemistSession(gangs[-1], progress=False) as als:
        for size in sizes:
            growing.append(_measured(als, random.standard_normal(size), setting.runs))
    spark = [tuple(which.times("svd", *size, RANK) for which in (plain, tuned)) for size in sizes]
    add = page.table(
        "m x n", "MB", "send, s", "compute, s", "receive, s", "together, s", "transfers, %",
        "Spark alone, s", "Spark with native BLAS, s",
    )  # fmt: skip
    for size, times, theirs in zip(sizes, growing, spark, strict=True):
        add(f"{size[0]} x {n}", f"{8e-6 * size[0] * n:.3g}", *times.cells(), *theirs)
    strong = _scaling(page, "strong", setting, gangs, sizes[-1], random)
    weak = _scaling(page, "weak", setting, gangs, (side(WEAK_ROWS, divisor), n), random)
    _conclude(page, growing, spark, gangs, strong, weak)
    page.data = {
        "sizes": sizes, "gangs": gangs,
        "growing": [times.values for times in growing],
        "strong": [times.values for times in strong],
        "weak": [times.values for times in weak],
        "spark": [[f if isinstance(f, str) else f.values for f in theirs] for theirs in spark],
    }  # fmt: skip
    page.draw = lambda figure: _draw(figure, sizes, growing, spark, gangs, strong, weak)
    return page


def _measured(als: AlchemistSession, A: Any, runs: int) -> Phases:
    svd = als.load_library("linalg").truncated_svd
    return measured(
        lambda: [als.send_matrix(A)], lambda a: svd(a, RANK), lambda result: result.fetch(), runs
    )


def _scaling(
    page: Page, kind: str, setting: Setting, gangs: list[int], size: tuple[int, int], random: Any
) -> list[Phases]:
    """One matrix on more and more ranks; `weak`: its columns are repeated once for each rank."""
    base = random.standard_normal(size)
    add = page.table(
        f"{kind} scaling: ranks", "m x n", "send, s", "compute, s", "receive, s", "together, s",
        "transfers, %", "efficiency of compute, %",
    )  # fmt: skip
    found: list[Phases] = []
    for ranks in gangs:
        A = np.tile(base, (1, ranks)) if kind == "weak" else base
        with AlchemistSession(ranks, progress=False) as als:
            found.append(_measured(als, A, setting.runs))
        add(
            ranks, f"{A.shape[0]} x {A.shape[1]}", *found[-1].cells(),
            f"{100 * _efficiency(kind, gangs, found)[-1]:.0f}",
        )  # fmt: skip
    return found


def _efficiency(kind: str, gangs: list[int], found: list[Phases]) -> list[float]:
    """Of the computation: the first time by each, and by the ranks if the matrix is the same."""
    first = found[0].compute.mean
    return [
        first / times.compute.mean / (ranks if kind == "strong" else 1)
        for ranks, times in zip(gangs, found, strict=False)
    ]


def _conclude(
    page: Page, growing: list[Phases], spark: list[Any], gangs: list[int], *scalings: list[Phases]
) -> None:
    shares = [times.share for times in growing]
    page.not_comparable(
        f"transfers take about {PAPER_SHARE:.0f} % of a run",
        "the paper sends from Spark to other nodes; here data comes from NumPy on the same node, "
        f"and transfers take {min(shares):.1f} to {max(shares):.1f} %",
    )
    known = [
        (theirs[0].mean / times.total, theirs[0].mean)
        for times, theirs in zip(growing, spark, strict=True)
        if isinstance(theirs[0], Sample)
    ]
    claim = "Spark is slower, and finishes only the smallest size within its limit"
    if not known:
        page.conclude(None, claim, f"of Spark there are no times: {spark[0][0]}")
    else:
        factors = ", ".join(f"{factor:.0f}" for factor, _ in known)
        page.conclude(
            len(known) == 1 and known[0][0] > 1,
            claim,
            f"it finishes {len(known)} of {len(spark)} sizes and takes {factors} times as long",
        )
    if len(gangs) > 1:
        for kind, found in zip(("strong", "weak"), scalings, strict=True):
            page.measured(
                f"{kind} scaling of the SVD: {gangs[-1]} ranks reach "
                f"{100 * _efficiency(kind, gangs, found)[-1]:.0f} % of the ideal; more cannot be "
                "said with so few cores, which also share the memory's bandwidth"
            )


def _draw(
    figure: Any, sizes: Any, growing: Any, spark: Any, gangs: Any, strong: Any, weak: Any
) -> None:
    left, *rest = figure.subplots(1, 3)
    bars(left, means(growing), [str(m) for m, _ in sizes], named=True)
    left.set_xlabel("rows")
    for mark, which, name in (("kx", 0, "Spark alone"), ("k+", 1, "with native BLAS")):
        known = [(i, t[which].mean) for i, t in enumerate(spark) if isinstance(t[which], Sample)]
        left.plot([i for i, _ in known], [s for _, s in known], mark, label=name)
    left.set_title("growing matrices")
    for axes, found, name in zip(rest, (strong, weak), ("strong", "weak"), strict=True):
        bars(axes, means(found), list(map(str, gangs)), named=False)
        axes.set_xlabel("ranks")
        axes.set_title(f"{name} scaling")
    left.legend(fontsize=7)
