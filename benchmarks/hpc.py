"""The HPC check (`alchemist bench hpc`) in a gang, compared with a plain mpiexec program.

The same routines on the same number of ranks, alternately in a gang and in a plain MPI
program. A gang adds nothing between ranks, so the ratios should be 1.
"""

from __future__ import annotations

import os
from typing import Any

import ray

from alchemist_ray import AlchemistSession
from benchmarks.harness import Report
from mpi_workers.testing import local_gang

RANKS, ROUNDS, SECONDS = 2, 5, 0.3
SIZES = [8, 1 << 20]


def bare(gang: Any) -> dict[str, list[float]]:
    """The measures, on the ranks of `mpi_workers.testing.local_gang`."""
    from ali.hpc import allreduce, copy, matmul, ping_pong  # only ranks may initialise MPI
    from ali.interface import Context

    ctx = Context(gang, {})
    return {
        "matmul": matmul(ctx, 1000, SECONDS),
        "copy": copy(ctx, 64 << 20, SECONDS),
        "ping_pong": ping_pong(ctx, SIZES, seconds=SECONDS),
        "allreduce": allreduce(ctx, SIZES, SECONDS),
    }


def run() -> Report:
    report = Report("hpc")
    found: dict[str, list[dict[str, Any]]] = {"gang": [], "bare": []}
    for _ in range(ROUNDS):
        found["bare"].append(local_gang.run("benchmarks.hpc:bare", RANKS))
        with AlchemistSession(RANKS, progress=False) as session:
            library = session.load_library("hpc")
            found["gang"].append(
                {
                    "matmul": library.matmul(1000, SECONDS),
                    "copy": library.copy(64 << 20, SECONDS),
                    "ping_pong": library.ping_pong(SIZES, seconds=SECONDS),
                    "allreduce": library.allreduce(SIZES, SECONDS),
                }
            )
    for what, unit in (("matmul", "GFLOP/s"), ("copy", "GB/s")):
        ours, theirs = (max(max(r[what]) for r in found[who]) for who in ("gang", "bare"))
        report.add(
            f"{what}, a rank, all at once", ours / theirs, 0.9, "x bare mpiexec",
            detail=f"{ours:.3g} {unit}; bare {theirs:.3g}",
        )  # fmt: skip
    for what in ("ping_pong", "allreduce"):
        for i, size in enumerate(SIZES):
            ours, theirs = (min(r[what][i] for r in found[who]) for who in ("gang", "bare"))
            report.add(
                f"{what.replace('_', '-')}, {size} B", ours / theirs, 1.2, "x bare mpiexec",
                at_most=True, detail=f"{1e6 * ours:.3g} us; bare {1e6 * theirs:.3g}",
            )  # fmt: skip
    return report


if __name__ == "__main__":
    os.environ.setdefault("RAY_AUTH_MODE", "disabled")
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False)
    run().save()
    ray.shutdown()
