"""Rates of each rank on its own, while all ranks work: HPCC's StarDGEMM and StarSTREAM."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
from scipy.linalg import blas

from ali.hpc.timing import (
    EPS,
    MAX_NBYTES,
    best_time,
    check_range,
    of_all_ranks,
    validated,
)
from ali.interface import Context, routine

CHUNK = 1 << 14  # elements of each array that two passes keep in the cache
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
    x, (alpha, beta) = rng.random(n) - 0.5, rng.random(2)
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
    parts = [(a[i : i + CHUNK], b[i : i + CHUNK], c[i : i + CHUNK]) for i in range(0, count, CHUNK)]

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
    best_s, rounds = [float("inf")] * len(kernels), 0
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
