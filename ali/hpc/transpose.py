"""The transpose of a distributed matrix: HPCC's PTRANS, and a step of `ali.hpc.fourier`."""

from __future__ import annotations

from typing import Any

import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

from ali.hpc.timing import EPS, MAX_NBYTES, check_range, turn_times, validated
from ali.interface import Context, routine
from mpi_workers.matrix import copy_kernels


@routine("rate", "residual")
def ptrans(
    ctx: Context, n: int = 2000, seconds: float = 1.0, fault: float = 0.0
) -> tuple[float, float]:
    """GB/s of C = A^T + B for float64 matrices in blocks of rows, all ranks together.

    Parameters
    ----------
    n : int
        Rounded up to a multiple of the number of ranks. Memory: 40 n^2 bytes over all ranks.
    seconds : float
        The best of all turns within this time, at least three; a turn is as slow as its slowest
        rank.
    fault : float
        Added to an element of C on rank 0 before the validation, to test the validation.

    Returns
    -------
    rate : float
        8 n^2 bytes a turn, as in HPCC: all ranks together.
    residual : float
        ``|C - (A^T + B)| / (max(|A|, |B|) n eps)``, elements with the largest difference and value:
        every rank knows the elements of A by their row and column. At most 16.

    Raises
    ------
    Failure
        BadArgumentError if n is not positive or is too large; RoutineError if the residual
        exceeds its limit.

    Notes
    -----
    Each rank sends all of its part but ``1 / ranks`` in one MPI_Alltoall. Source: HPC Challenge
    1.5, PTRANS/pdtrans.c (with blocks of rows instead of a two-dimensional grid).
    """
    check_range("n", n, int((MAX_NBYTES * ctx.size / 8) ** 0.5))
    rows = -(-n // ctx.size)
    n = rows * ctx.size
    mine, every = np.arange(ctx.rank * rows, (ctx.rank + 1) * rows), np.arange(n)
    A, B = _elements(mine, every, 1), _elements(mine, every, 2)
    C = np.empty_like(B)
    times = turn_times(ctx, lambda: np.add(transposed(ctx, A), B, out=C), seconds)
    if ctx.rank == 0:
        C[0, 0] += fault
    gap = np.abs(C - (_elements(every, mine, 1).T + B)).max()
    norm = max(np.abs(A).max(), np.abs(B).max())
    residual = validated(ctx, "ptrans", float(gap / (norm * n * EPS)))
    return 8e-9 * n**2 / float(times.min()), residual


def transposed(ctx: Context, mine: NDArray[Any]) -> NDArray[Any]:
    """This rank's rows of the transpose. Collective.

    Parameters
    ----------
    mine : ndarray, shape (m / ranks, n), C-ordered
        This rank's rows, in blocks; m and n are multiples of the number of ranks.

    Returns
    -------
    ndarray, shape (n / ranks, m), C-ordered
    """
    rows, width = mine.shape[0], mine.shape[1] // ctx.size
    sent = np.empty((ctx.size, width, rows), mine.dtype)
    for rank, part in enumerate(sent):
        copy_kernels.copy(part, mine[:, rank * width : (rank + 1) * width].T)
    received = np.empty_like(sent)
    MPI.Comm.Alltoall(ctx.comm, sent, received)
    return received.transpose(1, 0, 2).reshape(width, rows * ctx.size)


def _elements(rows: NDArray[np.int64], cols: NDArray[np.int64], seed: int) -> NDArray[np.float64]:
    """Numbers in [-0.5, 0.5) that any rank can compute, by row and column."""
    mixed = (rows.astype(np.uint32) * np.uint32(2654435761))[:, None] ^ (
        (cols.astype(np.uint32) + np.uint32(seed)) * np.uint32(2246822519)
    )
    mixed ^= mixed >> np.uint32(15)
    mixed *= np.uint32(3266489917)
    mixed ^= mixed >> np.uint32(13)
    return mixed / 2.0**32 - 0.5
