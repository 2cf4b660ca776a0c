"""Principal components, k-means, and kernel regression with random Fourier features.

The matrix of the features need not be formed.

Sources: Lloyd, IEEE Trans. Inf. Theory 28(2), 1982; Bahmani, Moseley, Vattani, Kumar,
Vassilvitskii, "Scalable k-means++", VLDB 2012 (the initial centers, "k-means||"); Arthur,
Vassilvitskii, "k-means++: the advantages of careful seeding", SODA 2007; Rahimi,
Recht, "Random features for large-scale kernel machines", NIPS 2007; Gittens et al., "Accelerating
large-scale data analysis by offloading to high-performance computing libraries using Alchemist",
KDD 2018 (the experiment: (Z^T Z + m lam I) W = Z^T Y by CG).
"""

from __future__ import annotations

import math

import numpy as np
from scipy.sparse import csr_array

from ali.blocks import (
    CHUNK,
    PANEL,
    Array,
    block,
    float_dtype,
    panels,
    require,
    require_range,
    require_real,
    require_same_rows,
    shape_text,
)
from ali.interface import Context, routine
from ali.linalg.collectives import sum_over_ranks, tree_reduce
from ali.linalg.creation import RowStreams, normal_rows
from ali.linalg.iterative import checked_tol, search
from ali.linalg.reductions import moment_measure, reduce_matrix
from ali.linalg.singular import truncated_svd
from mpi_workers.matrix import copy_kernels
from mpi_workers.matrix.dist_matrix import DistMatrix

ROUNDS = 5  # of candidates; more improve the start little (Bahmani et al. 2012)


@routine("centers", "labels", "inertia", "iterations", vectors=("labels",))
def kmeans(
    ctx: Context,
    A: DistMatrix,
    k: int,
    seed: int = 0,
    max_iterations: int = 300,
    tol: float = 1e-4,
) -> tuple[DistMatrix, DistMatrix, float, int]:
    """Cluster the rows of A around k centers.

    Parameters
    ----------
    A : matrix, shape (m, n), real
        Best in VC_STAR. Integers are promoted to float64.
    k : int
        Number of clusters, 1 to m.
    seed : int
        Of the initial centers, which k-means|| draws. They do not depend on the number of ranks.
    max_iterations : int
        Of Lloyd's algorithm, at least 1. The last centers are returned also without convergence.
    tol : float
        Stop when the sum of the squared moves of the centers is at most ``tol`` times the mean
        variance of A's columns.

    Returns
    -------
    centers : matrix, shape (k, n), STAR_STAR
    labels : vector, shape (m,), int32, VC_STAR
        The nearest center of each row; of equally near ones the first.
    inertia : float
        Sum of the squared distances of the rows to their centers.
    iterations : int

    Raises
    ------
    DtypeError
        If A is complex.
    BadArgumentError
        If k, max_iterations or tol is out of range.
    LinAlgError
        If A contains NaN or infinity, or its squares overflow in float64.

    Notes
    -----
    Initial centers: about 10 k candidates in 5 passes over A, ``20 m n k / ranks`` flops in
    products of matrices, then k-means++ among them on rank 0. An iteration costs
    ``2 m n k / ranks`` flops and one pass, with a sum of ``k n`` words over the ranks. Measured
    beside k-means++ of all rows (k passes), 200000 x 20 on 2 ranks, start and 10 iterations: half
    the CPU time for k = 100; for k = 8 the same, and an inertia of 1 instead of 1 to 7 times the
    best in well-separated clusters. Data is shifted by its mean, and
    scaled by a power of two if squares could over- or underflow. Distances come from products in
    A's precision. Where the two smallest differ by less than the rounding errors of the products,
    differences in float64 decide, so that clusters far from the origin are separated as well as the
    data allows.
    An empty cluster takes the row that is farthest from its center. The result is a local minimum:
    try several seeds. Memory: 8 words a row, ``30 k n`` words and 4 blocks of 1 MiB on each rank.
    Sources: see ali/linalg/learning.py.

    Error: 0.5 eps, of a center from the mean of its rows, relative to the largest element. Peak
    memory: 1.7 times arguments and results.
    """
    m, dtype = A.shape[0], float_dtype(A.dtype)
    require_real("kmeans", A=A)
    require(A.shape[1] > 0, "ShapeError", f"kmeans: A is {shape_text(A)}; it has no columns")
    require_range("kmeans", "k", k, 1, m, note=", the number of rows of A")
    require_range("kmeans", "max_iterations", max_iterations, 1)
    require_range("kmeans", "tol", tol, 0)
    rows = _Rows(ctx, block(ctx.to_layout(A, "VC_STAR")).astype(dtype, copy=False), m)
    centers = rows.first_centers(k, seed)
    limit = tol * rows.variance
    for iteration in range(1, max_iterations + 1):
        ctx.check()
        ctx.progress(iteration / (max_iterations + 1), f"iteration {iteration}")
        moved = rows.means(centers)
        settled = float(((moved - centers) ** 2).sum()) <= limit
        centers = moved
        if ctx.comm.bcast(settled):  # rank 0 decides: ranks may round differently
            break
    labels, distances = rows.nearest(centers, exact=True)
    inertia = float(sum_over_ranks(ctx.comm, np.array([distances.sum()]))[0]) * rows.unit**2
    found = ctx.new_replicated((centers * rows.unit + rows.mean).astype(dtype))
    return found, ctx.new_from_rows(labels[:, None].astype(np.int32), m), inertia, iteration


class _Rows:
    """This rank's rows, shifted by the mean of all rows.

    Attributes
    ----------
    mean : ndarray, shape (n,)
        In A's precision, so that subtracting it is exact for rows close to it.
    unit : float
        1, or a power of two near the root mean square of the shifted elements if their squares
        could over- or underflow. Shifted rows and centers are in this unit.
    variance : float
        Mean variance of the columns, in units.
    """

    def __init__(self, ctx: Context, local: Array, m: int) -> None:
        self._ctx, self._local = ctx, local
        self._ids = np.arange(ctx.rank, m, ctx.size)
        n = local.shape[1]
        self.unit = 1.0
        with np.errstate(all="ignore"):
            mean = sum_over_ranks(ctx.comm, local.sum(axis=0, dtype=np.float64)) / m
            self.mean: Array = mean.astype(local.dtype).astype(np.float64)
            squares = np.zeros(1)
            for part in panels(len(local), max(1, CHUNK // (8 * n))):
                squares += (self._centred(part).astype(np.float64) ** 2).sum()
            total = float(sum_over_ranks(ctx.comm, squares)[0])
        require(
            math.isfinite(total),
            "LinAlgError",
            "kmeans: A contains NaN or infinity, or its squares overflow",
        )
        size = math.sqrt(total / m / n)
        limits = np.finfo(local.dtype)
        if size > 0 and not limits.tiny**0.25 < size < limits.max**0.25:
            self.unit = max(2.0 ** (math.frexp(size)[1] - 1), float(limits.tiny))
        self.variance = total / m / n / self.unit**2

    def first_centers(self, k: int, seed: int) -> Array:
        """k different rows, if there are as many, far from each other. Collective.

        Candidates are drawn in rounds, each row independently with a probability proportional to
        its squared distance to the candidates before. k-means++ chooses among them; each candidate
        counts as often as there are rows nearest to it.
        """
        comm = self._ctx.comm
        candidates = self._row(-np.log(_uniform(seed, 0, self._ids)))[None]
        labels, away = self.nearest(candidates)
        for draw in range(1, ROUNDS + 1):
            self._ctx.check()
            total = float(sum_over_ranks(comm, np.array([away.sum()]))[0])
            picked = np.flatnonzero(_uniform(seed, draw, self._ids) * total < 2 * k * away)
            found = comm.allgather((self._ids[picked], self._centred(picked)))
            ids, rows = (np.concatenate(parts) for parts in zip(*found, strict=True))
            if not ids.size:
                continue
            rows = rows[np.argsort(ids)].astype(np.float64)
            closest, distances = self.nearest(rows)
            labels = np.where(distances < away, closest + len(candidates), labels)
            away = np.minimum(away, distances)
            candidates = np.concatenate([candidates, rows])
        counts = sum_over_ranks(comm, np.bincount(labels, minlength=len(candidates)))
        centers = np.empty((k, candidates.shape[1]))
        if self._ctx.rank == 0:
            centers[...] = candidates[_spread(candidates, counts, k, seed)]
        comm.Bcast(centers)
        return centers

    def means(self, centers: Array) -> Array:
        """The mean of the rows nearest to each center."""
        k, n = centers.shape
        sums = np.zeros((k, n + 1))
        _, away = self.nearest(centers, sums=sums)
        sums = sum_over_ranks(self._ctx.comm, sums)
        found = sums[:, :n] / np.maximum(sums[:, n:], 1)
        for j in np.flatnonzero(sums[:, n] == 0).tolist():
            with np.errstate(divide="ignore"):
                found[j] = self._row(1 / away)
            _, other = self.nearest(found[j : j + 1])
            away = np.minimum(away, other)
        return found

    def nearest(
        self, centers: Array, *, exact: bool = False, sums: Array | None = None
    ) -> tuple[Array, Array]:
        """The nearest center of each of this rank's rows, and its squared distance.

        With `exact` distances are computed in float64, else in the rows' precision. The sum and the
        number of the rows of each center are added to `sums`, shape (k, n + 1).
        """
        labels = np.zeros(len(self._local), np.int64)
        distances = np.zeros(len(self._local))
        c = centers.astype(self._local.dtype)
        lengths = (c**2).sum(axis=1)
        # A score has an error of at most `rounding` times |c| (|x| + |c|).
        rounding = 4 * (c.shape[1] + 2) * float(np.finfo(c.dtype).eps)
        longest = math.sqrt(float(lengths.max()))
        for part in panels(len(self._local), max(1, CHUNK // (8 * max(c.shape)))):
            x = self._centred(part)
            scores = lengths - 2 * (x @ c.T)  # squared distances, less |x|^2
            found = np.argmin(scores, axis=1)
            if len(c) > 1:
                size = math.sqrt(float(np.einsum("ij,ij->i", x, x).max()))
                _break_ties(x, centers, scores, rounding * longest * (longest + size), found)
            labels[part] = found
            apart = x - (centers if exact else c)[found]
            distances[part] = np.einsum("ij,ij->i", apart, apart)
            if sums is not None:  # measured: 0.15 to 0.6 of the time of a dense product
                starts = np.arange(len(x) + 1)
                member = csr_array((np.ones(len(x)), found, starts), shape=(len(x), len(c)))
                sums[:, :-1] += member.T @ x
                sums[:, -1] += np.bincount(found, minlength=len(c))
        return labels, distances

    def _centred(self, part: slice | Array) -> Array:
        rows = self._local[part]
        centred = np.empty(rows.shape, rows.dtype)  # C-ordered: all that follows reads whole rows
        copy_kernels.copy(centred, rows)
        centred -= self.mean.astype(rows.dtype)
        if self.unit != 1.0:
            centred *= rows.dtype.type(1 / self.unit)
        return centred

    def _row(self, keys: Array) -> Array:
        """The row with the smallest key of all ranks; the same bits on every rank."""
        n = self._local.shape[1]
        best = np.full(n + 2, np.inf)  # key, index, row
        if keys.size:
            i = int(np.argmin(keys))
            best[0], best[1] = keys[i], self._ids[i]
            best[2:] = self._centred(slice(i, i + 1))[0]

        def first(a: Array, b: Array) -> Array:
            return a if (a[0], a[1]) <= (b[0], b[1]) else b

        return tree_reduce(self._ctx.comm, range(self._ctx.size), best, first)[2:]


def _spread(points: Array, weights: Array, k: int, seed: int) -> list[int]:
    """k of the points by k-means++: drawn by weight times squared distance to those before."""
    rng = np.random.default_rng(seed % (1 << 64))
    chosen = list[int]()
    away = np.ones(len(points))
    while len(chosen) < k:
        shares = np.cumsum(weights * away)
        at = int(np.searchsorted(shares, rng.random() * shares[-1], side="right"))
        chosen.append(min(at, len(points) - 1))
        distances = ((points - points[chosen[-1]]) ** 2).sum(axis=1)
        away = distances if len(chosen) == 1 else np.minimum(away, distances)
    return chosen


def _break_ties(x: Array, centers: Array, scores: Array, error: float, found: Array) -> None:
    """Correct `found` where another score is within `error` of the best; spoils `scores`."""
    every = np.arange(len(x))
    limits = scores[every, found] + error
    scores[every, found] = np.inf
    close = np.flatnonzero(scores.min(axis=1) <= limits)
    if not close.size:
        return
    scores[close, found[close]] = -np.inf
    rows, candidates = np.nonzero(scores[close] <= limits[close, None])
    rows = close[rows]
    away = np.empty(rows.size)
    for pairs in panels(rows.size, max(1, CHUNK // (8 * x.shape[1]))):
        apart = x[rows[pairs]] - centers[candidates[pairs]]  # in float64, as centers are
        away[pairs] = np.einsum("ij,ij->i", apart, apart)
    starts = np.flatnonzero(np.diff(rows, prepend=-1))
    least = np.repeat(np.minimum.reduceat(away, starts), np.diff(starts, append=rows.size))
    best = np.flatnonzero(away == least)[::-1]  # of equals the first is written last
    found[rows[best]] = candidates[best]


def _uniform(seed: int, draw: int, ids: Array) -> Array:
    """Independent numbers in (0, 1), one for each (draw, index), by splitmix64's finalizer."""
    mask = (1 << 64) - 1
    start = (seed * 0x9E3779B97F4A7C15 + draw * 0xD1B54A32D192ED03 + 0x632BE59BD9B4E019) & mask
    z = ids.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(start)
    for _ in range(2):
        z ^= z >> np.uint64(30)
        z *= np.uint64(0xBF58476D1CE4E5B9)
        z ^= z >> np.uint64(27)
        z *= np.uint64(0x94D049BB133111EB)
        z ^= z >> np.uint64(31)
        z += np.uint64(start)
    return ((z >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52


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
    moments, _, _ = reduce_matrix(ctx, rows, 0, moment_measure(A.dtype))
    with np.errstate(all="ignore"):
        constant = _constant(ctx, rows)
        unscaled = constant | _rounding(m, moments[1], moments[2])
        deviation = np.where(unscaled, 1.0, np.sqrt(moments[2] / (m - 1))) if scale else np.ones(n)
        squares = np.where(constant, 0.0, moments[2])
        squares = squares if center else squares + m * moments[1] ** 2
    require(
        bool(np.isfinite(squares).all()),
        "LinAlgError",
        "pca: A contains NaN or infinity, or its squares overflow",
    )
    mean, rest = (moments[1], moments[3]) if center else (np.zeros(n), np.zeros(n))
    total = math.fsum((squares / deviation**2).tolist()) / (m - 1)
    X = ctx.empty(A.shape, dtype)
    for j in range(n):  # in float64, a column at a time
        column = (block(rows)[:, j] - mean[j] - rest[j]) / deviation[j]
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
    most = -(-m // ctx.size) * features * mapped.dtype.itemsize  # of rank 0: ranks decide alike
    if most <= keep_bytes:
        mapped.keep()

    def normal(W: Array) -> Array:
        mine = np.zeros_like(W)
        short = W.astype(mapped.dtype)
        for part in mapped.parts():
            ctx.check()
            z = mapped.of(part)
            mine += z.T @ (z @ short)
        return np.asarray(sum_over_ranks(ctx.comm, mine) + (m * lam) * W)

    side = np.zeros((features, r))
    for part in mapped.parts():
        side += mapped.of(part).T @ right[part]
    side = sum_over_ranks(ctx.comm, side)
    limit = max_iterations or 10 * features
    W, count, residual = search(ctx, name, normal, side, tol, limit, replicated=True)
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
