"""Turns of a measurement, their times on all ranks, and the limits of residuals."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

from ali.interface import Context
from mpi_workers.failures import Failure

WARM_UP = 2
MAX_TURNS = 10_000
MAX_NBYTES = 1 << 30  # 1 GiB
RESIDUAL_LIMIT = 16.0  # HPCC's and HPL's
EPS = float(np.finfo(np.float64).eps)


def best_time(ctx: Context, work: Callable[[], object], seconds: float) -> float:
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


def turn_times(
    ctx: Context, work: Callable[[], object], seconds: float, least: int = 3, warm_up: int = WARM_UP
) -> NDArray[np.float64]:
    """Seconds of each turn of work that all ranks do together, on the slowest rank. Collective.

    After `warm_up` turns (at least one), as many turns as fit into `seconds`, but at least `least`.
    """
    ctx.comm.Barrier()
    start = time.perf_counter()
    for _ in range(warm_up):
        work()
    took = (time.perf_counter() - start) / warm_up
    count = ctx.comm.bcast(turns(took, seconds, least))  # the same number on all ranks
    times = np.empty(count)
    for turn in range(count):
        ctx.check()
        start = time.perf_counter()
        work()
        times[turn] = time.perf_counter() - start
    MPI.Comm.Allreduce(ctx.comm, MPI.IN_PLACE, times, MPI.MAX)
    return times


def turns(took_s: float, seconds: float, least: int = 3) -> int:
    """How many turns of `took_s` fit into `seconds`."""
    return int(min(MAX_TURNS, max(least, seconds / max(took_s, 1e-7))))


def of_all_ranks(ctx: Context, value: float) -> list[float]:
    """The value of every rank, on all ranks. Collective."""
    found: list[float] = ctx.comm.allgather(value)
    return found


def check_range(name: str, value: int, most: int, least: int = 1) -> None:
    """Refuse an argument outside of a range. Raises `Failure`."""
    if not least <= value <= most:
        raise Failure(
            "BadArgumentError",
            f"{name}={value}: it must be a whole number from {least} to {most}",
        )


def validated(ctx: Context, what: str, error: float, limit: float = RESIDUAL_LIMIT) -> float:
    """The largest error of all ranks. Collective.

    Raises
    ------
    Failure
        RoutineError on all ranks if it exceeds the limit or is not a number.
    """
    worst = max(of_all_ranks(ctx, error if error == error else float("inf")))
    if worst > limit:
        raise Failure(
            "RoutineError",
            f"{what}: the error {worst:.3g} exceeds the limit {limit:g}: processor, memory, BLAS "
            "or MPI of these nodes compute wrong results (alchemist doctor)",
        )
    return worst
