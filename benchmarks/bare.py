"""The same routines in a plain mpiexec program: no Ray, no session, no data from outside.

Run on ranks by `mpi_workers.local.local_gang`; the reference for a session's overhead.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from ali import registry
from mpi_workers.rank.gang_view import GangView


def matmul(gang: GangView, library: str, layout: str, n: int, rounds: int) -> float:
    """Best time of ``A @ B``, n x n, in seconds."""
    loaded = registry.load(library)
    arguments = {name: _random(gang, n, layout) for name in ("A", "B")}
    arguments |= {"transpose_a": "N", "transpose_b": "N"}
    best = float("inf")
    for _ in range(rounds):
        gang.comm.Barrier()
        start = time.perf_counter()
        result: Any = loaded.call(gang, "matmul", arguments)
        gang.comm.Barrier()
        best = min(best, time.perf_counter() - start)
        del result
    return best


def _random(gang: GangView, n: int, layout: str) -> Any:
    matrix = gang.new((n, n), "float64", layout)
    random = np.random.default_rng(gang.rank)
    for j in range(matrix.local.shape[1]):
        matrix.local[:, j] = random.random(matrix.local.shape[0])
    return matrix
