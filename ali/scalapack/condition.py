"""The condition number, estimated from an LU factorization.

Not with ``p?gecon``: for real random matrices the reference ScaLAPACK's (2.2) is up to fifty
times too small, on one rank as well. The same algorithm is a few lines over ``p?getrs``.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

from ali.blocks import require_choice, require_square
from ali.interface import Context, routine
from ali.scalapack.checks import computed_in, require_finite
from ali.scalapack.cyclic import Call, Cyclic, indices
from ali.scalapack.triangles import phases
from mpi_workers.matrix.dist_matrix import DistMatrix

Array = NDArray[Any]

MOST = 5  # steps: Higham has never seen more do any good


@routine("condition")
def condest(ctx: Context, A: DistMatrix, ord: str = "1") -> float:
    """Estimate of the condition number ``norm(A) norm(A^-1)``.

    Parameters
    ----------
    A : matrix, shape (n, n)
        Best in MC_MR. Integers are promoted to float64.
    ord : str
        "1" or "inf": in which norm.

    Returns
    -------
    condition : float
        Never above the true one but for rounding, and seldom below a third of it; inf if A is
        singular (a pivot is exactly zero).

    Raises
    ------
    ShapeError, BadArgumentError
        If A is not square; for any other ord.
    LinAlgError
        If A contains NaN or infinity.

    Notes
    -----
    An LU factorization (see `lu`), then at most 11 solves with one right-hand side and n words
    summed for each. Cannot be interrupted while it computes. Sources: ScaLAPACK Users' Guide,
    ``p?lange``, ``p?getrf``, ``p?getrs``; Higham 1988 (ACM TOMS 14, algorithm 674).

    Error: 3 times at most. Peak memory: 4.8 times arguments and results.
    """
    dtype = computed_in("condest", A)
    n = require_square("condest", A)
    require_choice("condest", "ord", ord, ("1", "inf"))
    require_finite(ctx, "condest", A)
    call = Call(ctx, dtype, "getrf", n, A)
    a = call.copy(A)
    size = call.norm("1" if ord == "1" else "I", a)
    pivots = a.pivots()
    if size == 0.0 or call.run("p?getrf", n, n, *a.submatrix, pivots):
        return float("inf")
    inverse = _Inverse(call, a, pivots)
    # The infinity norm of a matrix is the 1-norm of its adjoint.
    return size * _one_norm(n, inverse, *(("N", "C") if ord == "1" else ("C", "N")))


class _Inverse:
    """A^-1 from the factors of A, for vectors that every rank holds whole."""

    def __init__(self, call: Call, factors: Cyclic, pivots: NDArray[np.int32]) -> None:
        self._call = call
        self._factors = factors
        self._pivots = pivots
        self._vector = call.new(factors.n, 1)
        grid = call.grid  # the vector lies in the grid's first column
        rows = indices(factors.n, factors.block, grid.row, grid.height)
        self._rows = rows if grid.col == 0 else rows[:0]

    def times(self, x: Array, turned: str) -> Array:
        """A^-1 x ("N"), or its adjoint times x ("C"). Collective."""
        mine = self._vector.data[: len(self._rows)]
        mine[...] = x[self._rows]
        self._call.run(
            "p?getrs", turned, len(x), 1, *self._factors.submatrix, self._pivots,
            *self._vector.submatrix,
        )  # fmt: skip
        part, everything = np.zeros_like(x), np.empty_like(x)
        part[self._rows] = mine
        self._call.ctx.comm.Allreduce(part, everything, MPI.SUM)
        return everything


def _one_norm(n: int, matrix: _Inverse, plain: str, adjoint: str) -> float:
    """Lower bound of a matrix's 1-norm that is seldom far from it (Higham 1988)."""
    dtype = matrix._vector.data.dtype
    y = matrix.times(np.full(n, 1 / n, dtype), plain)
    best = float(np.abs(y).sum())
    last = -1
    for _ in range(MOST):
        gradient = np.abs(matrix.times(phases(y), adjoint))
        steepest = int(gradient.argmax())
        if last >= 0 and gradient[steepest] <= gradient[last]:
            break
        last = steepest
        unit = np.zeros(n, dtype)
        unit[steepest] = 1
        y = matrix.times(unit, plain)
        found = float(np.abs(y).sum())
        if found <= best:
            break
        best = found
    # A vector that no cancellation fits, against matrices made to mislead.
    rising = (-1.0) ** np.arange(n) * (1 + np.arange(n) / max(1, n - 1))
    other = float(np.abs(matrix.times(rising.astype(dtype), plain)).sum())
    return max(best, 2 * other / (3 * n))
