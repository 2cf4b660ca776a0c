"""Rates and times of ranks: products, copies, messages.

Messages use mpi4py's buffer calls and MPI's blocking calls, not the gang's interruptible waits, so
that they measure MPI. Python adds about a microsecond to a message on every machine: smaller
latencies cannot be measured here (use HPCC).
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
from mpi4py import MPI

from ali.interface import Context, routine
from mpi_workers.failures import Failure

WARM_UP = 2
MAX_TURNS = 10_000
MAX_NBYTES = 1 << 30  # 1 GiB


@routine("gflops")
def matmul(ctx: Context, n: int = 1000, seconds: float = 1.0) -> list[float]:
    """GFLOP/s of every rank in products of local float64 n x n matrices, all ranks at once.

    NumPy's BLAS with the gang's number of threads. The best of all products within `seconds` (at
    least two). Memory: 24 n^2 bytes a rank.

    Raises
    ------
    Failure
        BadArgumentError if n is not positive or is too large.
    """
    _check_range("n", n, int((MAX_NBYTES / 8) ** 0.5))
    rng = np.random.default_rng(ctx.rank)
    A, B = rng.random((n, n)), rng.random((n, n))
    C = np.empty((n, n))
    best_s = _best_time(ctx, lambda: np.matmul(A, B, out=C), seconds)
    return _rates(ctx, 2e-9 * n**3 / best_s)


@routine("rates")
def copy(ctx: Context, nbytes: int = 64 << 20, seconds: float = 0.5) -> list[float]:
    """GB/s of every rank in copies between two local arrays, all ranks at once.

    Counted as in STREAM: `nbytes` read and `nbytes` written. The arrays should be larger than the
    caches. Memory: 2 nbytes a rank.

    Raises
    ------
    Failure
        BadArgumentError if `nbytes` is not positive or is too large.
    """
    _check_range("nbytes", nbytes, MAX_NBYTES)
    source, target = np.ones(-(-nbytes // 8)), np.zeros(-(-nbytes // 8))
    best_s = _best_time(ctx, lambda: np.copyto(target, source), seconds)
    return _rates(ctx, 2e-9 * source.nbytes / best_s)


@routine("times")
def ping_pong(
    ctx: Context, sizes: list[int], first: int = 0, second: int = -1, seconds: float = 0.2
) -> list[float]:
    """Seconds of a message one way between two ranks, for each size in bytes.

    Half of the median round trip within `seconds` for each size. The other ranks wait without
    using their cores.

    Raises
    ------
    Failure
        BadArgumentError if the two ranks are equal or out of range, or a size is negative or too
        large.
    """
    for size in sizes:
        _check_range("sizes", size, MAX_NBYTES, least=0)
    ranks = [index + ctx.size if index < 0 else index for index in (first, second)]
    if len(set(ranks)) < 2 or not all(0 <= rank < ctx.size for rank in ranks):
        raise Failure(
            "BadArgumentError",
            f"ping_pong: ranks {first} and {second} are not two different ranks of {ctx.size}",
        )
    found = [_ping_pong(ctx, size, ranks, seconds) for size in sizes]
    ctx.comm.Barrier()
    of_all_ranks: list[list[float]] = ctx.comm.allgather(found)
    return of_all_ranks[ranks[0]]


def _ping_pong(ctx: Context, size: int, ranks: list[int], seconds: float) -> float:
    if ctx.rank not in ranks:
        return 0.0
    sent, received = np.zeros(size, np.uint8), np.zeros(size, np.uint8)
    comm, other = ctx.comm, ranks[1 - ranks.index(ctx.rank)]

    def begin() -> None:
        MPI.Comm.Send(comm, [sent, MPI.BYTE], other)
        MPI.Comm.Recv(comm, [received, MPI.BYTE], other)

    def answer() -> None:
        MPI.Comm.Recv(comm, [received, MPI.BYTE], other)
        MPI.Comm.Send(comm, [sent, MPI.BYTE], other)

    one_turn = begin if ctx.rank == ranks[0] else answer
    turns = np.zeros(1, np.int64)
    start = time.perf_counter()
    for _ in range(WARM_UP):
        one_turn()
    took = (time.perf_counter() - start) / WARM_UP
    if ctx.rank == ranks[0]:  # it decides the number of turns
        turns[0] = _turns(took, seconds)
        MPI.Comm.Send(comm, turns, other)
    else:
        MPI.Comm.Recv(comm, turns, other)
    times = np.empty(int(turns[0]))
    for turn in range(len(times)):
        ctx.check()
        start = time.perf_counter()
        one_turn()
        times[turn] = time.perf_counter() - start
    return float(np.median(times)) / 2


@routine("times")
def allreduce(ctx: Context, sizes: list[int], seconds: float = 0.2) -> list[float]:
    """Seconds of a sum of float64 numbers over all ranks, for each size in bytes.

    The median of the slowest rank within `seconds` for each size.

    Raises
    ------
    Failure
        BadArgumentError if a size is below 8 or too large.
    """
    for size in sizes:
        _check_range("sizes", size, MAX_NBYTES, least=8)
    found = [_allreduce(ctx, size // 8, seconds) for size in sizes]
    return [max(times) for times in zip(*ctx.comm.allgather(found), strict=True)]


def _allreduce(ctx: Context, count: int, seconds: float) -> float:
    given, total = np.ones(count), np.zeros(count)
    comm = ctx.comm
    comm.Barrier()
    start = time.perf_counter()
    for _ in range(WARM_UP):
        MPI.Comm.Allreduce(comm, given, total)
    took = (time.perf_counter() - start) / WARM_UP
    turns = comm.bcast(_turns(took, seconds))  # the same number on all ranks
    times = np.empty(turns)
    for turn in range(turns):
        start = time.perf_counter()
        MPI.Comm.Allreduce(comm, given, total)
        times[turn] = time.perf_counter() - start
    if not np.all(total == ctx.size):
        raise Failure(
            "RoutineError",
            f"a sum of ones over {ctx.size} ranks is not {ctx.size}: the MPI of these nodes "
            "computes wrong results (alchemist doctor)",
        )
    return float(np.median(times))


def _best_time(ctx: Context, work: Callable[[], object], seconds: float) -> float:
    """Seconds of the fastest turn of independent work on all ranks at once."""
    work()
    ctx.comm.Barrier()
    best_s = float("inf")
    end = time.perf_counter() + seconds
    for turn in range(MAX_TURNS):
        ctx.check()
        start = time.perf_counter()
        if turn and start > end:
            break
        work()
        best_s = min(best_s, time.perf_counter() - start)
    return best_s


def _rates(ctx: Context, rate: float) -> list[float]:
    of_all_ranks: list[float] = ctx.comm.allgather(rate)
    return of_all_ranks


def _turns(took_s: float, seconds: float) -> int:
    return int(min(MAX_TURNS, max(3, seconds / max(took_s, 1e-7))))


def _check_range(name: str, value: int, most: int, least: int = 1) -> None:
    if not least <= value <= most:
        raise Failure(
            "BadArgumentError",
            f"{name}={value}: it must be a whole number from {least} to {most}",
        )
