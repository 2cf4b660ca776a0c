"""A one-dimensional Fourier transform over all ranks: HPCC's MPIFFT."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import scipy.fft
from mpi4py import MPI
from numpy.typing import NDArray

from ali.hpc.timing import EPS, MAX_NBYTES, check_range, turn_times, validated
from ali.hpc.transpose import transposed
from ali.interface import Context, routine


@routine("gflops", "error")
def fft(
    ctx: Context, n: int = 1 << 20, seconds: float = 1.0, fault: float = 0.0
) -> tuple[float, float]:
    """GFLOP/s of a complex128 transform of length n, all ranks together.

    Parameters
    ----------
    n : int
        Rounded up to the square of a multiple of the number of ranks. Memory: 96 n bytes over all
        ranks.
    seconds : float
        The best of all transforms within this time, at least three; one is as slow as its slowest
        rank.
    fault : float
        Added to an element of the result on rank 0 before the validation, to test the validation.

    Returns
    -------
    gflops : float
        5 n log2(n) flops a transform, all ranks together.
    error : float
        The larger one of ``|x - inverse(X)|`` and, for one coefficient, ``|X[k] - sum_j x[j]
        exp(-2 pi i j k / n)| / sqrt(n)``, over ``eps log2(n)``. At most 16.

    Raises
    ------
    Failure
        BadArgumentError if n is not positive or is too large; RoutineError if the error exceeds its
        limit.

    Notes
    -----
    The six-step algorithm: three transposes (MPI_Alltoall), local transforms by SciPy. The
    result is in natural order. Sources: Bailey, "FFTs in external or hierarchical memory", J.
    Supercomputing 4 (1990); HPC Challenge 1.5, FFT/mpifft.c. HPCC validates by the round trip only.
    """
    check_range("n", n, MAX_NBYTES * ctx.size // 16)
    side = ctx.size * -(-(math.isqrt(n - 1) + 1) // ctx.size)
    n, rows = side**2, side // ctx.size
    mine = np.arange(ctx.rank * rows, (ctx.rank + 1) * rows)
    twiddles = np.exp(np.outer(mine, np.arange(side)) * (-2j * np.pi / n))
    rng = np.random.default_rng(ctx.rank)
    x = rng.random((rows, side)) - 0.5 + 1j * (rng.random((rows, side)) - 0.5)
    found = [x]

    def transform() -> None:
        found[0] = six_steps(ctx, x, twiddles)

    times = turn_times(ctx, transform, seconds)
    (X,) = found
    if ctx.rank == 0:
        X[0, 0] += fault
    back = six_steps(ctx, X.conj(), twiddles).conj() / n
    error = max(float(np.abs(x - back).max()), _coefficient_error(ctx, x, X))
    gflops = 5e-9 * n * math.log2(n) / float(times.min()) if n > 1 else 0.0
    return gflops, validated(ctx, "fft", error / (EPS * max(1.0, math.log2(n))))


def six_steps(ctx: Context, x: NDArray[Any], twiddles: NDArray[Any]) -> NDArray[Any]:
    """This rank's rows of the transform of x, both as square matrices in row order. Collective.

    Parameters
    ----------
    x, twiddles : ndarray, shape (s / ranks, s)
        `twiddles`: exp(-2 pi i j k / s^2) for this rank's rows j and all columns k.
    """
    y = scipy.fft.fft(transposed(ctx, x), axis=1, overwrite_x=True)
    y *= twiddles
    y = scipy.fft.fft(transposed(ctx, y), axis=1, overwrite_x=True)
    return transposed(ctx, y)


def _coefficient_error(ctx: Context, x: NDArray[Any], X: NDArray[Any]) -> float:
    """Error of one coefficient that is computed by its definition, over sqrt(n). Collective."""
    n, count = x.size * ctx.size, x.size
    k = n // 3
    owner, at = divmod(k, count)
    turns = (np.arange(ctx.rank * count, (ctx.rank + 1) * count) * k) % n
    part = np.vdot(np.exp(turns * (2j * np.pi / n)), x)
    expected = ctx.comm.allreduce(complex(part), MPI.SUM)
    found = ctx.comm.bcast(complex(X.flat[at]) if ctx.rank == owner else None, owner)
    return float(abs(found - expected) / math.sqrt(n))
