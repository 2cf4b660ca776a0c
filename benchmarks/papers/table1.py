"""Gittens et al. (2018), Table I: products of matrices; send, compute and receive, and Spark."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from alchemist_ray import AlchemistSession
from benchmarks.clients_spark import in_jvm, local_spark
from benchmarks.papers.experiment import Page, Sample, Setting, side
from benchmarks.papers.phases import Phases, bars, means, measured
from benchmarks.papers.spark import LIMIT_S, Alone, missing


class Case(NamedTuple):
    """A line of the table: thousands of rows and columns, GB, nodes, seconds.

    `failed`: Spark's time is that until it failed.
    """

    m: int
    n: int
    k: int
    result_gb: float
    nodes: int
    alchemist_s: tuple[float, float, float]
    spark_s: float
    failed: bool = False


CASES = (
    Case(10, 10, 10, 0.8, 1, (5.9, 6.6, 2.2), 160.3),
    Case(50, 10, 30, 12, 1, (16.7, 75.7, 19.4), 809.3),
    Case(100, 10, 70, 56, 2, (32.5, 178.7, 55.8), 476.7, failed=True),
    Case(300, 10, 60, 144, 4, (69.4, 171.7, 66.8), 1127.3, failed=True),
)
DIVISORS = {"small": 100.0, "node": 10.0, "cluster": 10.0}
PARTITIONS = 8  # of Spark's matrices


def run(setting: Setting) -> Page:
    """Products from NumPy and from Spark's memory, and Spark's own, plain and tuned."""
    divisor = setting.divisor(DIVISORS)
    ranks = setting.cores
    page = Page(
        "table1",
        "Gittens et al. 2018, Table I: products of matrices",
        f"the paper's sizes with bytes divided by {divisor:g} (each side by {divisor**0.5:.3g}), "
        f"{ranks} ranks for all sizes; a Spark case has {LIMIT_S[setting.scale]:.0f} s",
    )
    sizes = [tuple(side(1000 * s, divisor) for s in (case.m, case.n, case.k)) for case in CASES]
    reason = missing(setting)
    ours: dict[str, list[Phases]] = {}
    with AlchemistSession(ranks, progress=False) as als:
        matmul = als.load_library("linalg").matmul
        ours["NumPy"] = [_from_numpy(als, matmul, size, setting.runs) for size in sizes]
        if reason is None:
            with local_spark() as spark:
                ours["Spark"] = [
                    _from_spark(als, matmul, spark, size, setting.runs) for size in sizes
                ]
    plain, tuned = Alone(setting), Alone(setting, "--native")
    alone = [
        (plain.times("product", *size), tuned.times("product", *size)) for size in sizes
    ]  # fmt: skip
    _fill(page, sizes, ours, reason, alone)
    _conclude(page, ours, alone, reason)
    page.data = {
        "sizes": sizes,
        "ours": {who: [phases.values for phases in them] for who, them in ours.items()},
        "spark": [[_told(found) for found in pair] for pair in alone],
    }
    page.draw = lambda figure: _draw(figure, sizes, ours, alone)
    return page


def _operands(size: tuple[int, ...]) -> tuple[Any, Any]:
    m, n, k = size
    random = np.random.default_rng(0)
    return random.random((m, n)), random.random((n, k))


def _from_numpy(als: Any, matmul: Any, size: tuple[int, ...], runs: int) -> Phases:
    A, B = _operands(size)
    return measured(
        lambda: (als.send_matrix(A), als.send_matrix(B)), matmul, lambda C: C.fetch(), runs
    )


def _from_spark(als: Any, matmul: Any, spark: Any, size: tuple[int, ...], runs: int) -> Phases:
    """From rows in the JVM's memory to rows that Spark counts."""
    handles = [als.send_matrix(array) for array in _operands(size)]

    def receive(C: Any) -> None:
        C.to_spark(spark, kind="IndexedRowMatrix")._java_matrix_wrapper._java_model.rows().count()

    with in_jvm(spark, handles[0], PARTITIONS) as A, in_jvm(spark, handles[1], PARTITIONS) as B:
        for handle in handles:
            handle.free()
        return measured(lambda: (als.send_matrix(A), als.send_matrix(B)), matmul, receive, runs)


def _told(found: Sample | str) -> Any:
    return found if isinstance(found, str) else found.values


def _fill(
    page: Page,
    sizes: list[tuple[int, ...]],
    ours: dict[str, list[Phases]],
    reason: str | None,
    alone: list[tuple[Sample | str, Sample | str]],
) -> None:
    add = page.table(
        "m x n x k", "result, MB", "from NumPy: send / compute / receive, s",
        "from Spark: send / compute / receive, s", "Spark alone, s", "Spark with native BLAS, s",
        "the paper: m x n x k, nodes", "Alchemist, s", "Spark, s",
    )  # fmt: skip
    for i, (case, size) in enumerate(zip(CASES, sizes, strict=True)):
        m, n, k = size
        from_spark = ours["Spark"][i] if "Spark" in ours else reason
        add(
            f"{m} x {n} x {k}", f"{8 * m * k / 1e6:.3g}", ours["NumPy"][i],
            from_spark, *alone[i], f"{case.m}000 x {case.n}000 x {case.k}000, {case.nodes}",
            " / ".join(map(str, case.alchemist_s)),
            f"fails after {case.spark_s}" if case.failed else case.spark_s,
        )  # fmt: skip


def _conclude(
    page: Page,
    ours: dict[str, list[Phases]],
    alone: list[tuple[Sample | str, Sample | str]],
    reason: str | None,
) -> None:
    claim = "a product through the gang is many times as quick as Spark's"
    both = [
        (phases.total, plain.mean, min(plain.mean, _mean(tuned)))
        for phases, (plain, tuned) in zip(ours.get("Spark", []), alone, strict=False)
        if isinstance(plain, Sample)
    ]
    if not both:
        page.conclude(None, claim, f"of Spark there are no times: {reason or alone[0][0]}")
        return
    factors = ", ".join(f"{plain / mine:.0f}" for mine, plain, _ in both)
    tuned = ", ".join(f"{best / mine:.1f}" for mine, _, best in both)
    papers = ", ".join(
        f"{case.spark_s / sum(case.alchemist_s):.0f}" for case in CASES if not case.failed
    )
    left = len(CASES) - len(both)
    page.conclude(
        all(plain > mine for mine, plain, _ in both),
        claim,
        f"with all transfers it is {factors} times as quick (the paper: {papers}), and {tuned} "
        f"times against the better of Spark's two BLAS; of {left} of {len(CASES)} sizes there "
        "is no time of plain Spark: it shuffles blocks through serialization and multiplies "
        "in Java. That Spark fails when the product grows (the paper's two largest sizes, after "
        "476.7 and 1127.3 s) is not tested here: sizes are limited by time",
    )


def _mean(found: Sample | str) -> float:
    return found.mean if isinstance(found, Sample) else float("inf")


def _draw(
    figure: Any,
    sizes: list[tuple[int, ...]],
    ours: dict[str, list[Phases]],
    alone: list[tuple[Sample | str, Sample | str]],
) -> None:
    """Stacked bars of the phases beside the paper's; Spark's times as crosses."""
    left, right = figure.subplots(1, 2)
    for shift, (who, them) in enumerate(ours.items()):
        at = np.arange(len(sizes)) + 0.35 * shift
        for x, y in zip(at, bars(left, means(them), at, 0.3, named=False), strict=True):
            left.annotate(who, (x, y), fontsize=7, ha="center", va="bottom")
    for mark, which, name in (("kx", 0, "Spark alone"), ("k+", 1, "with native BLAS")):
        known = [(i, _mean(pair[which])) for i, pair in enumerate(alone)]
        left.plot([i for i, _ in known], [s for _, s in known], mark, label=name)
    left.set_xticks(range(len(sizes)), [f"{m} x\n{n} x {k}" for m, n, k in sizes], fontsize=7)
    left.set_title("here")
    bars(right, [case.alchemist_s for case in CASES], range(len(CASES)), named=True)
    printed = [(i, case.spark_s) for i, case in enumerate(CASES) if not case.failed]
    right.plot([i for i, _ in printed], [s for _, s in printed], "kx")
    names = [f"{case.m} x {case.n} x {case.k} k" for case in CASES]
    right.set_xticks(range(len(CASES)), names, fontsize=7)
    right.set_title("the paper")
    for axes in (left, right):
        axes.legend(fontsize=7)
