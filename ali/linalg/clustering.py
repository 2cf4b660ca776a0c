"""k-means.

Sources: Lloyd, IEEE Trans. Inf. Theory 28(2), 1982; Bahmani, Moseley, Vattani, Kumar,
Vassilvitskii, "Scalable k-means++", VLDB 2012 (the initial centers, "k-means||"); Arthur,
Vassilvitskii, "k-means++: the advantages of careful seeding", SODA 2007.
"""

from __future__ import annotations

import math

import numpy as np
from scipy.sparse import csr_array

from ali.blocks import (
    CHUNK,
    Array,
    block,
    float_dtype,
    panels,
    require,
    require_range,
    require_real,
    shape_text,
)
from ali.interface import Context, routine
from ali.linalg.collectives import sum_over_ranks, tree_reduce
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
    Sources: see ali/linalg/clustering.py.

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
    rng, chosen = np.random.default_rng(seed % (1 << 64)), list[int]()
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
