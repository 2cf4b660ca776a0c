"""The solution of a dense system of equations over all ranks: HPL."""

from __future__ import annotations

import numpy as np

from ali.blocks import block
from ali.hpc.timing import EPS, MAX_NBYTES, check_range, of_all_ranks, turn_times, validated
from ali.interface import Context, routine
from ali.linalg.systems import solve
from mpi_workers.matrix.dist_matrix import DistMatrix


@routine("gflops", "residual")
def hpl(
    ctx: Context, n: int = 2000, seconds: float = 1.0, fault: float = 0.0
) -> tuple[float, float]:
    """GFLOP/s of the solution of A x = b by LU with tournament pivoting, all ranks together.

    Parameters
    ----------
    n : int
        Memory: about 34 n^2 bytes over all ranks.
    seconds : float
        The best of all solutions within this time, at least one after a warm-up.
    fault : float
        Added to x[0] before the validation, to test the validation.

    Returns
    -------
    gflops : float
        2/3 n^3 + 3/2 n^2 flops, all ranks together.
    residual : float
        ``|A x - b| / (eps n (|A| |x| + |b|))`` in the infinity norm, as in HPL. At most 16.

    Raises
    ------
    Failure
        BadArgumentError if n is not positive or is too large; RoutineError if the residual
        exceeds its limit.

    Notes
    -----
    `linalg.solve`, on rows of the matrix: it does not scale like HPL's two-dimensional grid, and
    compares machines of one size. The other routines of this library block in MPI; this
    one waits as `linalg` does. Source: Petitet et al., HPL 2.3, testing/ptest/HPL_pdtest.c.
    """
    check_range("n", n, int((MAX_NBYTES * ctx.size / 34) ** 0.5))
    rng = np.random.default_rng(ctx.rank)
    A, b = ctx.empty((n, n), np.float64), ctx.empty((n, 1), np.float64)
    block(A)[...] = rng.random(block(A).shape) - 0.5
    block(b)[...] = rng.random(block(b).shape) - 0.5
    found: list[DistMatrix] = []

    def work() -> None:
        found[:] = [solve(ctx, A, b)]

    times = turn_times(ctx, work, seconds, least=1, warm_up=1)
    x = ctx.to_layout(found[0], "STAR_STAR").local.reshape(n).copy()
    x[0] += fault
    gap = np.abs(block(A) @ x - block(b)[:, 0]).max(initial=0)
    norm_A = max(of_all_ranks(ctx, float(np.abs(block(A)).sum(axis=1).max(initial=0))))
    norm_b = max(of_all_ranks(ctx, float(np.abs(block(b)).max(initial=0))))
    residual = gap / (EPS * n * (norm_A * np.abs(x).max() + norm_b))
    flops = 2 / 3 * n**3 + 3 / 2 * n**2
    return 1e-9 * flops / float(times.min()), validated(ctx, "hpl", float(residual))
