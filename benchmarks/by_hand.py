"""What a user would write without Alchemist: with mpi4py, and with Ray's tasks.

The functions for ranks take a gang of `mpi_workers.local.local_gang` and give seconds; the data
is where each program wants it before the clock starts.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import ray
from mpi4py.futures import MPICommExecutor

from mpi_workers.rank.gang_view import GangView

Array = np.ndarray[Any, Any]


# --- mpi4py ---


def nothing(gang: GangView) -> int:
    """Ranks that have started and found each other."""
    gang.comm.Barrier()
    return gang.comm.Get_size()


def futures(gang: GangView, count: int) -> float:
    """Calls by mpi4py.futures, each on one of two workers: it has none of several ranks."""
    seconds = 0.0
    with MPICommExecutor(gang.comm, 0) as workers:
        if workers is not None:
            list(workers.map(abs, range(2)))
            begin = time.perf_counter()
            for future in [workers.submit(abs, 0) for _ in range(count)]:
                future.result()
            seconds = time.perf_counter() - begin
    return seconds


def matmul(gang: GangView, n: int) -> float:
    """A times B, both in blocks of rows: B goes to all ranks, each multiplies its rows."""
    rows = _rows(gang, n)
    A, part = (np.random.default_rng(gang.rank).random((rows, n)) for _ in "AB")

    def multiply() -> None:
        B = np.empty((n, n))
        counts = gang.comm.allgather(part.size)
        gang.comm.Allgatherv(part, [B, counts])
        A @ B

    return _seconds(gang, multiply)


def truncated_svd(gang: GangView, m: int, n: int, rank: int) -> float:
    """By the Gram matrix, as `ali.linalg` does with ``method="gram"``."""
    A = np.random.default_rng(gang.rank).random((_rows(gang, m), n))

    def svd() -> None:
        gram = A.T @ A
        gang.comm.Allreduce(gram.copy(), gram)
        values, vectors = np.linalg.eigh(gram)
        V = vectors[:, ::-1][:, :rank]
        A @ V / np.sqrt(values[::-1][:rank])

    return _seconds(gang, svd)


def _rows(gang: GangView, m: int) -> int:
    """Rows of this rank of a matrix of `m` rows."""
    return m // gang.size + (gang.rank < m % gang.size)


def _seconds(gang: GangView, work: Callable[[], None]) -> float:
    """The second run: the first one brings pages and starts threads."""
    for _ in range(2):
        gang.comm.Barrier()
        begin = time.perf_counter()
        work()
        gang.comm.Barrier()
    return time.perf_counter() - begin


# --- Ray ---


@ray.remote(num_cpus=0)
class Holder:
    """An actor that does what one rank would."""

    def nothing(self) -> None:
        """Answer."""

    def rows(self, A: Array, begin: int, end: int) -> Array:
        """Copy some rows, as a rank gets its own ones."""
        return A[begin:end].copy()


@ray.remote(num_cpus=0)
def product(a: Array, B: Array) -> Array:
    """A block of rows of a product."""
    return a @ B


@ray.remote(num_cpus=0)
def gram(a: Array) -> Array:
    """A block's part of the Gram matrix."""
    return a.T @ a


def ray_matmul(blocks: list[Any], B: Any) -> list[Any]:
    """Objects of the product's blocks of rows."""
    done = [product.remote(a, B) for a in blocks]
    ray.wait(done, num_returns=len(done))
    return done


def ray_truncated_svd(blocks: list[Any], rank: int) -> tuple[Array, list[Any], Array]:
    """By the Gram matrix: S, objects of U's blocks of rows, V."""
    values, vectors = np.linalg.eigh(sum(ray.get([gram.remote(a) for a in blocks])))
    V, S = vectors[:, ::-1][:, :rank], np.sqrt(values[::-1][:rank])
    return S, ray_matmul(blocks, ray.put(V / S)), V
