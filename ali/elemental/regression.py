"""Regression and classification: convex programs that Elemental formulates and solves.

All are for real matrices, float32 or float64 (integers and bool are promoted to float64), and
dense: the interior point methods (Mehrotra's) factor a system of all the rows and columns together
in each of 10 to 50 steps.
"""

from __future__ import annotations

import numpy as np

from ali.blocks import require, require_same_rows
from ali.elemental.checks import column, positive, real
from ali.elemental.views import Elemental
from ali.interface import Context, routine
from mpi_workers.matrix.dist_matrix import DistMatrix

QP = 1  # ElNNLSApproach


@routine("x", like={"x": "b"})
def lasso(ctx: Context, A: DistMatrix, b: DistMatrix, lam: float) -> DistMatrix:
    """Lasso (basis pursuit denoising): the x that makes 1/2 ||A x - b||^2 + lam ||x||_1 least.

    Parameters
    ----------
    A : matrix, shape (m, n), real
    b : vector (m,) or matrix (m, 1), real
    lam : float
        Weight > 0; from ``max |A^T b|`` on x is zero.

    Returns
    -------
    x : vector (n,) or matrix (n, 1), as the right-hand side, MC_MR
        Accurate to about the square root of rounding: zeros come out small.

    Raises
    ------
    ShapeError, DtypeError, BadArgumentError
    RoutineError
        If A or b contains NaN or infinity, or the method stalls.

    Notes
    -----
    Mehrotra's predictor-corrector method on the quadratic program in (x+, x-, r):
    ``O((m + n)^3 / ranks)`` flops a step, ``(4 n + 2 m)^2 / ranks`` words of memory and more.
    Sources: Chen, Donoho, Saunders 1998; Tibshirani 1996; Mehrotra 1992.

    Error: 50 eps, by which the conditions of optimality are missed, relative to lam. Peak memory:
    84.0 times arguments and results, with m = 2 n = 300.
    """
    require_same_rows("lasso", A, b)
    column(b, A.shape[0], "lasso", "b")
    real("lasso", A, b)
    positive("lasso", "lam", lam)
    with Elemental(ctx) as el:
        A, b = el.floats(A, b)
        el.finite("lasso", A, b)
        x = el.zeros((A.shape[1], 1), A.dtype)
        el("BPDNDist", A.dtype, A, b, lam, x)
    return x


@routine("x", like={"x": "b"})
def elastic_net(ctx: Context, A: DistMatrix, b: DistMatrix, lam1: float, lam2: float) -> DistMatrix:
    """Elastic net: the x that makes 1/2 ||A x - b||^2 + lam1 ||x||_1 + lam2 ||x||^2 least.

    Parameters
    ----------
    A : matrix, shape (m, n), real
    b : vector (m,) or matrix (m, 1), real
    lam1, lam2 : float
        Weights > 0. (Elemental's own text leaves out the 1/2, its program does not.)

    Returns
    -------
    x : vector (n,) or matrix (n, 1), as the right-hand side, MC_MR

    Raises
    ------
    ShapeError, DtypeError, BadArgumentError
    RoutineError
        If A or b contains NaN or infinity, or the method stalls.

    Notes
    -----
    Cost and method of `lasso`. Source: Zou and Hastie 2005.

    Error: 150 eps, by which the conditions of optimality are missed, relative to lam1. Peak memory:
    84.0 times arguments and results, with m = 2 n = 300.
    """
    require_same_rows("elastic_net", A, b)
    column(b, A.shape[0], "elastic_net", "b")
    real("elastic_net", A, b)
    positive("elastic_net", "lam1", lam1)
    positive("elastic_net", "lam2", lam2)
    with Elemental(ctx) as el:
        A, b = el.floats(A, b)
        el.finite("elastic_net", A, b)
        x = el.zeros((A.shape[1], 1), A.dtype)
        el("ENDist", A.dtype, A, b, lam1, lam2, x)
    return x


@routine("x", like={"x": "b"})
def basis_pursuit(ctx: Context, A: DistMatrix, b: DistMatrix) -> DistMatrix:
    """Basis pursuit: of all x with A x = b the one of least ||x||_1.

    Parameters
    ----------
    A : matrix, shape (m, n), real
        Of full row rank, m <= n.
    b : vector (m,) or matrix (m, 1), real

    Returns
    -------
    x : vector (n,) or matrix (n, 1), as the right-hand side, MC_MR

    Raises
    ------
    ShapeError
        If A is tall, or b is not m x 1.
    DtypeError
    RoutineError
        If A or b contains NaN or infinity, or the method stalls.

    Notes
    -----
    A linear program in (x+, x-) by Mehrotra's method, ``O(m^2 n / ranks)`` flops a step. Source:
    Chen, Donoho, Saunders, "Atomic decomposition by basis pursuit", 1998.

    Error: 600 eps, of a unique x, relative to its largest element. Peak memory: 39.0 times
    arguments and results, with m = n / 2 = 150.
    """
    m, n = A.shape
    require(m <= n, "ShapeError", f"basis_pursuit: A is {m} x {n}; it must not be tall")
    column(b, m, "basis_pursuit", "b")
    real("basis_pursuit", A, b)
    with Elemental(ctx) as el:
        A, b = el.floats(A, b)
        el.finite("basis_pursuit", A, b)
        x = el.zeros((n, 1), A.dtype)
        el("BPDist", A.dtype, A, b, x)
    return x


@routine("x", like={"x": "b"})
def least_absolute(ctx: Context, A: DistMatrix, b: DistMatrix) -> DistMatrix:
    """Least absolute value regression: the x that makes ||A x - b||_1 least.

    Parameters
    ----------
    A : matrix, shape (m, n), real
        Of full column rank, m >= n.
    b : vector (m,) or matrix (m, 1), real

    Returns
    -------
    x : vector (n,) or matrix (n, 1), as the right-hand side, MC_MR
        Outliers in b hardly move it.

    Raises
    ------
    ShapeError
        If A is wide, or b is not m x 1.
    DtypeError
    RoutineError
        If A or b contains NaN or infinity, or the method stalls.

    Notes
    -----
    A linear program by Mehrotra's method, cost of `lasso`. Source: Charnes, Cooper, Ferguson
    1955.

    Error: 0.002 times the least sum, in float32. Peak memory: 134.0 times arguments and results,
    with m = 2 n = 300.
    """
    m, n = A.shape
    require(m >= n, "ShapeError", f"least_absolute: A is {m} x {n}; it must not be wide")
    column(b, m, "least_absolute", "b")
    real("least_absolute", A, b)
    with Elemental(ctx) as el:
        A, b = el.floats(A, b)
        el.finite("least_absolute", A, b)
        x = el.zeros((n, 1), A.dtype)
        el("LAVDist", A.dtype, A, b, x)
    return x


@routine("w", "bias", like={"w": "d"})
def svm(ctx: Context, A: DistMatrix, d: DistMatrix, lam: float) -> tuple[DistMatrix, float]:
    """Soft-margin support vector machine: sign(A w + bias) predicts d.

    Makes ``1/2 ||w||^2 + lam sum(z)`` least, where ``d_i (a_i w + bias) >= 1 - z_i``, z >= 0.

    Parameters
    ----------
    A : matrix, shape (m, n), real
        An example a row.
    d : vector (m,) or matrix (m, 1)
        1 or -1 for each example.
    lam : float
        Weight > 0 of the violations (C elsewhere).

    Returns
    -------
    w : vector (n,) or matrix (n, 1), as the right-hand side, MC_MR
        One copy, out of the program's (w, bias, z).
    bias : float

    Raises
    ------
    ShapeError, DtypeError, BadArgumentError
    RoutineError
        If A contains NaN or infinity, d other than 1 and -1, or the method stalls.

    Notes
    -----
    Mehrotra's method on a quadratic program of n + m + 1 variables, ``O((m + n)^3 / ranks)``
    flops a step. Source: Cortes and Vapnik 1995.

    Error: 200 eps, relative, of the program's least value. Peak memory: 70.0 times arguments and
    results, with m = 2 n = 300.
    """
    m, n = A.shape
    column(d, m, "svm", "d")
    real("svm", A, d)
    positive("svm", "lam", lam)
    with Elemental(ctx) as el:
        A, d = el.floats(A, d)
        el.finite("svm", A, d)
        labels = np.asarray(ctx.to_layout(d, "STAR_STAR").local)
        require(
            bool((np.abs(labels) == 1).all()), "RoutineError", "svm: d has values other than 1, -1"
        )
        found = el.own(A.dtype)
        el("SVMDist", A.dtype, A, d, lam, found)
        x = ctx.to_layout(el.taken(found, A.dtype), "STAR_STAR").local
    return ctx.new_replicated(x[:n], "MC_MR"), float(x[n, 0])


@routine("X", like={"X": "B"})
def nnls(ctx: Context, A: DistMatrix, B: DistMatrix) -> DistMatrix:
    """Nonnegative least squares: the X >= 0 that makes ||A X - B|| least.

    Parameters
    ----------
    A : matrix, shape (m, n), real
        Of full column rank.
    B : matrix, shape (m, k), real

    Returns
    -------
    X : matrix, shape (n, k), MC_MR

    Raises
    ------
    ShapeError, DtypeError
    RoutineError
        If A or B contains NaN or infinity, or the method stalls.

    Notes
    -----
    An interior point method on the normal equations, a column of B after the other:
    ``m n^2 / ranks`` flops once and ``O(n^3 / ranks)`` a step. Sources: Lawson and Hanson 1974
    (the problem); Mehrotra 1992.

    Error: 0.004 times |A|^2 |X|, by which the conditions of optimality are missed in float32. Peak
    memory: 6.5 times arguments and results, with m = 2 n = 300.
    """
    require_same_rows("nnls", A, B)
    real("nnls", A, B)
    with Elemental(ctx) as el:
        A, B = el.floats(A, B)
        el.finite("nnls", A, B)
        X = el.zeros((A.shape[1], B.shape[1]), A.dtype)
        el("NNLSXDist", A.dtype, A, B, X, el.control("NNLS", A.dtype, approach=QP))
    return X
