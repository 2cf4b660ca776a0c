"""Times of messages: ping-pong between two ranks, rings, sums over all ranks.

Messages use mpi4py's buffer calls and MPI's blocking calls, not the gang's interruptible waits, so
that they measure MPI. Python adds about a microsecond to a message on every machine: smaller
latencies cannot be measured here (use HPCC).
"""

from __future__ import annotations

import time

import numpy as np
from mpi4py import MPI

from ali.hpc.timing import MAX_NBYTES, WARM_UP, check_range, turn_times, turns, validated
from ali.interface import Context, routine
from mpi_workers.failures import Failure

RANDOM_RINGS = 5
TO_RIGHT, TO_LEFT = 1, 2


@routine("times")
def ping_pong(
    ctx: Context,
    sizes: list[int],
    first: int = 0,
    second: int = -1,
    seconds: float = 0.2,
    fault: float = 0.0,
) -> list[float]:
    """Seconds of a message one way between two ranks, for each size in bytes.

    Half of the median round trip within `seconds` for each size. The other ranks wait without
    using their cores. If `fault` is not zero, rank `first` sends a wrong byte, to test the
    validation.

    Raises
    ------
    Failure
        BadArgumentError if the two ranks are equal or out of range, or a size is negative or too
        large; RoutineError if a message arrives with other contents.
    """
    for size in sizes:
        check_range("sizes", size, MAX_NBYTES, least=0)
    ranks = [index + ctx.size if index < 0 else index for index in (first, second)]
    if len(set(ranks)) < 2 or not all(0 <= rank < ctx.size for rank in ranks):
        raise Failure(
            "BadArgumentError",
            f"ping_pong: ranks {first} and {second} are not two different ranks of {ctx.size}",
        )
    found = [_ping_pong(ctx, size, ranks, seconds, fault) for size in sizes]
    times, wrong = zip(*found, strict=True) if found else ((), ())
    validated(ctx, "ping_pong: wrong bytes", sum(wrong), 0)
    of_all_ranks: list[list[float]] = ctx.comm.allgather(list(times))
    return of_all_ranks[ranks[0]]


def _ping_pong(
    ctx: Context, size: int, ranks: list[int], seconds: float, fault: float
) -> tuple[float, int]:
    """Seconds of a message, and how many bytes of it were wrong, for the two ranks."""
    if ctx.rank not in ranks:
        return 0.0, 0
    sent, received = _message(size, ctx.rank), np.zeros(size, np.uint8)
    if fault and size and ctx.rank == ranks[0]:
        sent[0] ^= 1
    comm, other = ctx.comm, ranks[1 - ranks.index(ctx.rank)]

    def begin() -> None:
        MPI.Comm.Send(comm, [sent, MPI.BYTE], other)
        MPI.Comm.Recv(comm, [received, MPI.BYTE], other)

    def answer() -> None:
        MPI.Comm.Recv(comm, [received, MPI.BYTE], other)
        MPI.Comm.Send(comm, [sent, MPI.BYTE], other)

    one_turn = begin if ctx.rank == ranks[0] else answer
    count = np.zeros(1, np.int64)
    start = time.perf_counter()
    for _ in range(WARM_UP):
        one_turn()
    took = (time.perf_counter() - start) / WARM_UP
    if ctx.rank == ranks[0]:  # it decides the number of turns
        count[0] = turns(took, seconds)
        MPI.Comm.Send(comm, count, other)
    else:
        MPI.Comm.Recv(comm, count, other)
    times = np.empty(int(count[0]))
    for turn in range(len(times)):
        ctx.check()
        start = time.perf_counter()
        one_turn()
        times[turn] = time.perf_counter() - start
    return float(np.median(times)) / 2, int((received != _message(size, other)).sum())


@routine("natural", "random")
def ring(
    ctx: Context, sizes: list[int], seconds: float = 0.2, fault: float = 0.0
) -> tuple[list[float], list[float]]:
    """Seconds of a message while every rank exchanges messages with both neighbours in a ring.

    Parameters
    ----------
    sizes : list of int
        Bytes of a message.
    seconds : float
        Time for each size and ring.
    fault : float
        If not zero, rank 0 sends a wrong byte, to test the validation.

    Returns
    -------
    natural : list of float
        For each size, in the ring of ranks in their order: half of the median turn of the slowest
        rank, as a rank sends two messages a turn. Bandwidth of a rank: size / time.
    random : list of float
        The geometric mean of five rings in random order.

    Raises
    ------
    Failure
        BadArgumentError on one rank, or if a size is not positive or too large; RoutineError if a
        message arrives with other contents.

    Notes
    -----
    Source: HPC Challenge 1.5, b_eff (natural and random ring, with nonblocking calls).
    """
    for size in sizes:
        check_range("sizes", size, MAX_NBYTES)
    if ctx.size < 2:
        raise Failure("BadArgumentError", "ring: a ring needs at least two ranks")
    rng = np.random.default_rng(0)  # the same rings on all ranks
    rings = [np.arange(ctx.size), *(rng.permutation(ctx.size) for _ in range(RANDOM_RINGS))]
    natural, random = [], []
    for size in sizes:
        times = [_ring(ctx, order, size, seconds / len(rings), fault) for order in rings]
        natural.append(times[0])
        random.append(float(np.exp(np.log(times[1:]).mean())))
    return natural, random


def _ring(ctx: Context, order: np.ndarray, size: int, seconds: float, fault: float) -> float:
    at = int(np.flatnonzero(order == ctx.rank)[0])
    left, right = int(order[at - 1]), int(order[(at + 1) % ctx.size])
    comm = ctx.comm
    sent = _message(size, ctx.rank)
    from_left, from_right = np.zeros(size, np.uint8), np.zeros(size, np.uint8)
    if fault and ctx.rank == 0:
        sent[0] ^= 1

    def turn() -> None:
        waits = [
            MPI.Comm.Irecv(comm, [from_left, MPI.BYTE], left, TO_RIGHT),
            MPI.Comm.Irecv(comm, [from_right, MPI.BYTE], right, TO_LEFT),
            MPI.Comm.Isend(comm, [sent, MPI.BYTE], right, TO_RIGHT),
            MPI.Comm.Isend(comm, [sent, MPI.BYTE], left, TO_LEFT),
        ]
        MPI.Request.Waitall(waits)

    times = turn_times(ctx, turn, seconds)
    wrong = int((from_left != _message(size, left)).sum())
    wrong += int((from_right != _message(size, right)).sum())
    validated(ctx, f"ring: wrong bytes in messages of {size} B", wrong, 0)
    return float(np.median(times)) / 2


def _message(size: int, rank: int) -> np.ndarray:
    """Bytes that differ between ranks."""
    return np.resize(((np.arange(251) + 7 * rank) % 251).astype(np.uint8), size)


@routine("times")
def allreduce(ctx: Context, sizes: list[int], seconds: float = 0.2) -> list[float]:
    """Seconds of a sum of float64 numbers over all ranks, for each size in bytes.

    The median of the slowest rank within `seconds` for each size.

    Raises
    ------
    Failure
        BadArgumentError if a size is below 8 or too large; RoutineError if a sum is wrong.
    """
    for size in sizes:
        check_range("sizes", size, MAX_NBYTES, least=8)
    return [_allreduce(ctx, size // 8, seconds) for size in sizes]


def _allreduce(ctx: Context, count: int, seconds: float) -> float:
    given, total = np.ones(count), np.zeros(count)
    times = turn_times(ctx, lambda: MPI.Comm.Allreduce(ctx.comm, given, total), seconds)
    validated(ctx, "allreduce of ones: wrong sums", int((total != ctx.size).sum()), 0)
    return float(np.median(times))
