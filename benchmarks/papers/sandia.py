"""Younge et al. (SAND2017-5325): HPCC and HPCG natively, by ranks and in a container; TeraSort."""

from __future__ import annotations

import subprocess
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from statistics import geometric_mean, median
from typing import Any

from alchemist_ray import AlchemistSession
from alchemist_ray.errors import AlchemistError
from alchemist_ray.observe.bench import Measure, Result, goodness, measure, result
from alchemist_ray.version import __version__
from benchmarks.harness import printed
from benchmarks.papers import spark
from benchmarks.papers.experiment import BLUE, ORANGE, Page, Sample, Setting, draw_bars, known
from mpi_workers.local import local_gang

SECONDS = {"small": 0.5, "node": 2.0, "cluster": 2.0}
SORTED_BYTES = {"small": 10**9, "node": 10**10, "cluster": 10**11}
SORTS = {"small": 1}  # of TeraSort; at other scales as many as of all measurements
SORT_LIMIT_S = {"small": 600.0, "node": 3600.0, "cluster": 7200.0}
LIMIT_S = 1800.0  # of a place
IMAGE = f"alchemist-on-ray:{__version__}"
CONTAINER = ("podman", "run", "--rm", "--shm-size=2g", IMAGE, "alchemist")
PLACES = ("native", "gang", "container")
COLOURS = {"gang": BLUE, "container": ORANGE}

Values = dict[str, dict[str, list[Measure]]]  # place, measure: one per run


def run(setting: Setting) -> Page:
    """HPCC's measures in each place, run by run in turns, and TeraSort."""
    nbytes = int(SORTED_BYTES[setting.scale] / (setting.divide or 1))
    page = Page(
        "sandia",
        "Younge et al. 2017, HPCC and HPCG in virtual clusters",
        f"HPCC's measures for seconds each, {setting.cores} ranks on one machine "
        "(the report: up to 32 nodes of a Cray XC30, and minutes for a run of HPL); TeraSort of "
        f"{nbytes / 1e9:g} GB",
    )
    values: Values = {name: defaultdict(list) for name in PLACES}
    missing: dict[str, str] = {}
    seconds = SECONDS[setting.scale] / (setting.divide or 1)
    for _ in range(setting.runs):
        for its in [*_suites(setting.cores, seconds, missing), *_kernels(setting.cores, seconds)]:
            for one in its.measures:
                values[its.label][one.what].append(one)
    page.data = {
        name: {what: [one.value for one in found] for what, found in its.items()}
        for name, its in values.items()
    }
    page.data["units"] = {
        what: (found[0].unit, found[0].more) for what, found in values["native"].items()
    }
    page.data |= {"missing": missing} | _weak(setting, seconds)
    page.data |= {"sorted bytes": nbytes, "terasort, s": _terasort(setting, nbytes)}
    fill(page)
    return page


def fill(page: Page) -> None:
    """Tables, verdicts and figure of the measures that the page has."""
    missing = page.data["missing"]
    values: Values = {
        place: {
            what: [Measure(what, value, *page.data["units"][what]) for value in found]
            for what, found in page.data[place].items()
        }
        for place in PLACES
    }
    _table(page, values)
    page.notes += [f"- {name}: not measured: {reason}" for name, reason in missing.items()]
    _medians(page, values, missing)
    _weak_table(page)
    _terasort_table(page, page.data["sorted bytes"], page.data["terasort, s"])
    _conclude(page)
    page.draw = lambda figure: _draw(figure, values)


def _suites(ranks: int, seconds: float, missing: dict[str, str]) -> Iterator[Result]:
    """The measures of `alchemist bench hpc` in each place; `missing` gets the reasons."""
    yield result("native", *local_gang.run("benchmarks.hpc:bare", ranks, seconds, timeout=LIMIT_S))
    with AlchemistSession(ranks, progress=False) as session:
        yield measure(session, "gang", seconds)
    words = ["bench", "hpc", "--json", f"--workers={ranks}", f"--seconds={seconds}"]
    try:
        yield _in_container(*words)
    except (OSError, RuntimeError) as error:
        missing["container"] = str(error)


def _in_container(*words: str) -> Result:
    """The result of `alchemist` in the image; RuntimeError if it fails."""
    try:
        done = subprocess.run(
            [*CONTAINER, *words, "--label=container"], check=True,
            stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=LIMIT_S,
        )  # fmt: skip
        return Result.parse(done.stdout)
    except subprocess.CalledProcessError as error:
        said = " ".join((error.stderr or error.stdout).split())[-300:]
        raise RuntimeError(f"exit code {error.returncode}: {said}") from error
    except (subprocess.TimeoutExpired, AlchemistError) as error:
        raise RuntimeError(str(error)) from error


def _kernels(ranks: int, seconds: float) -> Iterator[Result]:
    """The kernels that all ranks compute together, in plain MPI and in a gang."""
    yield result(
        "native", *local_gang.run("benchmarks.papers.hpcc:bare", ranks, seconds, timeout=LIMIT_S)
    )
    with AlchemistSession(ranks, progress=False) as session:
        library = session.load_library("hpcc", Path(__file__).with_name("hpcc.py"))
        yield result("gang", *library.kernels(seconds))


def _best(found: list[Measure]) -> Measure:
    return max(found, key=lambda one: one.value if one.more else -one.value)


def ratios(values: Values, place: str) -> dict[str, float]:
    """The best run of each measure in a place to the best native one; over 1 is better."""
    native = values["native"]
    return {
        what: goodness(_best(found), _best(native[what]))
        for what, found in values[place].items()
        if what in native
    }


def _table(page: Page, values: Values) -> None:
    add = page.table("measure", "unit", *PLACES)
    for what, found in values["native"].items():
        cells = [
            str(Sample([one.value for one in its])) if (its := values[place].get(what)) else "-"
            for place in PLACES
        ]
        add(what, found[0].unit, *cells)
    means = [
        f"{geometric_mean(list(found.values())):.2f}" if (found := ratios(values, place)) else "-"
        for place in PLACES
    ]
    add("geometric mean of the ratios to native, best runs", "", *means)


def _medians(page: Page, values: Values, missing: dict[str, str]) -> None:
    for place in ("gang", "container"):
        if place in missing:
            continue
        middle = median(ratios(values, place).values())
        page.notes.append(
            f"The median ratio of a {place} to plain MPI is {middle:.2f}: "
            + ("nothing of Ray runs between ranks, so it shows how much two runs differ." if
               place == "gang" else
               "a container shares the host's kernel, and its ranks exchange memory as outside.")
        )  # fmt: skip


def _weak(setting: Setting, seconds: float) -> dict[str, Any]:
    """HPL and HPCG with as much work for each rank, as the report's Figures 4.5 and 4.6 grow."""
    measured: dict[str, Any] = {}
    for ranks in setting.gangs():
        native: list[tuple[float, float]] = []
        gang: list[tuple[float, float]] = []
        with AlchemistSession(ranks, progress=False) as session:
            library = session.load_library("hpcc", Path(__file__).with_name("hpcc.py"))
            for _ in range(setting.runs):
                native.append(
                    local_gang.run(
                        "benchmarks.papers.hpcc:bare_weak", ranks, seconds, timeout=LIMIT_S
                    )
                )
                gang.append(library.weak(seconds))
        measured[f"weak, {ranks} ranks"] = {"native": native, "gang": gang}
    return measured


def _weak_table(page: Page) -> None:
    add = page.table(
        "weak scaling: ranks", "HPL, GFLOP/s: native", "gang", "HPCG, GFLOP/s: native", "gang",
        "gang / native: HPL", "HPCG",
    )  # fmt: skip
    for name, its in page.data.items():
        if not name.startswith("weak"):
            continue
        ranks = name.split()[1]
        found = [[Sample(rates) for rates in zip(*its[place], strict=True)] for place in PLACES[:2]]
        ratios = [max(g) / max(n) for n, g in zip(*found, strict=True)]
        add(
            ranks, found[0][0], found[1][0], found[0][1], found[1][1],
            *(f"{ratio:.2f}" for ratio in ratios),
        )  # fmt: skip


def _terasort(setting: Setting, nbytes: int) -> Any:
    """The seconds of the runs, or why there are none."""
    reason = spark.missing(setting) or spark.missing_master(setting)
    if reason is not None:
        return f"not measured: {reason}"
    runs = SORTS.get(setting.scale, setting.runs)
    return printed(
        "benchmarks.papers.terasort", nbytes, "--runs", runs, "--master", spark.master(setting),
        limit_s=SORT_LIMIT_S[setting.scale],
    )  # fmt: skip


def _terasort_table(page: Page, nbytes: int, times: Any) -> None:
    add = page.table("TeraSort on Spark, natively", "seconds", "MB/s")
    rate = "-" if isinstance(times, str) else f"{nbytes / Sample(times).mean / 1e6:.0f}"
    add(f"{nbytes / 1e9:g} GB, sorted, written, validated", known(times), rate)


def _conclude(page: Page) -> None:
    page.not_comparable(
        "guests lose 3.6 % of HPCG on one node and 9 to 12 % as nodes grow, and about 18 % of HPL",
        "report, Figures 4.5 and 4.6",
        "that is a guest against its host; this page compares a gang and a container with plain "
        "MPI on one machine. For guests: [guests](guests.md)",
    )  # fmt: skip


def _draw(figure: Any, values: Values) -> None:
    """One group of bars for each kind of measure: the geometric mean of its ratios."""
    axes = figure.subplots()
    shown = [place for place in PLACES[1:] if values[place]]
    kinds = list(dict.fromkeys(map(_kind, values["native"])))
    series: dict[str, list[float | str]] = {}
    for place in shown:
        found = ratios(values, place)
        its = [[ratio for what, ratio in found.items() if _kind(what) == kind] for kind in kinds]
        series[place] = [geometric_mean(some) if some else "-" for some in its]
    groups, colours = [kind.replace(" ", "\n") for kind in kinds], map(COLOURS.get, shown)
    draw_bars(axes, groups, series, list(colours))
    axes.set_ylabel("ratio to native (higher is better)")
    figure.legend(loc="outside upper center", ncols=len(shown), frameon=False)


def _kind(what: str) -> str:
    """The measure without its size: natural and random rings are one kind, as are all streams."""
    name = what.partition(",")[0]
    for kind in ("dgemm", "stream", "ping-pong", "ring", "allreduce"):
        if kind in name:
            return kind
    return name
