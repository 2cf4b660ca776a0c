"""k-means.

Sources: Lloyd, IEEE Trans. Inf. Theory 28(2), 1982; Arthur, Vassilvitskii, "k-means++: the
advantages of careful seeding", SODA 2007; Efraimidis, Spirakis, Inf. Process. Lett. 97(5), 2006
(drawing with weights as a race, which ranks can run each for itself).
"""

from __future__ import annotations

import numpy as np

from ali.blocks import CHUNK, Array, block, panels, require, shape_text
from ali.interface import Context, routine
from ali.linalg.collectives import sum_over_ranks, tree_reduce
from mpi_workers.matrix import copy_kernels
from mpi_workers.matrix.dist_matrix import DistMatrix


@routine("centers", "labels", "inertia", "iterations")
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
        Clusters, 1 to m.
    seed : int
        Of the first centers, which k-means++ draws. They do not depend on the number of ranks.
    max_iterations : int
        Of Lloyd's; at least 1. When they are over the centers are taken as they are.
    tol : float
        Stop when the squares of the centers' moves add up to less than ``tol`` times the mean
        variance of A's columns.

    Returns
    -------
    centers : matrix, shape (k, n), STAR_STAR
    labels : matrix, shape (m, 1), int32, VC_STAR
        Of each row the nearest center.
    inertia : float
        Sum of the squared distances of the rows to their centers.
    iterations : int

    Raises
    ------
    DtypeError
        If A is complex.
    BadArgumentError
        If k, max_iterations or tol is out of range.
    RoutineError
        If A holds NaN or inf.

    Notes
    -----
    ``3 m n k / ranks`` flops for the first centers in k steps, and ``4 m n k / ranks`` for each
    iteration, with a sum of ``k n`` words over the ranks. Distances are taken in A's precision
    from data that is moved to its mean. A cluster that has lost all its rows takes the row that
    is farthest from its center. Memory: 8 words a row, and ``k n`` on each rank. The result is a
    local minimum: try several seeds. Sources: see ali/linalg/clustering.py.
    """
    m, dtype = A.shape[0], np.result_type(A.dtype, np.float32)
    require(A.dtype.kind != "c", "DtypeError", f"kmeans: A is {A.dtype}; it must be real")
    require(
        1 <= k <= m, "BadArgumentError", f"kmeans: k={k}, and A is {shape_text(A)}: 1 to {m} rows"
    )
    require(
        max_iterations >= 1,
        "BadArgumentError",
        f"kmeans: max_iterations={max_iterations} is below 1",
    )
    require(tol >= 0, "BadArgumentError", f"kmeans: tol={tol} is not >= 0")
    rows = _Rows(ctx, block(ctx.to_layout(A, "VC_STAR")).astype(dtype, copy=False), m)
    centers = rows.first_centers(k, seed)
    limit = tol * rows.variance
    for iteration in range(1, max_iterations + 1):
        ctx.check()
        ctx.progress(iteration / (max_iterations + 1), f"iteration {iteration}")
        moved = rows.means(centers)
        settled = float(((moved - centers) ** 2).sum()) <= limit
        centers = moved
        if ctx.comm.bcast(settled):  # rank 0 decides: others may round otherwise
            break
    labels, distances = rows.nearest(centers)
    inertia = float(sum_over_ranks(ctx.comm, np.array([distances.sum()]))[0])
    found = ctx.new_replicated((centers + rows.mean).astype(dtype))
    return found, ctx.new_from_rows(labels[:, None].astype(np.int32), m), inertia, iteration


class _Rows:
    """This rank's rows, and what all ranks know of them. Centers are relative to the mean."""

    def __init__(self, ctx: Context, local: Array, m: int) -> None:
        self._ctx, self._local, self._m = ctx, local, m
        self._ids = np.arange(ctx.rank, m, ctx.size)
        self._height = max(1, CHUNK // max(1, local.shape[1] * local.itemsize))
        with np.errstate(all="ignore"):
            self.mean: Array = sum_over_ranks(ctx.comm, local.sum(axis=0, dtype=np.float64)) / m
            squares = np.zeros(1)
            for part in panels(len(local), self._height):
                squares += (self._centred(part).astype(np.float64) ** 2).sum()
            distribution = float(sum_over_ranks(ctx.comm, squares)[0])
        require(
            np.isfinite(distribution), "RoutineError", "kmeans: A holds NaN or inf, or is too large"
        )
        self.variance = distribution / m / local.shape[1]

    def first_centers(self, k: int, seed: int) -> Array:
        """Rows drawn with the squares of their distances to those drawn before as weights.

        Of numbers ``E / weight`` with exponential E the least belongs to each row with a
        probability in proportion to its weight.
        """
        centers = np.zeros((k, self._local.shape[1]))
        weights = np.ones(len(self._local))
        for j in range(k):
            self._ctx.check()
            with np.errstate(divide="ignore"):
                keys = -np.log(_uniform(seed, j, self._ids)) / weights
            centers[j] = self._row(keys)
            _, away = self.nearest(centers[j : j + 1])
            weights = away if j == 0 else np.minimum(weights, away)
        return centers

    def means(self, centers: Array) -> Array:
        """The means of the rows that are nearest to each center."""
        labels, away = self.nearest(centers)
        k, n = centers.shape
        sums = np.zeros((k, n + 1))
        for part in panels(len(labels), self._height):
            member = np.zeros((k, part.stop - part.start))
            member[labels[part], np.arange(member.shape[1])] = 1
            sums[:, :n] += member @ self._centred(part)
            sums[:, n] += member.sum(axis=1)
        sums = sum_over_ranks(self._ctx.comm, sums)
        found = sums[:, :n] / np.maximum(sums[:, n:], 1)
        for j in np.flatnonzero(sums[:, n] == 0).tolist():
            with np.errstate(divide="ignore"):
                found[j] = self._row(1 / away)
            _, other = self.nearest(found[j : j + 1])
            away = np.minimum(away, other)
        return found

    def nearest(self, centers: Array) -> tuple[Array, Array]:
        """For each of this rank's rows the nearest center, and the square of its distance."""
        labels = np.zeros(len(self._local), np.int64)
        distances = np.zeros(len(self._local))
        c = centers.astype(self._local.dtype)
        lengths = (c**2).sum(axis=1)
        for part in panels(len(self._local), self._height):
            x = self._centred(part)
            # Without |x|^2, which is the same for all centers; the distance itself is computed
            # from the difference, where nothing cancels.
            labels[part] = np.argmin(lengths - 2 * (x @ c.T), axis=1)
            x -= c[labels[part]]
            distances[part] = np.einsum("ij,ij->i", x, x)
        return labels, distances

    def _centred(self, part: slice) -> Array:
        rows = self._local[part]
        centred = np.empty(rows.shape, rows.dtype)  # rows together, as all that follows reads them
        copy_kernels.copy(centred, rows)
        centred -= self.mean.astype(rows.dtype)
        return centred

    def _row(self, keys: Array) -> Array:
        """The row with the least key of all ranks, as they all see it."""
        n = self._local.shape[1]
        best = np.full(n + 2, np.inf)  # key, index, row
        if keys.size:
            i = int(np.argmin(keys))
            best[0], best[1] = keys[i], self._ids[i]
            best[2:] = self._centred(slice(i, i + 1))[0]

        def first(a: Array, b: Array) -> Array:
            return a if (a[0], a[1]) <= (b[0], b[1]) else b

        return tree_reduce(self._ctx.comm, range(self._ctx.size), best, first)[2:]


def _uniform(seed: int, draw: int, ids: Array) -> Array:
    """Independent numbers in (0, 1), one for each (draw, index): splitmix64's finalizer."""
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
