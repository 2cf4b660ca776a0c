"""Gittens et al. (2018), Figures 3 and 4: truncated SVD, scaling and the share of transfers."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from itertools import cycle
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
PAPERS, BETTER, TUNED = f"computeSVD({RANK})", "computeSVD(n)", "computeSVD(n), native BLAS"
# Of each method: the gang's job, and Spark's calls.
METHODS = {
    "ARPACK": ("the gang, ARPACK", (PAPERS,)),
    "Gram matrix": ("the gang, Gram matrix", (BETTER, TUNED)),
}


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
    growing: list[Phases] = []
    turns: list[dict[str, list[float] | str]] = []
    with AlchemistSession(gangs[-1], progress=False) as als:
        for size in sizes:
            A = random.standard_normal(size)
            growing.append(_measured(als, A, setting.runs))
            turns.append(_in_turns(als, A, setting))
    strong = _scaling("strong", setting, gangs, sizes[-1], random)
    weak = _scaling("weak", setting, gangs, (side(WEAK_ROWS, divisor), n), random)
    page.data = {
        "sizes": sizes, "gangs": gangs, "growing": growing, "strong": strong, "weak": weak,
        "in turns": turns,
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
    turns = [{who: known(its) for who, its in found.items()} for found in page.data["in turns"]]
    add = page.table(
        "m x n", "MB", "send, s", "compute, s", "receive, s", "together, s", "transfers, %"
    )
    for size, times in zip(sizes, growing, strict=True):
        add(_by(size), f"{8e-6 * size[0] * size[1]:.3g}", *times.cells())
    add = page.table(
        "in turns: m x n", *(f"{who}, s" for who in turns[0]),
        *(f"Spark / the gang, {method}" for method in METHODS),
    )  # fmt: skip
    for size, found in zip(sizes, turns, strict=False):
        add(_by(size), *found.values(), *(_range(_factors(found, method)) for method in METHODS))
    page.notes.append(
        "In turns: whole jobs of the gang, by its `truncated_svd` as it is called (ARPACK, as in "
        f'the paper) and with `method="gram"`, and Spark alone: `{PAPERS}`, the paper\'s call, '
        f"iterates with ARPACK, and runs once; `{BETTER}`, all values from the Gram matrix, is "
        "MLlib's better way to a few. The last columns compare jobs by the same method, the "
        "smallest and the largest quotient of a turn; of two times of Spark the shorter one counts."
    )
    _scaling_table(page, "strong", gangs, strong, [sizes[-1] for _ in gangs])
    _scaling_table(page, "weak", gangs, weak, page.data["weak sizes"])
    _conclude(page, growing, turns)
    _scalings(page, gangs, strong, weak)
    page.draw = lambda figure: _draw(figure, sizes, growing)


def _by(size: tuple[int, int]) -> str:
    return f"{size[0]} x {size[1]}"


def _in_turns(als: AlchemistSession, A: Any, setting: Setting) -> dict[str, list[float] | str]:
    """Seconds of a job by the gang's two methods and by Spark's calls, so that noise meets all."""
    svd = als.load_library("linalg").truncated_svd

    def job(method: str) -> float:
        compute = partial(svd, rank=RANK, method=method)
        return sum(phases(lambda: [als.send_matrix(A)], compute, lambda made: made.fetch()))

    def asked(stack: ExitStack, *, native: bool) -> Asked:
        limit_s = LIMIT_S[setting.scale]
        return stack.enter_context(
            Asked(setting, "svd", *A.shape, RANK, native=native, limit_s=limit_s)
        )

    with ExitStack() as stack:
        plain, tuned = (asked(stack, native=native) for native in (False, True))
        works: dict[str, Callable[[], float | str]] = {
            METHODS["ARPACK"][0]: partial(job, "arpack"),
            METHODS["Gram matrix"][0]: partial(job, "gram"),
            BETTER: partial(plain.seconds, A.shape[1]),
            TUNED: partial(tuned.seconds, A.shape[1]),
            PAPERS: partial(plain.seconds, RANK),
        }
        found: dict[str, list[float | str]] = {who: [] for who in works}
        for turn in range(setting.runs + 1):
            for who, work in works.items():
                if turn == setting.runs or who != PAPERS:
                    found[who].append(work())
                    print(f"{_by(A.shape)}, {who}: {found[who][-1]}", flush=True)
    return {who: _ended(its) for who, its in found.items()}


def _ended(turns: list[float | str]) -> list[float] | str:
    """The turns but the first of several, or why one of them has no time."""
    seconds = [turn for turn in turns if not isinstance(turn, str)]
    if len(seconds) < len(turns):
        return next(turn for turn in turns if isinstance(turn, str))
    return seconds[1:] or seconds


def _factors(found: dict[str, Sample | str], method: str) -> list[float]:
    """Spark's time by the gang's with the same method, in each turn; one run counts for all."""
    who, calls = METHODS[method]
    theirs = [its for call in calls if isinstance(its := found[call], Sample)]
    quickest = [min(turn) for turn in zip(*theirs, strict=True)]
    mine = found[who]
    if isinstance(mine, str) or not quickest:
        return []
    return [took / its for took, its in zip(cycle(quickest), mine, strict=False)]


def _crossed(turns: list[dict[str, Sample | str]]) -> str:
    """How many times as long as the gang's ARPACK MLlib's better way takes, of each size."""
    (arpack, _), (_, better) = METHODS.values()
    found = []
    for its in turns:
        times = [statistics.median(way) for call in better if isinstance(way := its[call], Sample)]
        if times and isinstance(mine := its[arpack], Sample):
            found.append(f"{min(times) / statistics.median(mine):.2g}")
    return ", ".join(found)


def _range(factors: list[float]) -> str:
    return f"{min(factors):.2g} to {max(factors):.2g}" if factors else "-"


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


def _conclude(page: Page, growing: list[Phases], turns: list[dict[str, Sample | str]]) -> None:
    shares = [times.share for times in growing]
    page.not_comparable(
        f"transfers take about {PAPER_SHARE:.0f} % of a run",
        "2018, IV-B",
        "the paper sends from Spark to other nodes; here data comes from NumPy on the same node, "
        f"and transfers take {min(shares):.1f} to {max(shares):.1f} %",
    )
    claim, where = "Spark is slower", "2018, Figure 4"
    factors = {
        method: [its for found in turns if (its := _factors(found, method))] for method in METHODS
    }
    if not all(factors.values()):
        page.conclude(None, claim, where, f"of Spark there are no times: {turns[0][PAPERS]}")
        return
    every = [its for method in METHODS for its in factors[method]]
    slower, quicker = all(min(its) > 1 for its in every), any(max(its) < 1 for its in every)
    told = {
        method: ", ".join(f"{statistics.median(its):.2g}" for its in found)
        for method, found in factors.items()
    }
    page.conclude(
        True if slower else False if quicker else "noise",
        claim,
        where,
        f"`{PAPERS}`, the paper's call, takes {told['ARPACK']} times as long as the gang's ARPACK, "
        f"and `{BETTER}`, MLlib's better way, {told['Gram matrix']} times as long as the gang's "
        f'with `method="gram"` and {_crossed(turns)} times as long as its ARPACK, the default '
        "(medians of the turns). The rule: the claim holds if Spark is slower "
        "by both methods in every turn of every size, and does not if it is quicker in every turn "
        "of one",
    )
    ended = sum(isinstance(found[PAPERS], Sample) for found in turns)
    page.not_comparable(
        "Spark finishes only the smallest size in 30 minutes", where,
        f"here `{PAPERS}` finishes {ended} of {len(turns)} sizes, which are smaller, within a "
        "limit that is shorter",
    )  # fmt: skip


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
