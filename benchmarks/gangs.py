"""Matrices that go from gang to gang, and fields that two running calls exchange.

On one node beside `to_layout` within one gang; between two hosts, which are namespaces of this
machine (needs root, otherwise left out), beside a plain stream. ``python -m benchmarks.gangs``.
"""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from alchemist_ray import AlchemistSession, couple
from ali import context
from benchmarks.harness import Report, Time, Turns, alone, in_turns
from benchmarks.streams import PLAIN, plain_sockets, plain_streams, served
from tests.faults import inside
from tests.faults.hosts import Hosts, why_not
from tests.support.build import shared_object

SHAPE = (10_000, 5_000)  # 400 MB
FAR_SHAPE = (4_000, 4_000)  # 128 MB
LAYOUTS = ("VC_STAR", "MC_MR")
ROUNDS = 9
LIMIT_S = 240.0
DOUBLES, EXCHANGES = 10_000, 1_000


def run() -> Report:
    report = Report("gangs")
    _one_node(report)
    _two_hosts(report)
    _exchanges(report)
    return report


def _one_node(report: Report) -> None:
    x = np.random.default_rng(0).random(SHAPE)
    with AlchemistSession(3, progress=False) as a, AlchemistSession(2, progress=False) as b:
        A = a.send_matrix(x, layout=LAYOUTS[0])
        if not np.array_equal(b.send_matrix(A, layout=LAYOUTS[1]).fetch(), x):
            raise AssertionError("what came is not what was sent")
        B = b.send_matrix(x, layout=LAYOUTS[0])
        times = in_turns(
            {
                "to_layout, 3 ranks": lambda: A.to_layout(LAYOUTS[1]).free(),
                "to_layout, 2 ranks": lambda: B.to_layout(LAYOUTS[1]).free(),
                "from gang to gang": lambda: b.send_matrix(A, layout=LAYOUTS[1]).free(),
                "by the user's process": lambda: b.send_matrix(A.fetch(), layout=LAYOUTS[1]).free(),
            },
            ROUNDS,
        )
    took = times["from gang to gang"]
    for ranks in (3, 2):
        reference = times[f"to_layout, {ranks} ranks"]
        report.add(
            f"400 MB from 3 ranks to 2, one node, / to_layout on {ranks} ranks",
            took / reference, 1.3, "x", at_most=True, detail=f"{LAYOUTS[0]} to {LAYOUTS[1]}, "
            f"{4e-1 / took:.2f} GB/s; {took}; to_layout {reference}",
        )  # fmt: skip
    by_user = times["by the user's process"]
    report.notes.append(f"`b.send_matrix(A.fetch())` of the same matrix: {by_user}.")


def _two_hosts(report: Report) -> None:
    if (reason := why_not()) is not None:
        report.notes.append(f"Two hosts not measured: {reason}.")
        return
    with Hosts(2) as hosts:
        near, far = hosts[0], hosts[1]
        hosts.start_ray([2, 2], store_bytes=1 << 30)
        with served(PLAIN, math.isqrt(math.prod(FAR_SHAPE)), far) as plain:
            found = near.call("benchmarks.gangs:measured_between", far.name, plain, limit_s=LIMIT_S)
            cpu_s = {name: _cpu_s(hosts, name) for name in found}
    times = {name: Time(turns) for name, turns in found.items()}
    took, bare = times["from gang to gang"], times["plain stream"]
    nbytes = 8 * math.prod(FAR_SHAPE)
    report.add(
        "128 MB from gang to gang, two hosts, / one plain stream", took / bare, 1.2, "x",
        at_most=True,
        detail=f"{1e-9 * nbytes / took:.2f} GB/s; {took}; plain {bare}",
    )  # fmt: skip
    each = " and ".join(f"{1e9 * s / nbytes:.2f} s ({name})" for name, s in cpu_s.items())
    report.notes.append(f"CPU time of all processes of both hosts for each GB: {each}.")


def _cpu_s(hosts: Hosts, work: str) -> float:
    """The CPU time of all processes of both hosts for one turn of a work of `measured_between`."""

    def spent_s() -> float:
        return float(sum(hosts[n].call("benchmarks.gangs:cpu_s") for n in range(2)))

    begun = spent_s()
    hosts[0].call("benchmarks.gangs:repeat", work, ROUNDS, limit_s=LIMIT_S)
    return (spent_s() - begun) / ROUNDS


def cpu_s() -> float:
    """The CPU time of all processes of this host so far."""
    spent = (process.cpu_times() for process in psutil.process_iter())
    return float(sum(times.user + times.system for times in spent))


def repeat(work: str, rounds: int) -> None:
    """Do a work of `measured_between` again."""
    for _ in range(rounds):
        _works[work]()


_works: dict[str, Callable[[], Any]] = {}


def measured_between(far: str, plain: str) -> dict[str, list[float]]:
    """The turns of copies from a gang on the host `far` to one on this one; on that one."""
    inside.join(2)
    gangs = {worker[0]["host"]: name for name in ("one", "two")
             if (worker := inside.request(name, 2))}  # fmt: skip
    there = inside.sessions[gangs.pop(far)]
    (here,) = (inside.sessions[name] for name in gangs.values())
    x = np.random.default_rng(0).random(FAR_SHAPE)
    A = there.send_matrix(x, layout=LAYOUTS[0])
    if not np.array_equal(here.send_matrix(A, layout=LAYOUTS[1]).fetch(), x):
        raise AssertionError("what came is not what was sent")
    _works["plain stream"] = plain_streams(plain_sockets(plain, 1), np.empty(FAR_SHAPE), b"s")
    _works["from gang to gang"] = lambda: here.send_matrix(A, layout=LAYOUTS[1]).free()
    return {name: list(took.turns) for name, took in in_turns(_works, ROUNDS).items()}


# --- fields between running calls ---


def _exchanges(report: Report) -> None:
    """Both sides send a vector, then receive one; a turn is `EXCHANGES` of them."""
    turns = Turns()
    with (
        tempfile.TemporaryDirectory() as folder,
        AlchemistSession(2, progress=False) as a,
        AlchemistSession(2, progress=False) as b,
        AlchemistSession(1, progress=False) as one,
        AlchemistSession(1, progress=False) as other,
        ThreadPoolExecutor() as threads,
    ):
        path = shared_object(Path(__file__).with_suffix(".c"), Path(folder, "gangs.so"))
        couple(a, b)
        couple(one, other)
        library = a.load_library("gangs", path)
        ends = [als.load_library("gangs", path) for als in (one, other)]
        for _ in range(ROUNDS):
            turns.add("MPI_Sendrecv", library.sendrecv(DOUBLES, EXCHANGES))
            both = [threads.submit(end.exchange, DOUBLES, EXCHANGES) for end in ends]
            turns.add("C, 1 + 1 ranks", max(call.result() for call in both))
            for ranks, pair in ((1, (one, other)), (2, (a, b))):
                both = [threads.submit(als.run, exchanged, DOUBLES, EXCHANGES) for als in pair]
                turns.add(f"Python, {ranks} + {ranks} ranks", max(c.result() for c in both))
    times = turns.times()
    bare = times.pop("MPI_Sendrecv")
    took = times.pop("C, 1 + 1 ranks")
    report.add(
        "exchange of 10,000 doubles, C, 1 + 1 ranks / MPI_Sendrecv of 2 ranks of one gang",
        took / bare, 5.0, "x", at_most=True,
        detail=f"{took}, means of {EXCHANGES} exchanges; MPI_Sendrecv {bare}",
    )  # fmt: skip
    report.notes += [f"The same exchange, {what}: {took}." for what, took in times.items()]


def exchanged(comm: Any, n: int, count: int) -> float:
    """Seconds of an exchange, on a rank."""
    ctx = context()
    channel, mine = ctx.channel("interface"), ctx.zeros((n,), "float64")
    theirs, begun = ctx.empty_like(mine), time.perf_counter()
    for k in range(count):
        mine.local[...] = k
        channel.send(mine)
        channel.receive(out=theirs)
        if theirs.local[-1, 0] != k:
            raise AssertionError(f"{theirs.local[-1, 0]} instead of {k}")
    return (time.perf_counter() - begun) / count


if __name__ == "__main__":
    alone(run)
