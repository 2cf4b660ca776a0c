"""Conjugate gradients with a 27-point stencil over all ranks: the kernel of HPCG."""

from __future__ import annotations

import math

import numpy as np

from ali.hpc.stencil import Stencil, Vector
from ali.hpc.timing import EPS, check_range, turn_times, validated
from ali.interface import Context, routine

MAX_SIDE = 200  # about 3 GB a rank
NORM = 52.0  # HPCG's bound of |A|: twice the diagonal
GAP_LIMIT = 1e-10


@routine("gflops", "residual", "departure")
def hpcg(
    ctx: Context, n: int = 32, iterations: int = 50, seconds: float = 1.0, fault: float = 0.0
) -> tuple[float, float, float]:
    """GFLOP/s of preconditioned conjugate gradients on a 27-point stencil, all ranks together.

    Parameters
    ----------
    n : int
        A rank has n^3 points; memory: about 400 n^3 bytes a rank (700 while the matrix is made).
    iterations : int
        Of one solution.
    seconds : float
        The best of all solutions within this time, at least one after a warm-up.
    fault : float
        Added to x[0] on rank 0 before the validation, to test the validation.

    Returns
    -------
    gflops : float
        For each iteration 6 flops a stored element (product 2, preconditioner 4) and 12 a point
        (three inner products, three updates), all ranks together.
    residual : float
        ``|b - A x| / |b|`` in the 2-norm after the last iteration.
    departure : float
        Departure of A and of the preconditioner M from symmetry, ``|x' A y - y' A x| / (2 |x| |A|
        |y| eps)`` for random x and y, the larger of both. At most 1.

    Raises
    ------
    Failure
        BadArgumentError if n or `iterations` is out of range; RoutineError if the departure
        exceeds its limit, or the residual of the iteration differs from b - A x by more than
        1e-10 |b|.

    Notes
    -----
    HPCG's matrix, right-hand side (the solution is 1 everywhere), halo exchange and symmetry test;
    its preconditioner on one level, without multigrid, by SciPy's sparse products: rates compare
    machines with each other here, not with HPCG's list. Source: Dongarra, Heroux, Luszczek,
    HPCG 3.1.
    """
    check_range("n", n, MAX_SIDE)
    check_range("iterations", iterations, 10_000)
    stencil = Stencil(ctx, n)
    b = stencil.product(np.ones(n**3))
    norm_b = math.sqrt(stencil.dot(b, b))
    found: list[tuple[Vector, Vector]] = []

    def work() -> None:
        found[:] = [conjugate_gradient(stencil, b, iterations)]

    times = turn_times(ctx, work, seconds, least=1, warm_up=1)
    x, r = found[0]
    if ctx.rank == 0:
        x[0] += fault
    true = b - stencil.product(x)
    gap = math.sqrt(stencil.dot(true - r, true - r)) / norm_b
    validated(ctx, "hpcg: residual of the iteration", gap, GAP_LIMIT)
    departure = validated(ctx, "hpcg: departure from symmetry", _departure(ctx, stencil), 1.0)
    flops = iterations * (6 * stencil.nonzeros + 12 * n**3 * ctx.size)
    residual = math.sqrt(stencil.dot(true, true)) / norm_b
    return 1e-9 * flops / float(times.min()), residual, departure


def conjugate_gradient(stencil: Stencil, b: Vector, iterations: int) -> tuple[Vector, Vector]:
    """x and the residual r after some iterations for A x = b from x = 0. Collective.

    Source: Golub, Van Loan, "Matrix Computations", 4th ed., 11.5.
    """
    x, r = np.zeros_like(b), b.copy()
    p, rz = np.zeros_like(b), 1.0
    norm_b = math.sqrt(stencil.dot(b, b))
    for _ in range(iterations):
        z = stencil.preconditioned(r)
        last, rz = rz, stencil.dot(r, z)
        p *= rz / last
        p += z
        product = stencil.product(p)
        alpha = rz / stencil.dot(p, product)
        x += alpha * p
        r -= alpha * product
        if math.sqrt(stencil.dot(r, r)) <= EPS * norm_b:  # a further step would divide by zero
            break
    return x, r


def _departure(ctx: Context, stencil: Stencil) -> float:
    rng = np.random.default_rng(ctx.rank)
    x, y = (rng.random(stencil.matrix.shape[0]) for _ in range(2))
    scale = 2 * NORM * EPS * math.sqrt(stencil.dot(x, x) * stencil.dot(y, y))
    return max(
        abs(stencil.dot(x, apply(y)) - stencil.dot(y, apply(x))) / scale
        for apply in (stencil.product, stencil.preconditioned)
    )
