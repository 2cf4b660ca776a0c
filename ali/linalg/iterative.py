"""Conjugate gradients: for systems too large to factor, and operators that are never formed.

Source: Hestenes, Stiefel, "Methods of conjugate gradients for solving linear systems", J. Res.
Nat. Bur. Standards 49(6), 1952; Golub, Van Loan, "Matrix Computations", 4th ed., 11.3.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ali.blocks import Array, block, require, require_square, shape_text
from ali.interface import Context, routine
from ali.linalg.collectives import sum_over_ranks
from ali.linalg.cyclic_rows import gather_rows
from ali.linalg.systems import as_rows, copy_to_rows
from mpi_workers.failures import Failure
from mpi_workers.matrix.dist_matrix import DistMatrix


@routine("X", "iterations", "residual")
def conjugate_gradient(
    ctx: Context, A: DistMatrix, B: DistMatrix, tol: float = 1e-8, max_iterations: int = 0
) -> tuple[DistMatrix, int, float]:
    """Solution X of A X = B by conjugate gradients, with a Hermitian positive definite A.

    Parameters
    ----------
    A : matrix, shape (n, n)
        Best in VC_STAR; both triangles are looked at.
    B : matrix, shape (n, r)
        Right-hand sides; each has its own search, and they share the products.
    tol : float
        Relative residual ``|B - A X| / |B|`` that every column must reach.
    max_iterations : int
        At most; 0 is 10 n.

    Returns
    -------
    X : matrix, shape (n, r), VC_STAR
    iterations : int
    residual : float
        The largest of the columns' relative residuals, computed anew from X.

    Raises
    ------
    ShapeError
        If A is not square, or B has other rows.
    BadArgumentError
        If tol is not above 0 or max_iterations is negative.
    RoutineError
        If A turns out not to be positive definite, A or B holds NaN or inf, or max_iterations do
        not suffice.

    Notes
    -----
    An iteration costs ``2 n^2 r / ranks`` flops, n r words received by each rank, and two sums
    of r words. The error falls by ``(sqrt(c) - 1) / (sqrt(c) + 1)`` an iteration, c being the
    condition number. Memory: four times B, and ``n r`` on every rank.
    """
    n = require_square("conjugate_gradient", A)
    require(
        B.shape[0] == n,
        "ShapeError",
        f"conjugate_gradient: A is {shape_text(A)} and B is {shape_text(B)}; they must have as "
        "many rows",
    )
    check_search("conjugate_gradient", tol, max_iterations)
    dtype = np.result_type(A.dtype, B.dtype, np.float32)
    matrix, right = as_rows(ctx, A, dtype), copy_to_rows(ctx, B, dtype)
    local = block(matrix)

    def times(mine: Array) -> Array:
        return np.asarray(local @ gather_rows(ctx, mine, 0, n))

    def dots(a: Array, b: Array) -> Array:
        return sum_over_ranks(ctx.comm, np.einsum("ij,ij->j", a.conj(), b).real.astype(np.float64))

    found, count, residual = search(
        ctx, "conjugate_gradient", times, dots, block(right), tol, max_iterations or 10 * n
    )
    return ctx.new_from_rows(found, n), count, residual


def check_search(name: str, tol: float, max_iterations: int) -> None:
    require(tol > 0, "BadArgumentError", f"{name}: tol={tol} is not above 0")
    require(
        max_iterations >= 0,
        "BadArgumentError",
        f"{name}: max_iterations={max_iterations} is negative",
    )


def search(
    ctx: Context,
    name: str,
    times: Callable[[Array], Array],
    dots: Callable[[Array, Array], Array],
    right: Array,
    tol: float,
    max_iterations: int,
) -> tuple[Array, int, float]:
    """Conjugate gradients for an operator. Collective.

    Parameters
    ----------
    times : callable
        The operator, from this rank's part of vectors to this rank's part of products.
    dots : callable
        Inner products of columns, the same bits on every rank: all decisions hang on them.
    right : ndarray, shape (local, r)
        This rank's part of the right-hand sides.

    Returns
    -------
    X : ndarray, shape (local, r)
    iterations : int
    residual : float
        The largest relative residual of a column.

    Raises
    ------
    Failure
        RoutineError on every rank alike.
    """
    X = np.zeros(right.shape, right.dtype)
    R = np.array(right)
    D = R.copy()
    size = dots(R, R)
    _refuse_nonfinite(name, size)
    scale = np.where(size > 0, size, 1.0)
    now = size.copy()
    count, best = 0, float("inf")
    while (worst := float(np.sqrt(now / scale).max())) > tol:
        if count == max_iterations:
            raise Failure(
                "RoutineError",
                f"{name}: a relative residual of {worst:.1e} after {count} iterations, and tol is "
                f"{tol:.1e}: allow more iterations or a larger tol",
            )
        ctx.check()
        best = min(best, worst)
        ctx.progress(
            float(min(1.0, max(0.0, np.log(best) / np.log(tol)))) if tol < 1 else 0.0,
            f"iteration {count}: residual {worst:.1e}",
        )
        P = times(D)
        curvature = dots(D, P)
        _refuse_nonfinite(name, curvature)
        going = now > (0.1 * tol) ** 2 * scale  # the others are done, and rounding would spoil them
        require(
            bool((curvature[going] > 0).all()),
            "RoutineError",
            f"{name}: A is not positive definite (or tol={tol:.1e} is below what its condition "
            "allows)",
        )
        step = np.where(going, now / np.where(going, curvature, 1), 0).astype(R.real.dtype)
        X += step * D
        R -= step * P
        after = dots(R, R)
        _refuse_nonfinite(name, after)
        turn = np.where(going, after / np.where(now > 0, now, 1), 0).astype(R.real.dtype)
        D *= turn
        D += R
        now = after
        count += 1
    exact = right - times(X)
    return X, count, float(np.sqrt(dots(exact, exact) / scale).max())


def _refuse_nonfinite(name: str, values: Array) -> None:
    require(
        bool(np.isfinite(values).all()),
        "RoutineError",
        f"{name}: the matrices hold NaN or inf, or their products are too large",
    )
