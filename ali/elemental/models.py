"""Models fitted by Elemental: factorizations of data, regression and classification.

All are for real matrices, float32 or float64 (integers and bool are promoted to float64), and
dense: the interior point methods (Mehrotra's) factor a system of all the rows and columns together
in each of 10 to 50 steps.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from mpi4py import MPI

from ali.blocks import require, require_range, require_real, require_same_rows, transposed
from ali.elemental.library import column, positive
from ali.elemental.views import Elemental, started
from ali.interface import Context, routine
from mpi_workers.matrix.dist_matrix import DistMatrix

ADMM = 0  # ElNNLSApproach
STEP_TOL = 1e-4  # of ADMM inside nmf: the next iteration improves on its result
STEPS = 5000  # of ADMM at most


@routine("X", "Y")
def nmf(
    ctx: Context, A: DistMatrix, rank: int, iterations: int = 20, seed: int = 0
) -> tuple[DistMatrix, DistMatrix]:
    """Nonnegative matrix factorization: A is nearly X Y^T, with X and Y >= 0.

    Parameters
    ----------
    A : matrix, shape (m, n), real
        Nonnegative.
    rank : int
        Columns of X and of Y, 1 to min(m, n).
    iterations : int
        How often X and Y are improved in turn.
    seed : int
        Of the X to begin with. The result is one of many local minima.

    Returns
    -------
    X : matrix, shape (m, rank), VC_STAR
    Y : matrix, shape (n, rank), VC_STAR

    Raises
    ------
    BadArgumentError, DtypeError
    RoutineError
        If A contains NaN, infinity or a negative number.

    Notes
    -----
    Nonnegative least squares for X and for Y in turn, each by ADMM for all columns at once:
    ``4 m n rank / ranks`` flops an iteration, and ``2 rank^2 (m + n) / ranks`` for each of its
    some hundred steps; two copies of A. Between the two halves of an iteration it can be
    interrupted. The same seed begins with the same X on any number of ranks. Sources: Kim and
    Park 2008; Boyd et al. 2011 (ADMM); Ghadimi et al. 2015 (its step length).

    Error: 0.01 times |A|, as |A - X Y^T|, for an A of that rank. Peak memory: 8.5 times arguments
    and results.
    """
    m, n = A.shape
    require_range("nmf", "rank", rank, 1, min(m, n))
    require_range("nmf", "iterations", iterations, 1)
    require_real("nmf", A=A)
    with started(ctx, "nmf", A=A) as (_, A):
        least = np.array([A.local.min(initial=0)], np.float64)
    ctx.comm.Allreduce(least.copy(), least, MPI.MIN)
    require(least[0] >= 0, "RoutineError", f"nmf: A contains a negative number, {least[0]}")
    scale = math.sqrt(_sums(ctx, (A.local.astype(np.float64) ** 2).sum())[0] / (m * n))
    A = ctx.to_layout(A, "MC_MR")
    turned = transposed(ctx, A)
    X = _uniform(ctx, (m, rank), A.dtype, seed)
    for iteration in range(iterations):
        Y = ctx.to_layout(transposed(ctx, _coefficients(ctx, X, A, scale)), "VC_STAR")
        X = ctx.to_layout(transposed(ctx, _coefficients(ctx, Y, turned, scale)), "VC_STAR")
        ctx.progress((iteration + 1) / iterations, f"nmf: iteration {iteration + 1}")
    return X, Y


@routine("L", "S")
def rpca(
    ctx: Context,
    A: DistMatrix,
    weight: float = 0.0,
    tol: float = 1e-6,
    max_iterations: int = 1000,
) -> tuple[DistMatrix, DistMatrix]:
    """Robust principal component analysis: A is nearly L + S, L of low rank and S sparse.

    Makes ``||L||_nuclear + weight ||S||_1`` least, where A = L + S.

    Parameters
    ----------
    A : matrix, shape (m, n)
        Real or complex.
    weight : float
        Of S; 0 takes ``1 / sqrt(max(m, n))``, which recovers L and S with high probability
        where L is spread out and S hits at random.
    tol : float
        ``||A - L - S||_F / ||A||_F`` at which it ends, > 0.
    max_iterations : int
        Steps at most, each an SVD.

    Returns
    -------
    L, S : matrix, shape (m, n), MC_MR
        Written where they stay.

    Raises
    ------
    BadArgumentError
    RoutineError
        If A contains NaN or infinity, or tol is not reached.

    Notes
    -----
    ADMM, each step a soft threshold and an `svd` of A's size. Source: Candes, Li, Ma, Wright,
    "Robust principal component analysis?", J. ACM 58(3), 2011, whose step length it takes.

    Error: 1 tol, |A - L - S| / |A|. Peak memory: 10.1 times arguments and results.
    """
    m, n = A.shape
    positive("rpca", "tol", tol)
    if weight != 0:
        positive("rpca", "weight", weight)
    require_range("rpca", "max_iterations", max_iterations, 1)
    with started(ctx, "rpca", A=A) as (el, A):
        A = ctx.to_layout(A, "MC_MR")
        L, S = el.zeros((m, n), A.dtype), el.zeros((m, n), A.dtype)
        total = _sums(ctx, np.abs(A.local).sum(dtype=np.float64))
        if total[0] == 0:
            return L, S
        control = el.control(
            "RPCA",
            A.dtype,
            useALM=False,
            progress=False,
            maxIts=max_iterations,
            tau=weight,
            beta=m * n / (4 * total[0]),
            tol=tol,
        )
        el("RPCAXDist", A.dtype, A, L, S, control)
    rest, whole = _sums(
        ctx, (np.abs(A.local - L.local - S.local) ** 2).sum(), (np.abs(A.local) ** 2).sum()
    )
    left = math.sqrt(rest / whole)
    require(
        left <= 2 * tol,
        "LinAlgError",
        f"rpca: after {max_iterations} iterations ||A - L - S|| is {left:.1e} ||A||, above "
        f"tol={tol}: increase max_iterations or tol",
    )
    return L, S


def _sums(ctx: Context, *mine: float) -> list[float]:
    """Sums over the ranks. Collective."""
    values = np.array(mine, np.float64)
    ctx.comm.Allreduce(values.copy(), values)
    return [float(v) for v in values]


def _uniform(ctx: Context, shape: tuple[int, int], dtype: np.dtype[Any], seed: int) -> DistMatrix:
    """Uniform in [0, 1), a Philox stream a row: the same on any number of ranks."""
    rows = ctx.empty(shape, dtype, "VC_STAR")
    for i, row in enumerate(rows.rows):
        bits = np.random.Philox(key=seed % (1 << 64), counter=[0, 0, row, 0])
        rows.local[i] = np.random.Generator(bits).random(shape[1])
    return rows


def _coefficients(ctx: Context, X: DistMatrix, B: DistMatrix, scale: float) -> DistMatrix:
    """The Z >= 0 that makes ||X Z - B|| least, MC_MR; X is in VC_STAR. Collective.

    ADMM with a fixed step converges fast where the step fits the Gram matrix, so X's columns
    are given length 1 and the step is the geometric mean of the Gram matrix's extremes.
    """
    k = X.shape[1]
    gram = np.zeros((k, k))
    if X.local.size:
        mine = X.local.astype(np.float64)
        gram += mine.T @ mine
    ctx.comm.Allreduce(gram.copy(), gram)
    lengths = np.sqrt(np.diagonal(gram))
    lengths[lengths == 0] = 1
    unit = ctx.empty_like(X)
    if X.local.size:
        unit.local[...] = X.local / lengths
    extremes = np.linalg.eigvalsh(gram / np.outer(lengths, lengths))[[0, -1]]
    with Elemental(ctx) as el:
        Z = el.zeros((k, B.shape[1]), X.dtype)
        control = el.control("NNLS", X.dtype, approach=ADMM)
        admm = control.admmCtrl
        admm.rho = math.sqrt(max(extremes[0], 1e-3 * extremes[1]) * extremes[1]) or 1.0
        admm.absTol = (scale or 1.0) * math.sqrt(X.shape[0]) * STEP_TOL
        admm.relTol = STEP_TOL if X.dtype == np.float64 else 10 * STEP_TOL
        admm.maxIter = STEPS
        el("NNLSXDist", X.dtype, unit, B, Z, control)
    if Z.local.size:
        Z.local[...] /= lengths[np.array(Z.rows)].astype(Z.dtype)[:, None]
    return Z


QP = 1  # ElNNLSApproach


def _fitted(
    ctx: Context, name: str, function: str, A: DistMatrix, b: DistMatrix, **weights: float
) -> DistMatrix:
    """The x of an optimization problem in A and the column b, with weights > 0."""
    column(b, A.shape[0], name, "b")
    require_real(name, A=A, b=b)
    for what, weight in weights.items():
        positive(name, what, weight)
    with started(ctx, name, A=A, b=b) as (el, A, b):
        x: DistMatrix = el.zeros((A.shape[1], 1), A.dtype)
        el(function, A.dtype, A, b, *weights.values(), x)
    return x


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
    return _fitted(ctx, "lasso", "BPDNDist", A, b, lam=lam)


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
    return _fitted(ctx, "elastic_net", "ENDist", A, b, lam1=lam1, lam2=lam2)


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
    return _fitted(ctx, "basis_pursuit", "BPDist", A, b)


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
    return _fitted(ctx, "least_absolute", "LAVDist", A, b)


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
    require_real("svm", A=A, d=d)
    positive("svm", "lam", lam)
    with started(ctx, "svm", A=A, d=d) as (el, A, d):
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
    require_real("nnls", A=A, B=B)
    with started(ctx, "nnls", A=A, B=B) as (el, A, B):
        X: DistMatrix = el.zeros((A.shape[1], B.shape[1]), A.dtype)
        el("NNLSXDist", A.dtype, A, B, X, el.control("NNLS", A.dtype, approach=QP))
    return X
