"""Heat (MPI arrays of torch tensors) beside `linalg` and handles, on as many ranks.

Both have one thread per rank. Heat runs as a program of its own (`heat_peer.py`), in turns with
ours. Times are those of the computation, on data that the ranks have.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from typing import Any

import numpy as np

from alchemist_ray import AlchemistSession
from benchmarks.harness import Report, Turns, alone, timed, use_peers
from benchmarks.heat_peer import BUDGET_S
from benchmarks.linalg import CORES
from mpi_workers.local import local_gang

SIZES = {
    "matmul": [4000, 4000],
    "qr": [100_000, 200],
    "svd": [20_000, 200],
    "truncated svd": [100_000, 500, 20],  # and the rank
    "sum": [8000, 4000],
    "sort": [2_000_000],
    "pca": [100_000, 200, 10],  # and the components
    "k-means": [200_000, 20, 8, 10],  # and the clusters and iterations
}
TURNS, ROUNDS = 2, 3
LIMIT_S = 300


def run() -> Report:
    use_peers()
    report = Report("heat")
    if importlib.util.find_spec("heat") is None:
        report.notes.append("Heat is not installed (make peers): nothing was measured.")
        return report
    turns = Turns()
    with AlchemistSession(CORES, progress=False) as als:
        works = _works(als)
        for _ in range(TURNS):
            for name, work in works.items():
                turns.add((name, "alchemist"), *_rounds(work))
            found = local_gang.run(
                "benchmarks.heat_peer:measure", CORES, SIZES, ROUNDS, timeout=LIMIT_S
            )
            for name, seconds in found.items():
                turns.add((name, "heat"), *seconds)
    times = turns.times()
    for name, size in SIZES.items():
        operation = f"{name}, {' x '.join(map(str, size))}"
        ours, theirs = times[name, "alchemist"], times[name, "heat"]
        report.compare(operation, "heat", theirs)
        report.compare(operation, "alchemist", ours)
        report.add(operation, ours / theirs, 1.0, "x Heat's time", at_most=True)
    return report


def _works(als: AlchemistSession) -> dict[str, Callable[[], Any]]:
    lib = als.load_library("linalg")
    random = np.random.default_rng(0)
    made = {n: als.send_matrix(random.standard_normal(size[:2])) for n, size in SIZES.items()}
    k, iterations = SIZES["k-means"][2:]
    rank, components = SIZES["truncated svd"][2], SIZES["pca"][2]
    return {
        "matmul": lambda: lib.matmul(made["matmul"], made["matmul"]),
        "qr": lambda: lib.qr(made["qr"]),
        "svd": lambda: lib.svd(made["svd"]),
        "truncated svd": lambda: lib.truncated_svd(made["truncated svd"], rank, method="gram"),
        "sum": lambda: made["sum"].sum(axis=0),
        "sort": lambda: np.sort(made["sort"]),
        "pca": lambda: lib.pca(made["pca"], components, method="gram"),
        "k-means": lambda: lib.kmeans(made["k-means"], k, max_iterations=iterations, tol=0.0),
    }


def _rounds(work: Callable[[], Any]) -> list[float]:
    times: list[float] = []
    while len(times) < ROUNDS and sum(times) < BUDGET_S:
        times.append(timed(work))
    return times


if __name__ == "__main__":
    os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112  # as the other program
    alone(run)
