"""Younge et al. (SAND2017-5325): each measure natively and in guests, and guests that come and go.

The guests run under libvirt on a host of `tests.faults.hosts`, with one core each, emulated where
there is no KVM. iperf3 and Spark are measured in them if their image has the programs:
`ALCHEMIST_GUEST_IMAGE` is the folder of one that `alchemist virtual-cluster image` made of
``make image EXTRAS="demo spark" PACKAGES="default-jre-headless iperf3"``.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from statistics import geometric_mean
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from alchemist_ray import AlchemistSession
from alchemist_ray.observe.bench import Measure, goodness, measure, result
from alchemist_ray.plural import counted
from benchmarks.papers.experiment import Page, Setting, cited
from mpi_workers.local import local_gang
from tests.deploy.virtual import inside, lab

ROOT = Path(__file__).parents[2]
SECONDS = {"small": 0.5, "node": 2.0, "cluster": 2.0}
SORTED_BYTES = {"small": 10**7, "node": 10**9, "cluster": 10**10}
RECORDS = {"small": 50_000, "node": 10**6, "cluster": 10**7}  # of spark-perf
GUESTS = 2
LIMIT_S = 3600.0
NEAR = 0.9  # of native
SOURCES = ("__init__", "spark_mllib", "papers/__init__", "papers/terasort", "papers/spark_perf")
KERNELS = "/tmp/hpcc.py"  # a path that every guest has
STREAMS = ("iperf, host to guest", "iperf, guest to guest")  # natively: from process to process
PYTHON = ("python", "-m")
EMULATED = "QEMU emulates the guests' processors: the ratios are those of the emulation."
TUNING, NODE, NODES, SPARK = (
    "chapter 3, Guest Performance Tuning",
    "chapter 4, Single-node Performance",
    "chapter 4, Multi-node HPC Scaling",
    "chapter 4, Apache Spark",
)
REPORTED = (  # what, the report's value and its place, what is here instead
    ("guests on 32 nodes against native", "up to 20 % slower", "abstract", "one machine"),
    ("iperf across hosts, Gb/s", "30", TUNING, "one host"),
    ("iperf between two guests of a chassis, or a guest and any host, Gb/s", "18", TUNING,
     "the rows of iperf above"),
    ("HPL on one node, guests (newer MKL) against Cray's LibSci, and against MKL natively",
     "9 and 2 % faster", NODE, "the row hpl above, with the same BLAS in both"),
    ("DGEMM and MPIFFT on one node, guests against Cray's LibSci", "faster: newer MKL", NODE,
     "the rows dgemm and fft above, with the same BLAS in both"),
    ("RandomAccess on one node, overhead of guests", "small, larger for one process", NODE,
     "the row random access above"),
    ("STREAM on one node, guests", "as fast or faster: newer kernel's huge pages", NODE,
     "the rows stream above"),
    ("ping-pong of 2 MB within a node, natively", "notably more than in a guest: XPMEM copies once",
     NODE, "natively above; a guest has one core and one rank"),
    ("HPCG on one node, overhead of guests", "3.6 %", NODES, "the row hpcg above"),
    ("HPCG as nodes grow, overhead of guests", "9 to 12 %", NODES, "one machine"),
    ("HPL as nodes grow, overhead of guests", "about 18 %", NODES, "one machine"),
    ("TeraSort in guests, 10 GB", "3 min 9 s", SPARK, "the row TeraSort above, 10 MB"),
    ("TeraSort in guests, 100 GB", "over 8 h", SPARK, "not run"),
    ("TeraSort natively", "no run ended", SPARK, "the native column"),
)  # fmt: skip

Run = Callable[..., str]  # what a command prints, at one of the places


def run(setting: Setting) -> Page:
    """Natively, then in guests of this machine."""
    divide = setting.divide or 1
    sizes = [SECONDS[setting.scale] / divide]
    sizes += [int(of[setting.scale] / divide) for of in (SORTED_BYTES, RECORDS)]
    page = Page(
        "guests",
        "Younge et al. 2017, native against guests",
        f"{GUESTS} guests of one core each under libvirt and QEMU on one machine, and {GUESTS} "
        f"ranks (the report: 32 nodes of a Cray XC30); TeraSort of {sizes[1] / 1e6:g} MB and "
        f"spark-perf with {sizes[2]} records on one core",
        once=True,
    )
    if (reason := lab.why_not()) is not None:
        page.notes.append(f"Not measured: {reason}.")
        return page
    native = list(_native(*sizes))
    with tempfile.TemporaryDirectory() as scratch, lab.lab(Path(scratch)) as place:
        begun = time.monotonic()
        _checked(place.up("--guests", GUESTS, memory="4G"))
        booted = time.monotonic() - begun
        place.join_ray()
        told = _checked(place.run(
            sys.executable, "-m", "benchmarks.papers.guests", json.dumps(sizes),
            *place.words(name="more"), "--join", "vc", "--first", 41, limit_s=LIMIT_S,
        ))  # fmt: skip
        _checked(place.alchemist("down"))
    guest, changes = json.loads(told.splitlines()[-1])
    changes = {f"{GUESTS} guests: `virtual-cluster up` until their Ray is up": booted} | changes
    page.data = {"native": [asdict(one) for one in native], "guest": guest, "changes, s": changes,
                 "emulated": "--emulate" in lab.MODE}  # fmt: skip
    fill(page)
    return page


def _checked(done: subprocess.CompletedProcess[str]) -> str:
    if done.returncode:
        raise RuntimeError((done.stdout + done.stderr)[-4000:])
    return done.stdout


# --- the measures ---


def _native(seconds: float, nbytes: int, records: int) -> Iterator[Measure]:
    for suite in ("benchmarks.hpc:bare", "benchmarks.papers.hpcc:bare"):
        ran = local_gang.run(suite, GUESTS, seconds, timeout=LIMIT_S)
        yield from result("native", *ran).measures
    for ranks in range(GUESTS, 0, -1):
        yield from _weak(ranks, local_gang.run("benchmarks.papers.hpcc:bare_weak", ranks, seconds))
    core = ("taskset", "-c", str(min(os.sched_getaffinity(0))))
    for what in STREAMS:
        yield from _stream(what, "127.0.0.1", output, output)
    yield from _spark(lambda *words: output(*core, *words, sources=_sources()), nbytes, records)


def _weak(ranks: int, found: tuple[float, float]) -> Iterator[Measure]:
    """Weak scaling, as the report's Figures 4.5 and 4.6."""
    for what, rate in zip(("HPL", "HPCG"), found, strict=True):
        yield Measure(f"weak scaling, {what}, {counted(ranks, 'core')}", rate, "GFLOP/s", more=True)


def _stream(what: str, address: str, server: Run, client: Run) -> Iterator[Measure]:
    """A TCP stream, by the report's iperf."""
    if not (_has(server, "iperf3") and _has(client, "iperf3")):
        return
    server("iperf3", "--server", "--one-off", "--daemon", "--idle-timeout", 30)
    told = json.loads(client("iperf3", "--json", "--time", "3", "--client", address))
    rate = told["end"]["sum_received"]["bits_per_second"] / 1e9
    yield Measure(what, rate, "Gb/s", more=True)


def _spark(run: Run, nbytes: int, records: int) -> Iterator[Measure]:
    """TeraSort and spark-perf, on one core."""
    if not _has(run, "java"):
        return
    spark = ("--master", "local[1]")
    sort = json.loads(run(*PYTHON, "benchmarks.papers.terasort", nbytes, "--runs", 1, *spark))
    tests = json.loads(run(*PYTHON, "benchmarks.papers.spark_perf", records, *spark))
    yield Measure("TeraSort", sort, "s", more=False)
    for name, took in tests.items():
        yield Measure(f"spark-perf, {name}", took, "s", more=False)


def _has(run: Run, program: str) -> bool:
    return bool(run("sh", "-c", f"command -v {program} || true"))


def _sources() -> dict[str, str]:
    """The programs of Spark, for a guest, which has no benchmarks."""
    paths = [f"benchmarks/{name}.py" for name in SOURCES]
    return {path: (ROOT / path).read_text() for path in paths}


def output(*words: object, sources: Mapping[str, str] = {}) -> str:
    """What a command prints; it runs in a folder of its own with these sources."""
    with tempfile.TemporaryDirectory() as folder:
        for path, text in sources.items():
            file = Path(folder, path)
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
        done = subprocess.run(
            [sys.executable if word == "python" else str(word) for word in words], cwd=folder,
            capture_output=True, text=True, timeout=3600, check=False,
            env={**os.environ, "RAY_ADDRESS": ""}, stdin=subprocess.DEVNULL,
        )  # fmt: skip
    if done.returncode:
        raise RuntimeError(f"{words}: {(done.stderr or done.stdout)[-3000:]}")
    return done.stdout


# --- a program on the guests' host ---


def main(sizes: list[Any], up: list[str]) -> None:
    """Measure in guests, start one more and end it; print the measures and the seconds."""
    seconds, nbytes, records = sizes
    found: list[Measure] = []
    guests = {}
    for ranks in range(GUESTS, 0, -1):
        with inside.opened(ranks) as session:
            guests = guests or _guests()
            library = session.load_library("hpcc", KERNELS)
            found += _weak(ranks, library.weak(seconds))
            if ranks == GUESTS:
                found += measure(session, "guest", seconds).measures
                found += result("guest", *library.kernels(seconds)).measures
    with inside.opened(GUESTS) as session:
        changes = _changes(session, up)
    first, second = guests.values()
    for what, client in zip(STREAMS, (output, second), strict=True):
        found += _stream(what, next(iter(guests)), first, client)
    found += _spark(partial(second, sources=_sources()), nbytes, records)
    print(json.dumps([[asdict(one) for one in found], changes]), flush=True)


def _guests() -> dict[str, Run]:
    """`output` in each guest, by its address; each gets the kernels as a file."""

    def run(node: str, *words: object, **options: Any) -> str:
        at = NodeAffinitySchedulingStrategy(node, soft=False)
        task = ray.remote(output).options(num_cpus=0, scheduling_strategy=at)
        return ray.get(task.remote(*words, **options))

    found = {}
    for node in ray.nodes():
        if node["Resources"].get("CPU"):
            found[node["NodeManagerAddress"]] = partial(run, node["NodeID"])
    kernels = {"hpcc.py": Path(__file__).with_name("hpcc.py").read_text()}
    for its in found.values():
        its("cp", "hpcc.py", KERNELS, sources=kernels)
    return found


def _changes(session: AlchemistSession, up: list[str]) -> dict[str, float]:
    """Seconds of the steps by which a guest comes to a gang that lives, and goes."""
    took = {}

    def step(what: str, work: Callable[[], object]) -> None:
        begun = time.monotonic()
        work()
        took[what] = time.monotonic() - begun

    step("one guest more: `up --join vc`", lambda: inside.virtual_cluster(*up))
    step("`als.resize(3)`", lambda: inside.patiently(lambda: session.resize(GUESTS + 1)))
    step("`als.resize(2)`", lambda: inside.patiently(lambda: session.resize(GUESTS)))
    down = ("down", "--name", "more")
    step("`virtual-cluster down` of that guest", lambda: inside.virtual_cluster(*down))
    return took


# --- the page ---


def fill(page: Page) -> None:
    """Tables and verdicts of the measures that the page has."""
    native, guest = ([Measure(**one) for one in page.data[at]] for at in ("native", "guest"))
    changes, emulated = page.data["changes, s"], page.data["emulated"]
    add = page.table("measure", "unit", "native", "guest", "guest / native")
    theirs = {one.what: one for one in guest}
    ratios = {}
    for one in native:
        if its := theirs.get(one.what):
            ratios[one.what] = goodness(its, one)
        add(
            one.what, one.unit, f"{one.value:.3g}", f"{its.value:.3g}" if its else "-",
            f"{ratios[one.what]:.3g}" if its else "-",
        )  # fmt: skip
    mean = geometric_mean(ratios.values())
    add("geometric mean", "", "1", "", f"{mean:.3g}")
    add = page.table("guests that come and go", "seconds")
    for what, took in changes.items():
        add(what, f"{took:.1f}")
    add = page.table("the report's numbers", "the report", "section", "here")
    for what, value, place, here in REPORTED:
        add(what, value, cited(f"report, {place}"), here)
    iperf = [one.value for one in native if one.what in STREAMS]
    if len(iperf) == len(STREAMS):
        page.notes.append(
            "Natively both rows of iperf are one measurement, from process to process of this "
            f"machine, taken twice: they differ by a factor of {max(iperf) / min(iperf):.1f}, so "
            "that ratios of these rows mean no more than an order of magnitude."
        )
    page.notes += [EMULATED] * emulated
    claim = "on one node a guest under KVM is nearly as fast as the host"
    found = f"the guests reach {mean:.2g} of native"
    because = f"{found}, but QEMU emulates their processors: there is no KVM here"
    holds = None if emulated else mean >= NEAR
    page.conclude(holds, claim, f"report, {NODE}", because if emulated else found)
    claim = "overhead grows by up to 20 % with the number of nodes, by bridged Ethernet"
    page.conclude(None, claim, "report, abstract", "this is one machine")


if __name__ == "__main__":
    main(json.loads(sys.argv[1]), sys.argv[2:])
