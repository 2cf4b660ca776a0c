"""Principal components."""

from __future__ import annotations

import math

import numpy as np

from ali.blocks import Array, block, float_dtype, require, require_range, require_real, shape_text
from ali.interface import Context, routine
from ali.linalg.collectives import tree_reduce
from ali.linalg.reductions import join_moments, moment_measure, reduce_matrix
from ali.linalg.singular import truncated_svd
from mpi_workers.matrix.dist_matrix import DistMatrix


@routine("components", "explained_variance", "mean", "scores", "explained_ratio", "deviation")
def pca(
    ctx: Context,
    A: DistMatrix,
    k: int,
    center: bool = True,
    scale: bool = False,
    method: str = "arpack",
    seed: int = 0,
) -> tuple[DistMatrix, DistMatrix, DistMatrix, DistMatrix, DistMatrix, DistMatrix]:
    """Principal components of the rows of A.

    Parameters
    ----------
    A : matrix, shape (m, n), real
        One sample in each row, at least two. Best in VC_STAR.
    k : int
        Number of components, 1 to min(m, n).
    center : bool
        Whether to subtract the columns' means.
    scale : bool
        Whether to divide columns by their standard deviations (ddof 1). Constant columns are not
        divided: those whose deviation is within the rounding error of computing it (the bound of
        scikit-learn's StandardScaler).
    method : str
        "arpack", "randomized" or "gram", see `truncated_svd`.
    seed : int
        For "randomized".

    Returns
    -------
    components : matrix, shape (k, n), STAR_STAR
        Orthonormal rows, by descending variance. In each row the element of the largest absolute
        value is positive.
    explained_variance : vector, shape (k,), STAR_STAR
        Variance of the scores (ddof 1), descending.
    mean : vector, shape (n,), STAR_STAR
        The subtracted means; zeros without `center`.
    scores : matrix, shape (m, k), VC_STAR
        ``(A - mean) / deviation @ components.T``.
    explained_ratio : vector, shape (k,), STAR_STAR
        Share of each component in the sum of all variances.
    deviation : vector, shape (n,), STAR_STAR
        The divisors of the columns; ones without `scale` and for constant columns.

    Raises
    ------
    DtypeError
        If A is complex.
    ShapeError
        If A has only one row.
    BadArgumentError
        If k or `method` is out of range.
    LinAlgError
        If A contains NaN or infinity or its squares overflow, or ARPACK does not converge.

    Notes
    -----
    Two passes over A, then a truncated SVD of a centred and scaled copy; means and deviations are
    computed in float64. Memory: one copy of A and that of `truncated_svd`. Results equal those of
    scikit-learn's PCA (with ``svd_flip`` by components). With `center`, columns of one value are
    set to exactly 0. With `scale`, a column whose deviation is within the rounding error of its
    mean is not divided by it, as by scikit-learn's StandardScaler. Source: Jolliffe, "Principal
    Component Analysis", 2nd ed., 2002.

    Error: 20 eps, of variances relative to the largest; components are orthonormal to it. Peak
    memory: 2.4 times arguments and results.
    """
    m, n = A.shape
    require_real("pca", A=A)
    require(m >= 2, "ShapeError", f"pca: A is {shape_text(A)}; it must have two rows or more")
    require_range("pca", "k", k, 1, min(m, n), note=f" for a {shape_text(A)} matrix")
    dtype = float_dtype(A.dtype)
    rows = ctx.to_layout(A, "VC_STAR")
    measure, nothing = moment_measure(A.dtype)
    found, _, _ = reduce_matrix(ctx, rows, 0, measure, nothing, join_moments)
    with np.errstate(all="ignore"):
        constant = _constant(ctx, rows)
        unscaled = constant | _rounding(m, found[1], found[2])
        deviation = np.where(unscaled, 1.0, np.sqrt(found[2] / (m - 1))) if scale else np.ones(n)
        squares = np.where(constant, 0.0, found[2])
        squares = squares if center else squares + m * found[1] ** 2
    require(
        bool(np.isfinite(squares).all()),
        "LinAlgError",
        "pca: A contains NaN or infinity, or its squares overflow",
    )
    mean = found[1] if center else np.zeros(n)
    total = math.fsum((squares / deviation**2).tolist()) / (m - 1)
    X = ctx.empty(A.shape, dtype)
    for j in range(n):  # in float64, a column at a time
        column = (block(rows)[:, j] - mean[j]) / deviation[j]
        block(X)[:, j] = 0 if center and constant[j] else column
    S, U, V = truncated_svd(ctx, X, k, method=method, seed=seed)
    components = np.ascontiguousarray(ctx.to_layout(V, "STAR_STAR").local.T)
    largest = np.argmax(np.abs(components), axis=1)
    signs = np.sign(components[np.arange(k), largest])
    signs = tree_reduce(ctx.comm, range(ctx.size), signs, lambda a, b: a)  # rank 0 decides
    values = S.local[:, 0]
    scores = ctx.empty(U.shape, dtype)
    np.multiply(block(U), values * signs, out=block(scores))
    variance = values.astype(np.float64) ** 2 / (m - 1)
    return (
        ctx.new_replicated(components * signs[:, None]),
        ctx.new_replicated(variance.astype(dtype)),
        ctx.new_replicated(mean.astype(dtype)),
        scores,
        ctx.new_replicated((variance / total if total else variance).astype(dtype)),
        ctx.new_replicated(deviation.astype(dtype)),
    )


def _constant(ctx: Context, rows: DistMatrix) -> Array:
    """Which columns have one value in all rows. Collective."""
    local = block(rows)
    ends = np.full((2, local.shape[1]), np.inf)
    if len(local):
        ends[:] = local.min(axis=0), -local.max(axis=0).astype(np.float64)
    low, high = tree_reduce(ctx.comm, range(ctx.size), ends, np.minimum)
    return np.asarray(low == -high)


def _rounding(count: int, mean: Array, squares: Array) -> Array:
    """Which columns have a variance within the rounding error of computing it: not to divide by.

    The bound of scikit-learn's ``_is_constant_feature``, from Chan, Golub, LeVeque 1983.
    """
    eps = float(np.finfo(np.float64).eps)
    variance = squares / count
    return np.asarray(variance <= count * eps * variance + (count * mean * eps) ** 2)
