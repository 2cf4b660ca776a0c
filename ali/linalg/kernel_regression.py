"""Kernel regression with random Fourier features, whose matrix need not be formed.

Sources: Rahimi, Recht, "Random features for large-scale kernel machines", NIPS 2007; Gittens
et al., "Accelerating large-scale data analysis by offloading to high-performance computing
libraries using Alchemist", KDD 2018 (the experiment: (Z^T Z + m lam I) W = Z^T Y by CG).
"""

from __future__ import annotations

import numpy as np

from ali.blocks import (
    PANEL,
    Array,
    block,
    float_dtype,
    panels,
    require_range,
    require_real,
    require_same_rows,
)
from ali.interface import Context, routine
from ali.linalg.collectives import sum_over_ranks
from ali.linalg.creation import RowStreams, normal_rows
from ali.linalg.iterative import checked_tol, column_dots, search
from mpi_workers.matrix.dist_matrix import DistMatrix

PURPOSE = 4  # random streams of the frequencies; those of the phases are PURPOSE + 1


@routine("Z")
def random_features(
    ctx: Context, X: DistMatrix, features: int, sigma: float, seed: int = 0
) -> DistMatrix:
    """Random Fourier features of the rows of X; their inner products approximate a Gaussian kernel.

    Parameters
    ----------
    X : matrix, shape (m, d), real
        One sample in each row. Best in VC_STAR.
    features : int
        Number of features, at least 1; the error falls with its square root.
    sigma : float
        Width of the kernel ``exp(-|x - y|^2 / (2 sigma^2))``, above 0.
    seed : int
        The same seed gives the same features, for any X and any number of ranks.

    Returns
    -------
    Z : matrix, shape (m, features), VC_STAR
        ``sqrt(2 / features) cos(X F / sigma + b)``, F standard normal, b uniform in [0, 2 pi).

    Raises
    ------
    DtypeError
        If X is complex.
    BadArgumentError
        If `features` is below 1 or sigma is not above 0.

    Notes
    -----
    ``2 m d features / ranks`` flops and ``m features / ranks`` cosines, no communication. Memory
    in addition to Z: ``d features`` words on each rank, and 32 MiB.

    Error: 15 eps, relative to the largest element. Peak memory: 1.2 times arguments and results.
    """
    _check("random_features", X, features, sigma)
    mapped = _Features(ctx, X, features, sigma, seed)
    Z = ctx.empty((X.shape[0], features), mapped.dtype)
    out = block(Z)
    for part in mapped.parts():
        ctx.check()
        out[part] = mapped.of(part)
    return Z


@routine("W", "iterations", "residual", like={"W": "Y"})
def random_features_ridge(
    ctx: Context,
    X: DistMatrix,
    Y: DistMatrix,
    features: int,
    sigma: float,
    lam: float,
    seed: int = 0,
    tol: float = -1.0,
    max_iterations: int = 500,
    keep_bytes: int = 1 << 30,
) -> tuple[DistMatrix, int, float]:
    """Kernel ridge regression of Y on X through random features, by conjugate gradients.

    Parameters
    ----------
    X : matrix, shape (m, d), real
        One sample in each row. Best in VC_STAR.
    Y : matrix, shape (m, r), real
        The targets: values, or a column of 0 and 1 (or -1 and 1) for each class.
    features, sigma, seed
        See `random_features`.
    lam : float
        Above 0: W minimizes ``|Z W - Y|^2 / m + lam |W|^2``.
    tol : float
        Relative residual of the normal equations that every column must reach. Negative (the
        default): 1e-6, or 1e-3 if X is of single precision.
    max_iterations : int
        At most; 0 is 10 features.
    keep_bytes : int
        The features are kept if a rank's part of them has at most this size, else they are
        computed in every iteration.

    Returns
    -------
    W : matrix, shape (features, r), VC_STAR
        For `random_features_predict`.
    iterations : int
    residual : float
        The largest relative residual of a column of the normal equations: at most tol.

    Raises
    ------
    DtypeError
        If X or Y is complex.
    ShapeError
        If X and Y differ in their numbers of rows.
    BadArgumentError
        If features, sigma, lam, tol, max_iterations or keep_bytes is out of range.
    LinAlgError
        If X or Y contains NaN or infinity, or max_iterations or the precision do not suffice for
        tol.

    Notes
    -----
    Conjugate gradients on ``(Z^T Z + m lam I) W = Z^T Y`` (see `conjugate_gradient`); the matrix is
    not formed. Features have X's precision, W is computed in float64. An iteration
    costs ``4 m features r / ranks`` flops, and ``2 m d features / ranks`` with cosines if the
    features are not kept; ``features r`` words in ``2 log2(ranks)`` messages. Memory on each
    rank: ``(d + 7 r) features`` words, and 32 MiB or the kept features.

    Error: 1 tol, as `residual`. Peak memory: 1.6 times arguments and results.
    """
    m, r = Y.shape
    name = "random_features_ridge"
    _check(name, X, features, sigma)
    require_real(name, Y=Y)
    require_same_rows(name, X, Y, "XY")
    require_range(name, "lam", lam, 0, above=True)
    require_range(name, "keep_bytes", keep_bytes, 0)
    mapped = _Features(ctx, X, features, sigma, seed)
    tol = checked_tol(name, tol, mapped.dtype, max_iterations, 1e-6)
    right = block(ctx.to_layout(Y, "VC_STAR")).astype(mapped.dtype, copy=False)
    most = (
        -(-m // ctx.size) * features * mapped.dtype.itemsize
    )  # of rank 0, so that all ranks decide alike
    if most <= keep_bytes:
        mapped.keep()

    def normal(W: Array) -> Array:
        mine, short = np.zeros_like(W), W.astype(mapped.dtype)
        for part in mapped.parts():
            ctx.check()
            z = mapped.of(part)
            mine += z.T @ (z @ short)
        return np.asarray(sum_over_ranks(ctx.comm, mine) + (m * lam) * W)

    def dots(a: Array, b: Array) -> Array:
        # Every rank has all of W, and ranks may round differently: the result of rank 0 counts.
        products = column_dots(a, b)
        ctx.comm.Bcast(products)
        return products

    side = np.zeros((features, r))
    for part in mapped.parts():
        side += mapped.of(part).T @ right[part]
    side = sum_over_ranks(ctx.comm, side)
    largest = np.abs(side).max(axis=0)
    limit = max_iterations or 10 * features
    W, count, residual = search(ctx, name, normal, dots, side, largest, tol, limit)
    return ctx.new_replicated(W.astype(mapped.dtype), "VC_STAR"), count, residual


@routine("Y", like={"Y": "W"})
def random_features_predict(
    ctx: Context, X: DistMatrix, W: DistMatrix, sigma: float, seed: int = 0
) -> DistMatrix:
    """Predictions Y = Z W for new rows of X, with the weights of `random_features_ridge`.

    Parameters
    ----------
    X : matrix, shape (m, d), real
        Best in VC_STAR.
    W : matrix, shape (features, r), real
    sigma, seed
        The values with which W was computed.

    Returns
    -------
    Y : matrix, shape (m, r), VC_STAR

    Raises
    ------
    DtypeError
        If X or W is complex.
    BadArgumentError
        If sigma is not above 0.

    Notes
    -----
    ``2 m (d + r) features / ranks`` flops, ``features r`` words received. Memory on each rank:
    ``(d + r) features`` words, and 32 MiB of features at a time.

    Error: 4 eps, relative to the largest element. Peak memory: 1.2 times arguments and results.
    """
    _check("random_features_predict", X, W.shape[0], sigma)
    require_real("random_features_predict", W=W)
    mapped = _Features(ctx, X, W.shape[0], sigma, seed)
    weights = block(ctx.to_layout(W, "STAR_STAR")).astype(mapped.dtype, copy=False)
    Y = ctx.empty((X.shape[0], W.shape[1]), mapped.dtype)
    out = block(Y)
    for part in mapped.parts():
        ctx.check()
        out[part] = mapped.of(part) @ weights
    return Y


class _Features:
    """Features of this rank's rows of X, a panel of rows at a time."""

    def __init__(self, ctx: Context, X: DistMatrix, features: int, sigma: float, seed: int) -> None:
        self.dtype: np.dtype[np.generic] = float_dtype(X.dtype)
        self._local = block(ctx.to_layout(X, "VC_STAR")).astype(self.dtype, copy=False)
        # One stream for each feature: a smaller number of features gives the first of a larger one.
        frequencies = normal_rows(range(features), X.shape[1], seed, PURPOSE) / sigma
        streams = RowStreams(seed, PURPOSE + 1)
        phases = [streams.at(row).random() for row in range(features)]
        self._frequencies = np.asfortranarray(frequencies.T.astype(self.dtype))
        self._phases = (2 * np.pi * np.array(phases)).astype(self.dtype)
        self._height = max(1, PANEL // (features * self.dtype.itemsize))
        self._kept: list[Array] = []

    def parts(self) -> list[slice]:
        return list(panels(len(self._local), self._height))

    def keep(self) -> None:
        """Compute all features once and keep them."""
        self._kept = [self._computed(part) for part in self.parts()]

    def of(self, part: slice) -> Array:
        if self._kept:
            index: int = part.start // self._height
            return self._kept[index]
        return self._computed(part)

    def _computed(self, part: slice) -> Array:
        z: Array = self._local[part] @ self._frequencies
        z += self._phases
        np.cos(z, out=z)
        z *= (2 / self._phases.size) ** 0.5
        return z


def _check(name: str, X: DistMatrix, features: int, sigma: float) -> None:
    require_real(name, X=X)
    require_range(name, "features", features, 1)
    require_range(name, "sigma", sigma, 0, above=True)
