"""Conjugate gradients: for systems too large to factor, and operators that are never formed.

Sources: Hestenes, Stiefel, "Methods of conjugate gradients for solving linear systems", J. Res.
Nat. Bur. Standards 49(6), 1952; Golub, Van Loan, "Matrix Computations", 4th ed., 11.3; van der
Vorst, Ye, "Residual replacement strategies for Krylov subspace iterative methods for the
convergence of true residuals", SIAM J. Sci. Comput. 22(3), 2000.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from ali.blocks import (
    Array,
    block,
    float_dtype,
    require,
    require_range,
    require_same_rows,
    require_square,
)
from ali.interface import Context, routine
from ali.linalg.collectives import sum_over_ranks, tree_reduce
from ali.linalg.rows import as_rows, copy_to_rows, gather_rows
from mpi_workers.failures import Failure
from mpi_workers.matrix.dist_matrix import DistMatrix

TOLERANCE = 1e-8  # the default of tol
PROGRESS = 0.5  # a restart must reduce the true residual at least to this share of the last one


@routine("X", "iterations", "residual", like={"X": "B"})
def conjugate_gradient(
    ctx: Context, A: DistMatrix, B: DistMatrix, tol: float = -1.0, max_iterations: int = 0
) -> tuple[DistMatrix, int, float]:
    """Solve A X = B by conjugate gradients, with a Hermitian positive definite A.

    Parameters
    ----------
    A : matrix, shape (n, n)
        Best in VC_STAR; both triangles are read.
    B : matrix, shape (n, r) or (n,)
        Right-hand sides. Each column has its own search; products are shared.
    tol : float
        Relative residual ``|B - A X| / |B|`` that every column must reach. Negative (the default):
        1e-8, or 1e-5 if A and B are of single precision.
    max_iterations : int
        At most; 0 is 10 n.

    Returns
    -------
    X : matrix, shape (n, r) or (n,), VC_STAR
        In the common floating dtype of A and B (float64 for integers).
    iterations : int
    residual : float
        The largest relative residual of a column, computed from X: at most tol.

    Raises
    ------
    ShapeError
        If A is not square, or B has another number of rows.
    BadArgumentError
        If tol is 0 or max_iterations is negative.
    LinAlgError
        If A is found not to be positive definite, if A or B contains NaN or infinity, or if
        max_iterations or the precision do not suffice for tol; the message states the residual
        reached. The attainable residual is about epsilon times the condition number.

    Notes
    -----
    An iteration costs ``2 n^2 r / ranks`` flops, n r words received by each rank, and two sums
    of r words. The error falls by ``(sqrt(c) - 1) / (sqrt(c) + 1)`` an iteration, c being the
    condition number. Inner products are accumulated in float64; columns of B are scaled by powers
    of two. When the recurrence has converged, the residual is computed from X, and the search
    restarts from it if it is above tol (van der Vorst, Ye 2000). Memory: six times B on the ranks
    together, and ``n r`` words on each.

    Error: 1 tol, as `residual`. Peak memory: 1.1 times arguments and results.
    """
    n = require_square("conjugate_gradient", A)
    require_same_rows("conjugate_gradient", A, B)
    dtype = float_dtype(A.dtype, B.dtype)
    tol = checked_tol("conjugate_gradient", tol, dtype, max_iterations)
    matrix, right = as_rows(ctx, A, dtype), copy_to_rows(ctx, B, dtype)
    local = block(matrix)

    def times(mine: Array) -> Array:
        return np.asarray(local @ gather_rows(ctx, mine, 0, n))

    found, count, residual = search(
        ctx, "conjugate_gradient", times, block(right), tol, max_iterations or 10 * n
    )
    return ctx.new_from_rows(found, n), count, residual


def column_dots(a: Array, b: Array) -> Array:
    """Real parts of the inner products of columns, in float64."""
    wide: Any = np.complex128 if a.dtype.kind == "c" else np.float64
    return np.asarray(np.einsum("ij,ij->j", a.conj(), b, dtype=wide)).real


def checked_tol(
    name: str,
    tol: float,
    dtype: np.dtype[Any],
    max_iterations: int,
    default: float = TOLERANCE,
) -> float:
    """The tolerance; for a negative one `default`, or 1000 times that in single precision."""
    require(tol != 0, "BadArgumentError", f"{name}: tol=0 cannot be reached")
    require(tol == tol, "BadArgumentError", f"{name}: tol is NaN")
    require_range(name, "max_iterations", max_iterations, 0)
    if tol > 0:
        return tol
    return default * (1000 if np.finfo(dtype).eps > 1e-10 else 1)


def search(
    ctx: Context,
    name: str,
    times: Callable[[Array], Array],
    right: Array,
    tol: float,
    max_iterations: int,
    *,
    replicated: bool = False,
    precondition: Callable[[Array], Array] | None = None,
) -> tuple[Array, int, float]:
    """Conjugate gradients for an operator. Collective.

    Parameters
    ----------
    times : callable
        The operator, from this rank's part of vectors to this rank's part of products.
    right : ndarray, shape (local, r)
        This rank's part of the right-hand sides.
    replicated : bool
        Whether every rank has all of the vectors.
    precondition : callable, optional
        Applies a positive definite approximation of the operator's inverse.

    Returns
    -------
    X : ndarray, shape (local, r)
    iterations : int
    residual : float
        The largest relative residual of a column, computed from X.

    Raises
    ------
    Failure
        LinAlgError, on every rank.
    """

    own_largest = np.abs(right).max(axis=0, initial=0).astype(np.float64)
    largest = tree_reduce(ctx.comm, range(ctx.size), own_largest, np.maximum)
    _refuse_nonfinite(name, largest)
    # Powers of two, so that scaling is exact.
    units = np.ldexp(1.0, np.where(largest > 0, np.frexp(largest)[1] - 1, 0))
    scaled = (right / units).astype(right.dtype)
    columns = _Columns(ctx, name, times, tol, max_iterations, replicated, precondition, scaled)
    residual = columns.solve()
    return (columns.X * units).astype(right.dtype), columns.count, residual


@dataclass
class _Columns:
    """The systems of equations of one operator, a column each; arguments as of `search`.

    Attributes
    ----------
    X : ndarray
        Of the same shape as `right`.
    count : int
        Iterations.
    """

    ctx: Context
    name: str
    times: Callable[[Array], Array]
    tol: float
    max_iterations: int
    replicated: bool
    precondition: Callable[[Array], Array] | None
    right: Array
    count: int = 0
    best: float = np.inf

    def __post_init__(self) -> None:
        self.X = np.zeros(self.right.shape, self.right.dtype)
        self.scale = self._dots(self.right, self.right)
        self.scale[self.scale == 0] = 1.0

    def solve(self) -> float:
        """The largest relative residual, computed from X, when it is at most tol."""
        last = np.inf
        R = self.right.copy()
        squares = self._squares(R)
        while (worst := self._worst(squares)) > self.tol:
            if self.count == self.max_iterations or worst > PROGRESS * last:
                raise self._not_converged(worst)
            last = worst
            self._descend(R, squares)
            R = self.right - self.times(self.X)
            squares = self._squares(R)
        return worst

    def _descend(self, R: Array, squares: Array) -> None:
        """Iterate until the residual of the recurrence reaches tol."""
        Z, descent = self._improved(R, squares)
        D = Z.copy()
        while (worst := self._worst(squares)) > self.tol and self.count < self.max_iterations:
            self._tell(worst)
            P = self.times(D)
            curvature = self._finite(self._dots(D, P))
            # Columns far below tol are finished: rounding errors would spoil them.
            going = squares > (0.1 * self.tol) ** 2 * self.scale
            require(
                bool((np.minimum(curvature, descent)[going] > 0).all()),
                "LinAlgError",
                f"{self.name}: A is not positive definite (or tol={self.tol:.1e} is below what "
                "its condition allows)",
            )
            step = self._finite(np.where(going, descent / np.where(going, curvature, 1), 0))
            self.X += (step * D).astype(R.dtype)
            R -= (step * P).astype(R.dtype)
            squares = self._squares(R)
            before = descent
            Z, descent = self._improved(R, squares)
            turn = np.where(going, descent / np.where(before > 0, before, 1), 0)
            D = (turn * D + Z).astype(R.dtype)
            self.count += 1

    def _dots(self, a: Array, b: Array) -> Array:
        """Inner products of columns, the same bits on every rank: all decisions depend on them."""
        products = column_dots(a, b)
        if not self.replicated:
            return sum_over_ranks(self.ctx.comm, products)
        self.ctx.comm.Bcast(products)  # ranks may round differently: the result of rank 0 counts
        return products

    def _squares(self, R: Array) -> Array:
        return self._finite(self._dots(R, R))

    def _finite(self, values: Array) -> Array:
        _refuse_nonfinite(self.name, values)
        return values

    def _worst(self, squares: Array) -> float:
        """The largest relative residual of a column."""
        return float(np.sqrt(squares / self.scale).max())

    def _improved(self, R: Array, squares: Array) -> tuple[Array, Array]:
        """The residual after the preconditioner, and its inner products with the residual."""
        if self.precondition is None:
            return R, squares
        Z = self.precondition(R)
        return Z, self._dots(R, Z)

    def _tell(self, worst: float) -> None:
        self.ctx.check()
        self.best = min(self.best, worst)
        done = np.log(self.best) / np.log(self.tol) if self.tol < 1 else 0.0
        words = f"iteration {self.count}: residual {worst:.1e}"
        self.ctx.progress(float(min(1.0, max(0.0, done))), words)

    def _not_converged(self, worst: float) -> Failure:
        why = "rounding errors prevent a smaller one"
        if self.count == self.max_iterations:
            why = "allow more iterations"
        return Failure(
            "LinAlgError",
            f"{self.name}: did not converge: a relative residual of {worst:.1e} after "
            f"{self.count} iterations, and tol is {self.tol:.1e}: {why}, or choose a larger tol",
        )


def _refuse_nonfinite(name: str, values: Array) -> None:
    require(
        bool(np.isfinite(values).all()),
        "LinAlgError",
        f"{name}: the matrices contain NaN or infinity, or their products overflow",
    )
