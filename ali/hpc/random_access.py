"""Random updates of a table over all ranks: HPCC's MPIRandomAccess (GUPS)."""

from __future__ import annotations

import math
import time

import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

from ali.hpc.timing import MAX_NBYTES, check_range, validated
from ali.interface import Context, routine

POLYNOMIAL = np.uint64(7)  # x^64 + x^2 + x + 1 over GF(2)
PERIOD = 1317624576693539401  # of the sequence of random numbers
LOOK_AHEAD = 1024  # updates that a rank may hold before it sends them: a rule of the benchmark
ERROR_LIMIT = 0.01
ONE, TOP = np.uint64(1), np.uint64(63)

Words = NDArray[np.uint64]


@routine("gups", "errors")
def random_access(
    ctx: Context, nbytes: int = 16 << 20, seconds: float = 1.0, fault: float = 0.0
) -> tuple[float, float]:
    """Billions of updates a second of a table of 8-byte words over all ranks.

    For each number a of a sequence: ``T[a mod N] ^= a``. A rank computes its part of the sequence
    and sends updates to the ranks that own the words, at most 1024 at a time.

    Parameters
    ----------
    nbytes : int
        Part of the table on a rank; the whole table is the largest power of two that fits. Larger
        than the caches.
    seconds : float
        Ends before the 4 N updates of the benchmark if they would take longer.
    fault : float
        Share of each rank's words that are changed before the validation, to test the validation.

    Returns
    -------
    gups : float
        10^9 updates a second, all ranks together.
    errors : float
        Share of the words that are wrong after the same updates have been made again, which
        restores the table. At most 0.01.

    Raises
    ------
    Failure
        BadArgumentError if `nbytes` is below 8 or too large; RoutineError if there are too many
        errors.

    Notes
    -----
    Two MPI_Alltoall calls for each 1024 updates of a rank. NumPy takes about 30 us for 1024
    updates, which bounds the rate of a rank to about 0.03 GUPS. Source: HPC Challenge 1.5,
    RandomAccess (sequence, look-ahead, share of errors).
    """
    check_range("nbytes", nbytes, MAX_NBYTES, least=8)
    bits = int(math.log2(nbytes // 8 * ctx.size))
    words = 1 << bits
    share = -(-words // ctx.size)
    base = min(words, ctx.rank * share)
    table = np.arange(base, min(words, base + share), dtype=np.uint64)
    steps = max(1, 4 * words // (ctx.size * LOOK_AHEAD))
    streams = ctx.rank * LOOK_AHEAD + np.arange(LOOK_AHEAD)
    begin = numbers_at(streams * steps)  # each stream is a part of the sequence

    def update(state: Words, count: int) -> Words:
        for _ in range(count):
            ctx.check()
            state = following(state)
            mine = _exchanged(ctx, state, words, share)
            np.bitwise_xor.at(table, (mine & np.uint64(words - 1)) - np.uint64(base), mine)
        return state

    first = max(1, min(16, steps // 16))
    ctx.comm.Barrier()
    start = time.perf_counter()
    state = update(begin, first)
    took = (time.perf_counter() - start) / first
    more: int = ctx.comm.bcast(min(steps - first, max(1, int(seconds / max(took, 1e-7)))))
    ctx.comm.Barrier()
    start = time.perf_counter()
    update(state, more)
    took = ctx.comm.allreduce(time.perf_counter() - start, MPI.MAX)
    gups = 1e-9 * more * LOOK_AHEAD * ctx.size / took if more else 0.0
    table[: math.ceil(fault * table.size)] ^= ONE
    update(begin, first + more)
    wrong = int((table != np.arange(base, base + table.size, dtype=np.uint64)).sum())
    errors = ctx.comm.allreduce(wrong, MPI.SUM) / words
    return gups, validated(ctx, "random_access: share of wrong words", errors, ERROR_LIMIT)


def following(numbers: Words) -> Words:
    """The next number of the sequence after each of these."""
    return (numbers << ONE) ^ ((numbers >> TOP) * POLYNOMIAL)


def numbers_at(places: NDArray[np.int64]) -> Words:
    """The numbers at these places of the sequence, which begins with 1 at place 0.

    As HPCC's `HPCC_starts`: the number at place 2 n is a linear function over GF(2) of the one at
    place n, so each takes 63 steps.
    """
    squares, power = np.empty(64, np.uint64), np.ones(1, np.uint64)
    for bit in range(64):
        squares[bit] = power[0]
        power = following(following(power))
    found = np.ones(places.shape, np.uint64)
    places = places % PERIOD
    for bit in range(62, -1, -1):
        doubled = np.zeros_like(found)
        for i, square in enumerate(squares):
            doubled ^= np.where((found >> np.uint64(i)) & ONE, square, np.uint64(0))
        odd = (places >> bit) & 1 == 1
        found = np.where(odd, following(doubled), doubled)
    return found


def _exchanged(ctx: Context, numbers: Words, words: int, share: int) -> Words:
    """The updates of this rank's words among the numbers of all ranks. Collective."""
    if ctx.size == 1:
        return numbers
    owners = ((numbers & np.uint64(words - 1)) // np.uint64(share)).astype(np.int64)
    counts = np.bincount(owners, minlength=ctx.size)
    sent = numbers[np.argsort(owners, kind="stable")]
    theirs = np.empty_like(counts)
    MPI.Comm.Alltoall(ctx.comm, counts, theirs)
    received = np.empty(int(theirs.sum()), np.uint64)
    MPI.Comm.Alltoallv(ctx.comm, [sent, counts], [received, theirs])
    return received
