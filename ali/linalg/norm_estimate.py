"""An estimate of the 1-norm of a matrix that is known by its products only.

Source: Higham, Tisseur, "A block algorithm for matrix 1-norm estimation, with an application to
1-norm pseudospectra", SIAM J. Matrix Anal. Appl. 21(4), 2000 (algorithm 2.4, without the search for
parallel columns).
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ali.blocks import Array
from ali.interface import Context

COLUMNS = 4  # vectors at a time
ITERATIONS = 5


def norm_estimate(
    ctx: Context,
    n: int,
    dtype: np.dtype[np.generic],
    times: Callable[[Array], Array],
    adjoint: Callable[[Array], Array],
) -> float:
    """A lower bound of the 1-norm of an n x n matrix, the same on every rank. Collective.

    Parameters
    ----------
    times, adjoint : callable
        Products of the matrix and its adjoint with (n, r) arrays that are the same on every rank.

    Notes
    -----
    At most `ITERATIONS` products of each kind with `COLUMNS` vectors.
    """
    width, rng = min(COLUMNS, n), np.random.default_rng(0)
    vectors = rng.choice([-1.0, 1.0], (n, width)) / n
    vectors[:, 0] = 1 / n
    X = vectors.astype(dtype)
    best, chosen, used = 0.0, np.empty(0, np.int64), np.zeros(n, bool)
    for count in range(ITERATIONS):
        ctx.check()
        Y = times(X)
        sizes = np.abs(Y).sum(axis=0, dtype=np.float64)
        signs = np.where(Y == 0, 1, Y / np.where(Y == 0, 1, np.abs(Y))).astype(dtype)
        heights = np.abs(adjoint(signs)).max(axis=1)
        top = int(np.argmax(sizes))
        better = bool(sizes[top] > best)
        best = max(best, float(sizes[top]))
        # Unit vectors of the highest rows follow, unless the best one was such a vector already.
        finished = not better or (count > 0 and bool(heights.max() <= heights[chosen[top]]))
        order = np.argsort(-heights, kind="stable")
        chosen = order[~used[order]][:width]
        # Rank 0 decides: other ranks may round differently.
        finished, best, chosen = ctx.comm.bcast((finished or not chosen.size, best, chosen))
        if finished:
            break
        used[chosen] = True
        X = np.zeros((n, chosen.size), dtype)
        X[chosen, range(chosen.size)] = 1
    return best
