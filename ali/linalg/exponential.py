"""The exponential of a matrix."""

from __future__ import annotations

import math

import numpy as np

from ali.blocks import Array, block, float_dtype, require, require_square
from ali.interface import Context, routine
from ali.linalg.collectives import sum_over_ranks
from ali.linalg.products import product
from ali.linalg.systems import eliminate
from ali.linalg.triangular import copy_to_rows, triangular_solve
from mpi_workers.matrix.dist_matrix import DistMatrix

# By bytes of a real number: the 1-norm up to which the Pade approximant is exact to rounding, and
# its coefficients, ascending (Higham 2005, table 2.3; order 7 and 13).
PADE: dict[int, tuple[float, tuple[float, ...]]] = {
    4: (3.925724783138660, (17297280, 8648640, 1995840, 277200, 25200, 1512, 56, 1)),
    8: (
        5.371920351148152,
        (
            64764752532480000, 32382376266240000, 7771770303897600, 1187353796428800,
            129060195264000, 10559470521600, 670442572800, 33522128640, 1323241920, 40840800,
            960960, 16380, 182, 1,
        ),
    ),
}  # fmt: skip


@routine("X")
def expm(ctx: Context, A: DistMatrix) -> DistMatrix:
    """Matrix exponential X = exp(A).

    Parameters
    ----------
    A : matrix, shape (n, n)
        Best in VC_STAR. Integers are promoted to float64.

    Returns
    -------
    X : matrix, shape (n, n), VC_STAR

    Raises
    ------
    ShapeError
        If A is not square.
    LinAlgError
        If A contains NaN or infinity, or X overflows.

    Notes
    -----
    Scaling, a Pade approximant, and squaring, with s = log2 of the 1-norm of A, or 0: ``(2 (6 + s)
    + 8/3) n^3 / ranks`` flops (float32: 4 + s), and ``(7 + s) n^2`` words received. Each rank holds
    its share of 11 matrices. Source: Higham, "The scaling and squaring method for the matrix
    exponential revisited", SIAM J. Matrix Anal. Appl. 26(4), 2005.

    Error: 40 eps, relative to |X|. Peak memory: 5.3 times arguments and results.
    """
    n = require_square("expm", A)
    X = copy_to_rows(ctx, A, float_dtype(A.dtype))
    x, kind = block(X), np.zeros(0, X.dtype).real.dtype
    with np.errstate(all="ignore"):
        sums = sum_over_ranks(ctx.comm, np.abs(x).sum(axis=0, dtype=np.float64))
    size = float(sums.max(initial=0))
    require(
        math.isfinite(size),
        "LinAlgError",
        f"expm: A contains NaN or infinity (its norm is {size})",
    )
    limit, coefficients = PADE[kind.itemsize]
    squarings = max(0, math.ceil(math.log2(size / limit))) if size > limit else 0
    x *= kind.type(2.0**-squarings)
    X = _pade(ctx, X, coefficients)
    for step in range(squarings):
        X = product(ctx, X, X, "rows")
        ctx.progress(0.5 + 0.5 * (step + 1) / squarings, f"squaring {step + 1} of {squarings}")
    largest = float(np.abs(block(X)).max(initial=0)) if n else 0.0
    require(
        all(map(math.isfinite, ctx.comm.allgather(largest))),
        "LinAlgError",
        f"expm: the exponential overflows {X.dtype}; the 1-norm of A is {size}",
    )
    return X


def _pade(ctx: Context, X: DistMatrix, b: tuple[float, ...]) -> DistMatrix:
    """``(V - U)^-1 (V + U)`` with the odd part U and the even part V of the polynomial b."""
    squares = product(ctx, X, X, "rows")
    powers = [squares]
    for _ in range(2):
        powers.append(product(ctx, powers[-1], squares, "rows"))
    low_odd, low_even = _sum(ctx, powers, b[1:8:2]), _sum(ctx, powers, b[0:8:2])
    if len(b) > 8:
        # Powers 8 to 13 of X: the sixth times a polynomial in the second.
        for low, high in ((low_odd, b[9::2]), (low_even, b[8::2])):
            extra = _sum(ctx, powers, (0, *high))
            block(low)[...] += block(product(ctx, powers[-1], extra, "rows"))
            del extra
    del powers, squares
    U = product(ctx, X, low_odd, "rows")
    u, v = block(U), block(low_even)
    right: Array = v + u
    v -= u
    block(U)[...] = right
    found = eliminate(ctx, low_even, U, into=U)
    assert found.Y is not None
    require(found.failure == 0, "LinAlgError", "expm: the denominator is singular")
    triangular_solve(ctx, found.U, found.Y, lower=False)
    return found.Y


def _sum(ctx: Context, powers: list[DistMatrix], b: tuple[float, ...]) -> DistMatrix:
    """``b_0 I + b_1 powers_0 + ...``, in a new matrix."""
    S = ctx.zeros(powers[0].shape, powers[0].dtype)
    s = block(S)
    for factor, power in zip(b[1:], powers, strict=False):
        s += s.dtype.type(factor) * block(power)
    s[range(len(S.rows)), S.rows] += s.dtype.type(b[0])
    return S
