"""The HPC check (`alchemist bench hpc`) in a gang, compared with a plain mpiexec program.

The same routine on the same number of ranks, alternately in a gang and in a plain MPI
program. A gang adds nothing between ranks, so the ratios should be 1.
"""

from __future__ import annotations

import os
from collections import defaultdict
from typing import Any

from alchemist_ray import AlchemistSession
from alchemist_ray.observe.bench import Measure, measure, result
from benchmarks.harness import Report, alone
from mpi_workers.local import local_gang

RANKS, ROUNDS, SECONDS = 2, 5, 0.3
AT_LEAST, AT_MOST = 0.9, 1.2  # ratios of rates, of times
LEFT_OUT = ("slowest rank", " 1.0 kB", " 65.5 kB", " 4.2 MB")  # of messages: two sizes are shown


def bare(gang: Any, seconds: float = SECONDS) -> list[list[str]]:
    """The measures, on the ranks of `mpi_workers.local.local_gang`."""
    from ali.hpc import suite  # only ranks may initialise MPI
    from ali.interface import Context

    return list(suite(Context(gang, {}), seconds))


def run() -> Report:
    report = Report("hpc")
    load, cores = os.getloadavg()[0], os.cpu_count() or 1
    if load > cores / 2:
        report.notes.append(f"**Taken on a loaded machine** (load {load:.1f} at the begin).")
    found: dict[str, dict[str, list[Measure]]] = {"gang": defaultdict(list)}
    found["bare"] = defaultdict(list)
    for _ in range(ROUNDS):
        results = {"bare": result("bare", *local_gang.run("benchmarks.hpc:bare", RANKS))}
        with AlchemistSession(RANKS, progress=False) as session:
            results["gang"] = measure(session, "gang", SECONDS)
        for who, its in results.items():
            for one in its.measures:
                found[who][one.what].append(one)
    for what, turns in found["gang"].items():
        if any(words in what for words in LEFT_OUT):
            continue
        unit, more = turns[0].unit, turns[0].more
        best = max if more else min
        ours, theirs = (best(one.value for one in found[who][what]) for who in ("gang", "bare"))
        report.add(
            what, ours / theirs, AT_LEAST if more else AT_MOST, "x bare mpiexec",
            at_most=not more, detail=f"{ours:.3g} {unit}; bare {theirs:.3g}",
        )  # fmt: skip
    return report


if __name__ == "__main__":
    alone(run, cpus=4)
