"""Counts of values and of intervals."""

from __future__ import annotations

import numpy as np

from ali.arrays.row_blocks import replied
from ali.blocks import Array, require
from ali.interface import Context, routine
from ali.linalg.collectives import sum_over_ranks, tree_reduce
from mpi_workers.matrix.dist_matrix import DistMatrix


@routine("counts")
def bincount(
    ctx: Context, A: DistMatrix, weights: DistMatrix | None = None, minlength: int = 0
) -> DistMatrix:
    """How often each number from 0 to the largest one occurs.

    Parameters
    ----------
    A : vector of integers
        At least 0.
    weights : vector, optional
        Added in place of 1.
    minlength : int
        Of the result, at least.

    Returns
    -------
    counts : vector of int64; of weights float64

    Raises
    ------
    ShapeError
        If A is not a vector, or the weights have another length.
    DtypeError
        If A is not of integers, or the weights are complex.
    BadArgumentError
        If A has a negative number.

    Notes
    -----
    Every rank counts its elements in an array of the length of the result; those are summed.
    """
    require(
        A.ndim == 1,
        "ShapeError",
        f"bincount: the array has shape {A.array_shape}; it must be a vector",
    )
    require(
        A.dtype.kind in "bi",
        "DtypeError",
        f"bincount: elements are {A.dtype}; they must be integers",
    )
    mine, weight = _with_weights(ctx, "bincount", A, weights)
    mine = mine.astype(np.int64, copy=False)
    ends = np.array([mine.min(initial=0), -mine.max(initial=-1)])
    ends = tree_reduce(ctx.comm, range(ctx.size), ends, np.minimum)
    require(ends[0] >= 0, "BadArgumentError", f"bincount: element {ends[0]} is negative")
    counts = np.bincount(
        mine, weight, max(minlength, 1 - int(ends[1])) if ends[1] < 1 else minlength
    )
    return replied(ctx, ctx.new_replicated(sum_over_ranks(ctx.comm, counts), "VC_STAR"))


@routine("counts")
def histogram(
    ctx: Context,
    A: DistMatrix,
    edges: DistMatrix,
    bins: int = 0,
    weights: DistMatrix | None = None,
) -> DistMatrix:
    """How many elements are in each interval.

    Parameters
    ----------
    A : array, real
    edges : vector
        Of the intervals, ascending; half-open but for the last one.
    bins : int
        Above 0: that many intervals of one length between two edges.
    weights : array of A's shape, optional
        Added in place of 1.

    Returns
    -------
    counts : vector of int64; of weights float64

    Raises
    ------
    ShapeError
        If the weights have another shape.

    Notes
    -----
    One pass; the counts of all ranks are summed.
    """
    mine, weight = _with_weights(ctx, "histogram", A, weights)
    limits = ctx.to_layout(edges, "STAR_STAR").local.reshape(-1)
    if bins:
        counts, _ = np.histogram(mine, bins, (limits[0], limits[-1]), weights=weight)
    else:
        counts, _ = np.histogram(mine, limits, weights=weight)
    return ctx.new_replicated(sum_over_ranks(ctx.comm, counts))


def _with_weights(
    ctx: Context, name: str, A: DistMatrix, weights: DistMatrix | None
) -> tuple[Array, Array | None]:
    """This rank's elements, each on one rank only, and their weights."""
    if any(len(group) > 1 for group in A.distribution.owners()):
        A = ctx.to_layout(A, "VC_STAR")
    mine = A.local.reshape(-1, order="F")
    if weights is None:
        return mine, None
    require(
        weights.array_shape == A.array_shape,
        "ShapeError",
        f"{name}: weights have shape {weights.array_shape}; they must have {A.array_shape}",
    )
    require(
        weights.dtype.kind != "c", "DtypeError", f"{name}: weights are complex; they must be real"
    )
    return mine, ctx.to_layout(weights, A.layout).local.reshape(-1, order="F").astype(np.float64)
