"""Gittens et al. (2018), Figures 3 and 4: truncated SVD, scaling and the share of transfers."""

from __future__ import annotations

from collections.abc import Callable
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
CALLS = ("computeSVD(n)", f"computeSVD({RANK})")  # the second one is the paper's
BLAS = ("", ", native BLAS")
OURS = ("the gang", "the gang by its Gram matrix")


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
    factors = list(map(_factors, turns))
    add = page.table(
        "m x n", "MB", "send, s", "compute, s", "receive, s", "together, s", "transfers, %"
    )
    for size, times in zip(sizes, growing, strict=True):
        add(_by(size), f"{8e-6 * size[0] * size[1]:.3g}", *times.cells())
    add = page.table(
        "in turns: m x n", *(f"{who}, s" for who in turns[0]), "Spark's quickest / the gang"
    )
    for size, found, its in zip(sizes, turns, factors, strict=True):
        add(_by(size), *found.values(), f"{min(its):.2g} to {max(its):.2g}" if its else "-")
    page.notes.append(
        "In turns: a whole job of the gang, by its `truncated_svd` as it is called (ARPACK, as in "
        'the paper) and with `method="gram"`, and Spark alone. `computeSVD(n)`, all values from '
        "the Gram matrix without iterations, is MLlib's better way to a few; the paper's call runs "
        "once. The last column has the smallest and the largest quotient of a turn."
    )
    _scaling_table(page, "strong", gangs, strong, [sizes[-1] for _ in gangs])
    _scaling_table(page, "weak", gangs, weak, page.data["weak sizes"])
    _conclude(page, growing, turns, factors)
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

    works: dict[str, Callable[[], float | str]] = {
        who: partial(job, method) for who, method in zip(OURS, ("arpack", "gram"), strict=True)
    }
    limit_s = LIMIT_S[setting.scale]
    with ExitStack() as stack:
        programs = [
            stack.enter_context(Asked(setting, "svd", *A.shape, RANK, native=its, limit_s=limit_s))
            for its in (False, True)
        ]
        for call, values in zip(CALLS, (A.shape[1], RANK), strict=True):
            for blas, program in zip(BLAS, programs, strict=True):
                works[call + blas] = partial(program.seconds, values)
        found: dict[str, list[float | str]] = {who: [] for who in works}
        for turn in range(setting.runs + 1):
            for who, work in works.items():
                if turn == setting.runs or not who.startswith(CALLS[1]):
                    found[who].append(work())
                    print(f"{_by(A.shape)}, {who}: {found[who][-1]}", flush=True)
    return {who: _ended(its) for who, its in found.items()}


def _ended(turns: list[float | str]) -> list[float] | str:
    """The turns but the first of several, or why one of them has no time."""
    seconds = [turn for turn in turns if not isinstance(turn, str)]
    if len(seconds) < len(turns):
        return next(turn for turn in turns if isinstance(turn, str))
    return seconds[1:] or seconds


def _factors(found: dict[str, Sample | str]) -> list[float]:
    """The time of Spark's quickest way by the gang's, in each turn."""
    gang = found[OURS[0]]
    its = [way for who, way in found.items() if who not in OURS and isinstance(way, Sample)]
    whole = [way if len(way) == len(gang) else [way.mean] * len(gang) for way in its]
    return [min(quick) / took for took, *quick in zip(gang, *whole, strict=True) if quick]


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
    turns: list[dict[str, Sample | str]],
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
    known_factors = [its for its in factors if its]
    if not known_factors:
        reason = turns[0][CALLS[0]]
        page.conclude(None, claim, where, f"of Spark there are no times: {reason}")
        return
    better, paper = (", ".join(_quotient(found, call) for found in turns) for call in CALLS)
    slower = all(min(its) > 1 for its in known_factors)
    quicker = any(max(its) < 1 for its in known_factors)
    page.conclude(
        True if slower else False if quicker else "noise",
        claim,
        where,
        f"`{CALLS[1]}`, the paper's call, takes {paper} times as long, and `{CALLS[0]}`, MLlib's "
        f"better way, {better} times (means, by the quicker of two BLAS). The rule: it holds if "
        "the quickest of Spark's ways is slower in every turn of every size, and does not if at "
        "some size it is quicker in every turn",
    )
    ended = sum(isinstance(found[CALLS[1]], Sample) for found in turns)
    page.not_comparable(
        "Spark finishes only the smallest size in 30 minutes", where,
        f"here `{CALLS[1]}` finishes {ended} of {len(turns)} sizes, which are smaller, within a "
        "limit that is shorter",
    )  # fmt: skip


def _quotient(found: dict[str, Sample | str], call: str) -> str:
    """How many times as long as the gang a call of Spark's takes, by its quicker BLAS."""
    its = [its.mean for blas in BLAS if isinstance(its := found[call + blas], Sample)]
    gang = found[OURS[0]]
    return f"{min(its) / gang.mean:.2g}" if its and isinstance(gang, Sample) else "(no time)"


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
