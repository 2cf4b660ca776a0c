"""Matrices that go from gang to gang, and fields that two running calls exchange.

On one node beside `to_layout` within one gang; between two hosts, which are namespaces of this
machine (needs root, otherwise left out), beside a plain stream. ``python -m benchmarks.gangs``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from alchemist_ray import AlchemistSession
from benchmarks.harness import Report, Time, alone, in_turns
from benchmarks.streams import PLAIN, plain_sockets, plain_streams, served
from tests.faults import inside
from tests.faults.hosts import Hosts, why_not

SHAPE = (10_000, 5_000)  # 400 MB
FAR_SHAPE = (4_000, 4_000)  # 128 MB
LAYOUTS = ("VC_STAR", "MC_MR")
ROUNDS = 9
LIMIT_S = 240.0


def run() -> Report:
    report = Report("gangs")
    _one_node(report)
    _two_hosts(report)
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
    report.add(
        "the same / fetch and send by the user's process", took / by_user, 1.0, "x", at_most=True,
        detail=f"{by_user}",
    )  # fmt: skip


def _two_hosts(report: Report) -> None:
    if (reason := why_not()) is not None:
        report.notes.append(f"Two hosts not measured: {reason}.")
        return
    with Hosts(2) as hosts:
        near, far = hosts[0], hosts[1]
        hosts.start_ray([2, 2], store_bytes=1 << 30)
        with served(PLAIN, math.isqrt(math.prod(FAR_SHAPE)), far) as plain:
            found = near.call("benchmarks.gangs:measured_between", far.name, plain, limit_s=LIMIT_S)
    times = {name: Time(turns) for name, turns in found.items()}
    took, bare = times["from gang to gang"], times["plain stream"]
    nbytes = 8 * math.prod(FAR_SHAPE)
    report.add(
        "128 MB from gang to gang, two hosts, / one plain stream", took / bare, 1.2, "x",
        at_most=True,
        detail=f"{1e-9 * nbytes / took:.2f} GB/s; {took}; plain {bare}",
    )  # fmt: skip


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
    works: dict[str, Callable[[], Any]] = {
        "plain stream": plain_streams(plain_sockets(plain, 1), np.empty(FAR_SHAPE), b"s"),
        "from gang to gang": lambda: here.send_matrix(A, layout=LAYOUTS[1]).free(),
    }
    return {name: list(took.turns) for name, took in in_turns(works, ROUNDS).items()}


if __name__ == "__main__":
    alone(run)
