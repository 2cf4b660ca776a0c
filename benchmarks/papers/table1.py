"""Gittens et al. (2018), Table I: products of matrices; send, compute and receive, and Spark."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from alchemist_ray import AlchemistSession
from benchmarks.clients_spark import in_jvm, local_spark
from benchmarks.papers.experiment import (
    BLUE,
    GREY,
    ORANGE,
    Page,
    Sample,
    Setting,
    draw_bars,
    known,
    side,
)
from benchmarks.papers.phases import Phases, measured, stored
from benchmarks.papers.spark import Alone, missing


class Case(NamedTuple):
    """A line of the table: thousands of rows and columns, nodes, seconds.

    `failed`: Spark's time is that until it failed.
    """

    m: int
    n: int
    k: int
    nodes: int
    alchemist_s: tuple[float, float, float]
    spark_s: float
    failed: bool = False


CASES = (
    Case(10, 10, 10, 1, (5.9, 6.6, 2.2), 160.3),
    Case(50, 10, 30, 1, (16.7, 75.7, 19.4), 809.3),
    Case(100, 10, 70, 2, (32.5, 178.7, 55.8), 476.7, failed=True),
    Case(300, 10, 60, 4, (69.4, 171.7, 66.8), 1127.3, failed=True),
)
DIVISORS = {"small": 100.0, "node": 10.0, "cluster": 10.0}
PARTITIONS = 8  # of Spark's matrices
LIMIT_S = {"small": 300.0, "node": 900.0, "cluster": 1800.0}  # of a case of Spark alone


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
    page.data = {"sizes": sizes, "ours": ours, "spark": _spark_alone(setting, sizes)}
    page.data["without Spark"] = reason
    fill(page)
    return page


def _spark_alone(setting: Setting, sizes: list[tuple[int, ...]]) -> list[tuple[Sample | str, ...]]:
    """Spark's own times, plain and with this machine's BLAS."""
    limit_s = LIMIT_S[setting.scale]
    ways = [Alone(setting, limit_s=limit_s), Alone(setting, "--native", limit_s=limit_s)]
    return [tuple(way.times("product", *size) for way in ways) for size in sizes]


def fill(page: Page) -> None:
    """Table, verdicts and figure of the times that the page has."""
    ours = {who: list(map(stored, them)) for who, them in page.data["ours"].items()}
    alone = [(known(plain), known(tuned)) for plain, tuned in page.data["spark"]]
    reason = page.data["without Spark"]
    _table(page, page.data["sizes"], ours, reason, alone)
    _left_out(page, page.data["sizes"], alone)
    _conclude(page, ours, alone, reason)
    page.draw = lambda figure: _draw(figure, page.data["sizes"], ours, alone)


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


def _table(
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


def _left_out(
    page: Page, sizes: list[tuple[int, ...]], alone: list[tuple[Sample | str, Sample | str]]
) -> None:
    """Say how long Spark would take for the sizes of which there is no time."""
    results = [8e-6 * m * k for m, _, k in sizes]  # MB; blocks and rows of it are shuffled
    for way, title in enumerate(("plain Spark", "Spark with native BLAS")):
        its = [both[way] for both in alone]
        rates = [s.mean / mb for s, mb in zip(its, results, strict=True) if isinstance(s, Sample)]
        left = [i for i, found in enumerate(its) if isinstance(found, str)]
        if rates and left:
            page.notes.append(
                f"Not measured: {title} for "
                + " and ".join(
                    f"{' x '.join(map(str, sizes[i]))} ({min(rates) * results[i] / 60:.0f} to "
                    f"{max(rates) * results[i] / 60:.0f} minutes)"
                    for i in left
                )
                + f", by its {min(rates):.2g} to {max(rates):.2g} s for each MB of the result in "
                "the sizes that were measured. Its memory would do: three copies of the largest "
                f"result are {3e-3 * max(results):.1f} GB."
            )


def _conclude(
    page: Page,
    ours: dict[str, list[Phases]],
    alone: list[tuple[Sample | str, Sample | str]],
    reason: str | None,
) -> None:
    claim = "a product through the gang is many times as quick as Spark's"
    where = "2018, IV-A"
    plain, better = [], []
    for phases, ways in zip(ours.get("Spark", []), alone, strict=False):
        if its := [way.mean / phases.total for way in ways if isinstance(way, Sample)]:
            better.append(min(its))
        if isinstance(ways[0], Sample):
            plain.append(ways[0].mean / phases.total)
    if not better:
        page.conclude(None, claim, where, f"of Spark there are no times: {reason or alone[0][0]}")
        return
    papers = ", ".join(
        f"{case.spark_s / sum(case.alchemist_s):.0f}" for case in CASES if not case.failed
    )
    page.conclude(
        min(better) > 1,
        claim,
        where,
        f"with all transfers it is {', '.join(f'{its:.0f}' for its in plain)} times as quick (the "
        f"paper: {papers}), and {', '.join(f'{its:.1f}' for its in better)} times against the "
        f"better of Spark's two BLAS; of {len(CASES) - len(plain)} of {len(CASES)} sizes there is "
        "no time of plain Spark: it shuffles blocks through serialization and multiplies in Java",
    )
    page.not_comparable(
        "Spark fails for matrices on more than one node", where,
        "the paper's two largest sizes fail after 476.7 and 1127.3 s; here there is one node, and "
        "time limits the sizes",
    )  # fmt: skip


def _draw(
    figure: Any,
    sizes: list[tuple[int, ...]],
    ours: dict[str, list[Phases]],
    alone: list[tuple[Sample | str, Sample | str]],
) -> None:
    """How many times as long Spark takes as the gang, with all transfers, here and in the paper."""
    axes = figure.subplots()
    route = "Spark" if "Spark" in ours else "NumPy"
    series: dict[str, list[float | str]] = {
        f"here, from {route}: {way}": [
            its[at].partition(":")[0] if isinstance(its[at], str) else its[at].mean / phases.total
            for phases, its in zip(ours[route], alone, strict=True)
        ]
        for at, way in enumerate(("plain Spark", "with native BLAS"))
    } | {
        "the paper": [
            f"fails after {case.spark_s:.0f} s" if case.failed
            else case.spark_s / sum(case.alchemist_s)
            for case in CASES
        ],
    }  # fmt: skip
    names = [f"{m} x {n} x {k}" for m, n, k in sizes]
    names[0] += "\n(the paper: x 10 each)"
    draw_bars(axes, names, series, (BLUE, ORANGE, GREY))
    axes.set_ylabel("Spark's time / the gang's, with transfers")
    axes.legend(frameon=False)
