"""Gittens et al. (2018), Figures 3 and 4: truncated SVD, scaling and the share of transfers."""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from typing import Any

import numpy as np

from alchemist_ray import AlchemistSession
from benchmarks.harness import phases
from benchmarks.papers.experiment import (
    BLUE,
    ORANGE,
    Page,
    Sample,
    Setting,
    known,
    side,
)
from benchmarks.papers.phases import Phases, measured, stored
from benchmarks.papers.spark import Asked

ROWS = (312_500, 625_000, 1_250_000, 2_500_000, 5_000_000)
COLUMNS, RANK = 10_000, 20
PAPER_SHARE = 20.0  # % of the run are transfers
DIVISORS = {"small": 1000.0, "node": 100.0, "cluster": 10.0}
WEAK_ROWS = ROWS[-2]  # of the data set whose columns are replicated
LIMIT_S = {"small": 300.0, "node": 900.0, "cluster": 1800.0}  # of a run of Spark alone
CALLS = (f"computeSVD({RANK})", "computeSVD(n)")
BLAS = ("", ", native BLAS")


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
        f"run has {LIMIT_S[setting.scale]:.0f} s",
    )
    random = np.random.default_rng(0)
    with AlchemistSession(gangs[-1], progress=False) as als:
        turns = [_in_turns(als, random.standard_normal(size), setting) for size in sizes]
    strong = _scaling("strong", setting, gangs, sizes[-1], random)
    weak = _scaling("weak", setting, gangs, (side(WEAK_ROWS, divisor), n), random)
    page.data = {
        "sizes": sizes, "gangs": gangs, "growing": [mine for mine, _, _ in turns],
        "gram": [gram for _, gram, _ in turns], "spark": [theirs for *_, theirs in turns],
        "strong": strong, "weak": weak,
        "weak sizes": [(side(WEAK_ROWS, divisor), n * ranks) for ranks in gangs],
    }  # fmt: skip
    fill(page)
    return page


def fill(page: Page) -> None:
    """Tables, verdicts and figure of the times that the page has."""
    sizes, gangs = page.data["sizes"], page.data["gangs"]
    growing, strong, weak = (
        list(map(stored, page.data[kind])) for kind in ("growing", "strong", "weak")
    )
    gram = list(map(stored, page.data["gram"]))
    spark = [{way: known(its) for way, its in theirs.items()} for theirs in page.data["spark"]]
    factors = [_factors(mine, theirs) for mine, theirs in zip(growing, spark, strict=True)]
    add = page.table(
        "m x n", "MB", "send, s", "compute, s", "receive, s", "together, s", "transfers, %"
    )
    for size, times in zip(sizes, growing, strict=True):
        add(_by(size), f"{8e-6 * size[0] * size[1]:.3g}", *times.cells())
    add = page.table(
        "m x n", "the gang, together, s", "by its Gram matrix, s",
        *(f"Spark: {way}, s" for way in spark[0]), "Spark's quickest / the gang",
    )  # fmt: skip
    for size, times, mine, theirs, its in zip(sizes, growing, gram, spark, factors, strict=True):
        told = f"{min(its):.2g} to {max(its):.2g}" if its else "-"
        add(_by(size), f"{times.total:.3g}", f"{mine.total:.3g}", *theirs.values(), told)
    page.notes.append(
        "The second table is of the same turns: the gang's `truncated_svd` as it is called "
        '(ARPACK, as in the paper), with `method="gram"`, and Spark. `computeSVD(n)`, all values '
        "from the Gram matrix without iterations, is MLlib's better way to a few. The last column "
        "has the smallest and the largest quotient of a turn."
    )
    _scaling_table(page, "strong", gangs, strong, [sizes[-1] for _ in gangs])
    _scaling_table(page, "weak", gangs, weak, page.data["weak sizes"])
    _conclude(page, growing, spark, factors)
    _scalings(page, gangs, strong, weak)
    page.draw = lambda figure: _draw(figure, sizes, growing)


def _by(size: tuple[int, int]) -> str:
    return f"{size[0]} x {size[1]}"


def _in_turns(
    als: AlchemistSession, A: Any, setting: Setting
) -> tuple[Phases, Phases, dict[str, Sample | str]]:
    """The gang as it is called, by its Gram matrix, and Spark's calls, so that noise meets all."""
    svd = als.load_library("linalg").truncated_svd
    mine: dict[str, list[tuple[float, float, float]]] = {"arpack": [], "gram": []}
    theirs: dict[str, list[float | str]] = {}
    with ExitStack() as stack:
        programs = {
            blas: stack.enter_context(
                Asked(setting, "svd", *A.shape, RANK, native=blas != "",
                      limit_s=LIMIT_S[setting.scale])
            )
            for blas in BLAS
        }  # fmt: skip
        for _ in range(setting.runs + 1):
            for method, found in mine.items():
                compute = partial(svd, rank=RANK, method=method)
                found.append(phases(lambda: [als.send_matrix(A)], compute, lambda x: x.fetch()))
            for call, values in zip(CALLS, (RANK, A.shape[1]), strict=True):
                for blas, program in programs.items():
                    theirs.setdefault(call + blas, []).append(program.seconds(values))
    ours, gram = (Phases(*map(Sample, zip(*found[1:], strict=True))) for found in mine.values())
    return ours, gram, {way: _ended(found) for way, found in theirs.items()}


def _ended(turns: list[float | str]) -> Sample | str:
    """The turns but the first, or why one of them has no time."""
    for turn in turns:
        if isinstance(turn, str):
            return turn
    return Sample(map(float, turns[1:]))


def _factors(mine: Phases, theirs: dict[str, Sample | str]) -> list[float]:
    """The time of Spark's quickest way by the gang's, in each turn."""
    its = [way for way in theirs.values() if isinstance(way, Sample)]
    return [
        min(quick) / sum(gang) for gang, *quick in zip(zip(*mine, strict=True), *its, strict=True)
        if quick
    ]  # fmt: skip


def _measured(als: AlchemistSession, A: Any, runs: int) -> Phases:
    svd = als.load_library("linalg").truncated_svd
    return measured(
        lambda: [als.send_matrix(A)], lambda a: svd(a, RANK), lambda result: result.fetch(), runs
    )


def _scaling(
    kind: str, setting: Setting, gangs: list[int], size: tuple[int, int], random: Any
) -> list[Phases]:
    """One matrix on more and more ranks; `weak`: its columns are repeated once for each rank."""
    base = random.standard_normal(size)
    found: list[Phases] = []
    for ranks in gangs:
        A = np.tile(base, (1, ranks)) if kind == "weak" else base
        with AlchemistSession(ranks, progress=False) as als:
            found.append(_measured(als, A, setting.runs))
    return found


def _scaling_table(
    page: Page, kind: str, gangs: list[int], found: list[Phases], sizes: list[tuple[int, int]]
) -> None:
    add = page.table(
        f"{kind} scaling: ranks", "m x n", "send, s", "compute, s", "receive, s", "together, s",
        "transfers, %", "efficiency of compute, %",
    )  # fmt: skip
    efficiencies = _efficiency(kind, gangs, found)
    for ranks, size, times, part in zip(gangs, sizes, found, efficiencies, strict=True):
        add(ranks, _by(size), *times.cells(), f"{100 * part:.0f}")


def _efficiency(kind: str, gangs: list[int], found: list[Phases]) -> list[float]:
    """Of the computation: the first time by each, and by the ranks if the matrix is the same."""
    first = found[0].compute.mean
    return [
        first / times.compute.mean / (ranks if kind == "strong" else 1)
        for ranks, times in zip(gangs, found, strict=False)
    ]


def _conclude(
    page: Page,
    growing: list[Phases],
    spark: list[dict[str, Sample | str]],
    factors: list[list[float]],
) -> None:
    shares = [times.share for times in growing]
    page.not_comparable(
        f"transfers take about {PAPER_SHARE:.0f} % of a run",
        "2018, IV-B",
        "the paper sends from Spark to other nodes; here data comes from NumPy on the same node, "
        f"and transfers take {min(shares):.1f} to {max(shares):.1f} %",
    )
    claim, where = "Spark is slower", "2018, Figure 4"
    found = [its for its in factors if its]
    if not found:
        reason = next(iter(spark[0].values()))
        page.conclude(None, claim, where, f"of Spark there are no times: {reason}")
        return
    paper, better = (
        ", ".join(
            _quotient(times, theirs, call) for times, theirs in zip(growing, spark, strict=True)
        )
        for call in CALLS
    )
    slower = all(min(its) > 1 for its in found)
    quicker = any(max(its) < 1 for its in found)
    page.conclude(
        True if slower else False if quicker else "noise",
        claim,
        where,
        f"`{CALLS[0]}`, the paper's call, takes {paper} times as long, and `{CALLS[1]}`, MLlib's "
        f"better way, {better} times (means, by the quicker of two BLAS). The rule: it holds if "
        "the quickest of Spark's ways is slower in every turn of every size, and does not if at "
        "some size it is quicker in every turn",
    )
    ended = sum(isinstance(theirs[CALLS[0]], Sample) for theirs in spark)
    page.not_comparable(
        "Spark finishes only the smallest size in 30 minutes", where,
        f"here `{CALLS[0]}` finishes {ended} of {len(spark)} sizes, which are smaller, within a "
        "limit that is shorter",
    )  # fmt: skip


def _quotient(mine: Phases, theirs: dict[str, Sample | str], call: str) -> str:
    """How many times as long as the gang a call of Spark's takes, by its quicker BLAS."""
    its = [found.mean for blas in BLAS if isinstance(found := theirs[call + blas], Sample)]
    return f"{min(its) / mine.total:.2g}" if its else "(no time)"


def _scalings(page: Page, gangs: list[int], *scalings: list[Phases]) -> None:
    if len(gangs) > 1:
        for kind, found in zip(("strong", "weak"), scalings, strict=True):
            page.measured(
                f"{kind} scaling of the SVD: {gangs[-1]} ranks reach "
                f"{100 * _efficiency(kind, gangs, found)[-1]:.0f} % of the ideal; more cannot be "
                "said with so few cores, which also share the memory's bandwidth"
            )


def _draw(figure: Any, sizes: list[tuple[int, int]], growing: list[Phases]) -> None:
    """The share of the transfers, as in the paper's Figure 3."""
    axes = figure.subplots()
    at = [_by(size) for size in sizes]
    shares = [[100 * part.mean / job.total for part in (job.send, job.receive)] for job in growing]
    send, receive = zip(*shares, strict=True)
    axes.bar(at, send, 0.6, color=BLUE, label="send")
    bars = axes.bar(at, receive, 0.6, send, color=ORANGE, label="receive")
    axes.bar_label(bars, [f"{job.share:.1f}" for job in growing])
    axes.axhline(PAPER_SHARE, color="black", lw=0.8, ls="--",
                 label="the paper's, from Spark to other nodes")  # fmt: skip
    axes.set_ylabel("transfers, % of the whole time")
    axes.legend(frameon=False, loc="center right")
