"""Heat's side of `heat`: its routines in a plain mpiexec program, one thread per rank."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from mpi_workers.rank.gang import Gang

BUDGET_S = 3.0  # of an operation: slow ones have fewer rounds


def measure(gang: Gang, sizes: dict[str, list[int]], rounds: int) -> dict[str, float]:
    """The best time of each operation in seconds, on data that Heat has made."""
    import heat as ht
    import torch

    torch.set_num_threads(1)
    ht.random.seed(0)

    def matrix(name: str, split: int = 0) -> Any:
        return ht.random.randn(*sizes[name][:2], dtype=ht.float64, split=split)

    a, b = matrix("matmul"), matrix("matmul", 1)
    tall, thin, wide = matrix("qr"), matrix("svd"), matrix("sum")
    long, points, samples = (
        ht.random.randn(*sizes["sort"], split=0),
        matrix("k-means"),
        matrix("pca"),
    )
    k, iterations = sizes["k-means"][2:]
    truncated, rank = matrix("truncated svd"), sizes["truncated svd"][2]
    works: dict[str, Callable[[], Any]] = {
        "matmul": lambda: ht.matmul(a, b),
        "qr": lambda: ht.linalg.qr(tall),
        "svd": lambda: ht.linalg.svd(thin),
        "truncated svd": lambda: ht.linalg.hsvd_rank(truncated, rank, compute_sv=True),
        "sum": lambda: ht.sum(wide, axis=0),
        "sort": lambda: ht.sort(long),
        "pca": lambda: ht.decomposition.PCA(sizes["pca"][2]).fit(samples),
        "k-means": lambda: ht.cluster.KMeans(k, init="random", max_iter=iterations, tol=0.0).fit(
            points
        ),
    }
    return {name: _best(gang, work, rounds) for name, work in works.items()}


def _best(gang: Gang, work: Callable[[], Any], rounds: int) -> float:
    best, spent = float("inf"), 0.0
    while rounds and gang.comm.bcast(spent) < BUDGET_S:
        gang.comm.Barrier()
        begin = time.perf_counter()
        work()
        gang.comm.Barrier()
        seconds = time.perf_counter() - begin
        best, spent, rounds = min(best, seconds), spent + seconds, rounds - 1
    return best
