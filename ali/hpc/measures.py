"""Rates of ranks in products and memory, times of messages, and all of them in one call.

Messages use mpi4py's buffer calls and MPI's blocking calls, not the gang's interruptible waits, so
that they measure MPI. Python adds about a microsecond to a message on every machine: smaller
latencies cannot be measured here (use HPCC).
"""

from __future__ import annotations

import json
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from statistics import median

import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray
from scipy.linalg import blas

from ali.hpc.identity import about
from ali.interface import Context, routine
from mpi_workers.failures import Failure
from mpi_workers.matrix.sizes import readable

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


CACHED = 1 << 14  # elements of each array that two passes keep in the cache
SCALAR = 0.4  # a full round of STREAM multiplies by 0.96: neither overflow nor underflow
STREAM_LIMIT = 1e-13
STREAM_ROUNDS = 1000  # 0.96^1000 is about 1e-18


@routine("gflops", "residual")
def dgemm(
    ctx: Context, n: int = 1000, seconds: float = 1.0, fault: float = 0.0
) -> tuple[list[float], float]:
    """GFLOP/s of every rank in products of local float64 matrices, all ranks at once.

    C = alpha A B + beta C for n x n matrices, by SciPy's BLAS with the gang's number of threads.

    Parameters
    ----------
    n : int
        Memory: 40 n^2 bytes a rank.
    seconds : float
        The best of all products within this time, at least two.
    fault : float
        Added to an element of C on rank 0 before the validation, to test the validation.

    Returns
    -------
    gflops : list of float
        2 n^3 flops a product, by rank.
    residual : float
        ``|C x - (alpha A (B x) + beta C0 x)| / (|C| |x| n eps)`` in the infinity norm, for a random
        vector x; the largest of all ranks. At most 16, as in HPCC.

    Raises
    ------
    Failure
        BadArgumentError if n is not positive or is too large; RoutineError if the residual
        exceeds its limit.

    Notes
    -----
    Source: HPC Challenge 1.5, DGEMM/tstdgemm.c.
    """
    check_range("n", n, int((MAX_NBYTES / 8) ** 0.5))
    rng = np.random.default_rng(ctx.rank)
    A, B, C0 = (np.asfortranarray(rng.random((n, n)) - 0.5) for _ in range(3))
    x = rng.random(n) - 0.5
    alpha, beta = rng.random(2)
    C = C0.copy(order="F")
    best_s = best_time(ctx, lambda: blas.dgemm(alpha, A, B, beta, C, overwrite_c=True), seconds)
    C = blas.dgemm(alpha, A, B, beta, C0)
    if ctx.rank == 0:
        C[0, 0] += fault
    gap = C @ x - (alpha * (A @ (B @ x)) + beta * (C0 @ x))
    norm = np.abs(C).sum(axis=1).max() * np.abs(x).max()
    residual = validated(ctx, "dgemm", float(np.abs(gap).max() / (norm * n * EPS)))
    return of_all_ranks(ctx, 2e-9 * n**3 / best_s), residual


@routine("copy", "scale", "add", "triad", "error")
def stream(
    ctx: Context, nbytes: int = 64 << 20, seconds: float = 1.0, fault: float = 0.0
) -> tuple[list[float], list[float], list[float], list[float], float]:
    """GB/s of every rank in STREAM's four kernels, all ranks at once.

    ``copy``: c = a; ``scale``: b = s c; ``add``: c = a + b; ``triad``: a = b + s c, in NumPy, which
    passes twice over parts of a and c that fit into the cache. The arrays should be larger
    than the caches.

    Parameters
    ----------
    nbytes : int
        Size of each of the three arrays of a rank.
    seconds : float
        The best of all rounds of the four within this time, at least two.
    fault : float
        Added to an element of a on rank 0 before the validation, to test the validation.

    Returns
    -------
    copy, scale : list of float
        By rank; 16 bytes counted for each element (one read, one written).
    add, triad : list of float
        24 bytes for each element.
    error : float
        Largest mean relative difference of an array from its value in exact order of operations,
        of all ranks. At most 1e-13, as in STREAM.

    Raises
    ------
    Failure
        BadArgumentError if `nbytes` is not positive or is too large; RoutineError if the error
        exceeds its limit.

    Notes
    -----
    Source: McCalpin, STREAM 5.10; HPC Challenge 1.5, STREAM/stream.c.
    """
    check_range("nbytes", nbytes, MAX_NBYTES)
    count = -(-nbytes // 8)
    a, b, c = np.full(count, 1.0), np.full(count, 2.0), np.zeros(count)
    parts = [
        (a[i : i + CACHED], b[i : i + CACHED], c[i : i + CACHED]) for i in range(0, count, CACHED)
    ]

    def triad() -> None:
        for some_a, some_b, some_c in parts:
            np.multiply(some_c, SCALAR, out=some_a)
            np.add(some_b, some_a, out=some_a)

    kernels: tuple[tuple[Callable[[], object], int], ...] = (
        (lambda: np.copyto(c, a), 16),
        (lambda: np.multiply(c, SCALAR, out=b), 16),
        (lambda: np.add(a, b, out=c), 24),
        (triad, 24),
    )
    best_s = [float("inf")] * len(kernels)
    rounds = 0
    ctx.comm.Barrier()
    end = time.perf_counter() + seconds
    while rounds < 2 or (rounds < STREAM_ROUNDS and time.perf_counter() < end):
        ctx.check()
        for i, (kernel, _) in enumerate(kernels):
            start = time.perf_counter()
            kernel()
            best_s[i] = min(best_s[i], time.perf_counter() - start)
        rounds += 1
    if ctx.rank == 0:
        a[0] += fault
    expected_a, expected_b, expected_c = 1.0, 2.0, 0.0
    for _ in range(rounds):
        expected_c = expected_a
        expected_b = SCALAR * expected_c
        expected_c = expected_a + expected_b
        expected_a = expected_b + SCALAR * expected_c
    error = max(
        float(np.abs(array - expected).mean() / abs(expected))
        for array, expected in ((a, expected_a), (b, expected_b), (c, expected_c))
    )
    worst = validated(ctx, "stream", error, STREAM_LIMIT)
    copied, scaled, added, triads = (
        of_all_ranks(ctx, 1e-9 * each * count / took_s)
        for (_, each), took_s in zip(kernels, best_s, strict=True)
    )
    return copied, scaled, added, triads, worst


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
    comm = ctx.comm
    other = ranks[1 - ranks.index(ctx.rank)]

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


SIZES = (8, 1 << 10, 1 << 16, 1 << 20, 1 << 22)
RING_SIZES = (8, 2_000_000)  # HPCC's
N_PRODUCT = 1000

Measure = tuple[str, float, str, bool]  # name, value, unit, whether larger values are better


@routine("measures", "ranks")
def suite(ctx: Context, seconds: float = 1.0) -> tuple[list[str], list[str]]:
    """All measures of this library, in about four times `seconds`.

    Parameters
    ----------
    seconds : float
        Time of `dgemm` and `stream`; the others get a quarter or less for each size.

    Returns
    -------
    measures : list of str
        JSON objects: `what`, `value`, `unit`, `more` (whether larger values are better). Of a
        list of rates the median and the slowest rank.
    ranks : list of str
        The result of `about`.

    Raises
    ------
    Failure
        RoutineError if a validation fails.
    """
    ranks = about(ctx)
    hosts = [json.loads(rank)["host"] for rank in ranks]
    steps: tuple[Callable[[], Iterator[Measure]], ...] = (
        lambda: _each_alone(ctx, seconds),
        lambda: _messages(ctx, hosts, seconds),
    )
    found: list[Measure] = []
    for number, step in enumerate(steps):
        ctx.progress(number / len(steps))
        found += step()
    return as_json(found), ranks


def as_json(measures: Iterable[Measure]) -> list[str]:
    """Measures as `suite` returns them."""
    names = ("what", "value", "unit", "more")
    return [json.dumps(dict(zip(names, measure, strict=True))) for measure in measures]


def _each_alone(ctx: Context, seconds: float) -> Iterator[Measure]:
    rates, _ = dgemm(ctx, N_PRODUCT, seconds)
    yield from _by_rank(f"dgemm {N_PRODUCT} x {N_PRODUCT}", rates, "GFLOP/s")
    *kernels, _ = stream(ctx, seconds=seconds)
    for name, rates in zip(("copy", "scale", "add", "triad"), kernels, strict=True):
        yield from _by_rank(f"stream {name}", rates, "GB/s")


def _by_rank(what: str, rates: Sequence[float], unit: str) -> Iterator[Measure]:
    yield f"{what}, per rank", median(rates), unit, True
    yield f"{what}, slowest rank", min(rates), unit, True


def _messages(ctx: Context, hosts: Sequence[str], seconds: float) -> Iterator[Measure]:
    if ctx.size == 1:
        return
    for where, pair in pairs(hosts).items():
        times = ping_pong(ctx, list(SIZES), *pair, seconds / 8)
        yield from _by_size(f"ping-pong {where}", SIZES, times)
    rings = ring(ctx, list(RING_SIZES), seconds / 4)
    for name, times in zip(("natural", "random"), rings, strict=True):
        yield from _by_size(f"{name} ring", RING_SIZES, times)
    for size, time_s in zip(SIZES, allreduce(ctx, list(SIZES), seconds / 8), strict=True):
        yield f"allreduce {readable(size)}", 1e6 * time_s, "us", False


def _by_size(what: str, sizes: Sequence[int], times: Sequence[float]) -> Iterator[Measure]:
    """The time of the smallest message, the rates of the others."""
    yield f"{what}, {readable(sizes[0])}", 1e6 * times[0], "us", False
    for size, time_s in zip(sizes[1:], times[1:], strict=True):
        yield f"{what}, {readable(size)}", 1e-9 * size / time_s, "GB/s", True


def pairs(hosts: Sequence[str]) -> dict[str, tuple[int, int]]:
    """Two ranks of one host and two of two hosts, if they exist, by the host of each rank."""
    by_host: dict[str, list[int]] = defaultdict(list)
    for rank, host in enumerate(hosts):
        by_host[host].append(rank)
    found = {}
    if several := [ranks for ranks in by_host.values() if len(ranks) > 1]:
        found["within a node"] = (several[0][0], several[0][1])
    if len(by_host) > 1:
        first, second, *_ = by_host.values()
        found["between nodes"] = (first[0], second[0])
    return found
