"""Heat's side of `heat`: its routines in a plain mpiexec program, one thread per rank."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

from mpi_workers.rank.gang_view import GangView

BUDGET_S = 3.0  # of an operation: slow ones have fewer rounds


def measure(gang: GangView, sizes: dict[str, list[int]], rounds: int) -> dict[str, list[float]]:
    """The seconds of each operation in every round, on data that Heat has made."""
    import heat as ht
    import torch

    torch.set_num_threads(1)
    ht.random.seed(0)

    def matrix(size: list[int], split: int = 0) -> Any:
        return ht.random.randn(*size[:2], dtype=ht.float64, split=split)

    def kmeans(size: list[int]) -> Callable[[], Any]:
        _, _, k, iterations = size
        points = matrix(size)
        return lambda: ht.cluster.KMeans(k, init="random", max_iter=iterations, tol=0.0).fit(points)

    # Each makes its data and returns the work on it.
    works: dict[str, Callable[[list[int]], Callable[[], Any]]] = {
        "matmul": lambda size: partial(ht.matmul, matrix(size), matrix(size, 1)),
        "qr": lambda size: partial(ht.linalg.qr, matrix(size)),
        "svd": lambda size: partial(ht.linalg.svd, matrix(size)),
        "truncated svd": lambda size: partial(
            ht.linalg.hsvd_rank, matrix(size), size[2], compute_sv=True
        ),
        "sum": lambda size: partial(ht.sum, matrix(size), axis=0),
        "sort": lambda size: partial(ht.sort, ht.random.randn(*size, split=0)),
        "pca": lambda size: partial(ht.decomposition.PCA(size[2]).fit, matrix(size)),
        "k-means": kmeans,
    }
    return {name: _rounds(gang, works[name](size), rounds) for name, size in sizes.items()}


def _rounds(gang: GangView, work: Callable[[], Any], rounds: int) -> list[float]:
    times: list[float] = []
    while len(times) < rounds and gang.comm.bcast(sum(times)) < BUDGET_S:
        gang.comm.Barrier()
        begin = time.perf_counter()
        work()
        gang.comm.Barrier()
        times.append(time.perf_counter() - begin)
    return times
