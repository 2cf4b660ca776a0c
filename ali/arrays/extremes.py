"""Products, places of extreme elements, and reductions that leave out nan.

All have the signature of the reductions of linalg, ``(ctx, A, axis)``; `reduce` dispatches to them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from ali.arrays.rearranging import check_indices
from ali.blocks import CHUNK, Array, block, panels
from ali.interface import Context
from ali.linalg.collectives import ranks_sharing, tree_reduce
from ali.linalg.reductions import (
    LARGE,
    SUPPORTED,
    Measure,
    accumulator,
    deviation,
    extreme,
    join_moments,
    mean,
    moments,
    reduce_matrix,
    result_matrix,
    sum_dtype,
)
from mpi_workers.matrix import copy_kernels
from mpi_workers.matrix.dist_matrix import DistMatrix
from mpi_workers.matrix.layout import distributions, sibling

NARROW = 64  # columns: with fewer, C order is quicker for all dtypes
Reduction = Callable[[Context, DistMatrix, int | None], DistMatrix]


def prod(ctx: Context, A: DistMatrix, axis: int | None = None) -> DistMatrix:
    """Products; int64 for integers, computed in double precision. One pass; words as `sum`."""
    return _folded(ctx, A, axis, np.multiply, skip=False)


def nanprod(ctx: Context, A: DistMatrix, axis: int | None = None) -> DistMatrix:
    """Products without nan. As `prod`."""
    return _folded(ctx, A, axis, np.multiply, skip=True)


def nansum(ctx: Context, A: DistMatrix, axis: int | None = None) -> DistMatrix:
    """Sums without nan; int64 for integers. One pass; words as `sum`."""
    return _folded(ctx, A, axis, np.add, skip=True)


def _folded(
    ctx: Context, A: DistMatrix, axis: int | None, function: np.ufunc, skip: bool
) -> DistMatrix:
    wide = accumulator(A.dtype)

    def measure(part: Array, along: int | None) -> Array:
        if skip:
            part = np.where(np.isnan(part), function.identity, part)
        return np.asarray(function.reduce(part, axis=along, dtype=wide)).reshape(1, -1)

    nothing = np.full((1, 1), function.identity, wide)
    folded = Measure(measure, nothing, function, LARGE)
    values, layout, shape = reduce_matrix(ctx, A, axis, folded)
    return result_matrix(ctx, values, sum_dtype(A.dtype), layout, shape)


def nanmin(ctx: Context, A: DistMatrix, axis: int | None = None) -> DistMatrix:
    """Smallest elements, nan only where there is nothing else. One pass; words as `sum`."""
    return _not_all_nan(ctx, extreme(ctx, A, axis, np.fmin))


def nanmax(ctx: Context, A: DistMatrix, axis: int | None = None) -> DistMatrix:
    """Largest elements, nan only where there is nothing else. One pass; words as `sum`."""
    return _not_all_nan(ctx, extreme(ctx, A, axis, np.fmax))


def _not_all_nan(ctx: Context, R: DistMatrix) -> DistMatrix:
    if np.isnan(R.local).any():
        ctx.warn_of_slice("All-NaN slice encountered")
    return R


def nanmean(ctx: Context, A: DistMatrix, axis: int | None = None) -> DistMatrix:
    """Means without nan; float64 for integers.

    One pass in double precision; where one of the means is nan, another with twice the words.
    """
    R = mean(ctx, A, axis)
    if not ctx.comm.allreduce(int(np.isnan(R.local).any())):
        return R
    values, layout, shape = reduce_matrix(ctx, A, axis, _nan_measure(A.dtype))
    if not values[0].all():
        ctx.warn_of_slice("Mean of empty slice")
    kind = np.dtype(np.float64) if A.dtype.kind in "biu" else A.dtype
    return result_matrix(ctx, np.where(values[0] == 0, np.nan, values[1]), kind, layout, shape)


def nanvar(ctx: Context, A: DistMatrix, axis: int | None = None, ddof: int = 0) -> DistMatrix:
    """Variances without nan, as accurate as `var`; nan where the count is not above `ddof`."""
    return deviation(ctx, A, axis, ddof, _nan_measure(A.dtype), root=False, beyond=np.nan)


def nanstd(ctx: Context, A: DistMatrix, axis: int | None = None, ddof: int = 0) -> DistMatrix:
    """Standard deviations without nan, see `nanvar`."""
    return deviation(ctx, A, axis, ddof, _nan_measure(A.dtype), root=True, beyond=np.nan)


def _nan_measure(dtype: np.dtype[Any]) -> Measure:
    """As `moment_measure`, without nan."""
    wide = np.dtype(np.complex128 if dtype.kind == "c" else np.float64)

    def measure(part: Array, along: int | None) -> Array:
        there = ~np.isnan(part)
        count = there.sum(axis=along, keepdims=True)
        some = np.maximum(count, 1)
        part = np.where(there, part, 0).astype(wide, copy=False)
        mean = part.sum(axis=along, keepdims=True) / some
        apart = np.where(there, part - mean, 0)
        squares = (apart.real**2 + apart.imag**2).sum(axis=along, keepdims=True)
        return moments(count, mean, squares, apart.sum(axis=along, keepdims=True) / some)

    return Measure(measure, np.zeros((4, 1), wide), join_moments)


# --- places of extreme elements ---------------------------------------------------------


def argmin(ctx: Context, A: DistMatrix, axis: int | None = None) -> DistMatrix:
    """Index of the first smallest element, or of the first nan; as `argmax`."""
    return _place(ctx, A, axis, np.argmin)


def argmax(ctx: Context, A: DistMatrix, axis: int | None = None) -> DistMatrix:
    """Index of the first largest element, or of the first nan; along axis None in C order.

    One pass. Ranks combine an element and its index for each result up a tree. Memory: a piece of 1
    MiB and, for each result (axis None: each row or column, whichever are fewer), some numbers.
    """
    return _place(ctx, A, axis, np.argmax)


def _place(
    ctx: Context, A: DistMatrix, axis: int | None, function: Callable[..., Array]
) -> DistMatrix:
    if not all(dist in SUPPORTED for dist in distributions(A.layout)):
        A = ctx.to_layout(A, "VC_STAR")
    dists, local = distributions(A.layout), block(A)
    tall = local.shape[0] >= local.shape[1]  # fewer results to compare
    along = (0 if tall else 1) if axis is None else axis
    check_indices(ctx, local.shape[1 - along])
    if local.size:
        found, values = _places(function, local, along)
        index = _indices(A, along, found)
        if axis is None:
            others = _indices(A, 1 - along, np.arange(len(found)))
            rows, cols = (index, others) if along == 0 else (others, index)
            index = rows * A.shape[1] + cols
    else:
        values = np.zeros(local.shape[1 - along], A.dtype)
        index = np.full(len(values), -1, np.int64)
    better = np.greater if function is np.argmax else np.less
    if axis is None:
        values, index = _best(values, index, better)
    packed = _packed(values, index)
    kind = A.dtype
    count = len(index)

    def join(a: Array, b: Array) -> Array:
        (x, i), (y, j) = (_unpacked(one, kind, count) for one in (a, b))
        found = _better(y, j, x, i, better)
        return _packed(np.where(found, y, x), np.where(found, j, i))

    for dist, place in zip(dists, (0, 1), strict=True):
        if axis in (None, place):
            group = ranks_sharing(dist, ctx.grid, ctx.rank)
            packed = tree_reduce(ctx.comm, group, packed, join)
    _, index = _unpacked(packed, kind, count)
    layout, shape = {
        None: ("STAR_STAR", (1, 1)),
        0: (sibling(A.layout, "STAR", dists[1]), (1, A.shape[1])),
        1: (sibling(A.layout, dists[0], "STAR"), (A.shape[0], 1)),
    }[axis]
    return result_matrix(ctx, index, np.int64, layout, shape)


def _indices(A: DistMatrix, axis: int, positions: Array) -> Array:
    """Indices along an axis of positions in this rank's part: an array of all would be large."""
    both = A.distribution.runs(A.rank)
    assert both is not None
    runs = both[axis]
    run, place = np.divmod(positions, runs.width)
    return np.asarray(runs.first + run * runs.period + place)


def _places(function: Callable[..., Array], local: Array, along: int) -> tuple[Array, Array]:
    """Indices and extreme elements along an axis.

    Along rows in pieces in C order, which stay in the cache: several times faster.
    """
    if along == 0:
        found = function(local, axis=0)
        return found, local[found, np.arange(local.shape[1])]
    if local.dtype.kind in "iub" and local.itemsize == 1 and local.shape[1] >= NARROW:
        return _places_of_bytes(function, local)
    found, values = np.empty(len(local), np.int64), np.empty(len(local), local.dtype)
    better = np.greater if function is np.argmax else np.less
    width = min(local.shape[1], LARGE // (64 * local.itemsize))
    height = min(len(local), max(64, CHUNK // (width * local.itemsize)))
    room = np.empty((height, width), local.dtype)
    for part in panels(len(local), height):
        for across in panels(local.shape[1], width):
            piece = local[part, across]
            rows = room[: piece.shape[0], : piece.shape[1]]
            copy_kernels.copy(rows, piece, stream=False)
            place = function(rows, axis=1)
            value = rows[np.arange(len(rows)), place]
            place += across.start
            if across.start:
                ahead = _better(value, place, values[part], found[part], better)
                value = np.where(ahead, value, values[part])
                place = np.where(ahead, place, found[part])
            found[part], values[part] = place, value
    return found, values


def _places_of_bytes(function: Callable[..., Array], local: Array) -> tuple[Array, Array]:
    """The same along rows of integers of one byte: C order would cost more than vectors gain.

    First which of about sqrt(n) blocks of columns has a row's element, then which of its columns.
    """
    largest = function is np.argmax
    best, better = (np.maximum, np.greater) if largest else (np.minimum, np.less)
    found, values = np.empty(len(local), np.int64), np.empty(len(local), local.dtype)
    n = local.shape[1]
    width = math.isqrt(n)
    for part in panels(len(local), CHUNK // 64):
        rows = local[part]
        first = np.zeros(len(rows), np.int64)
        top = best.reduce(rows[:, :width], axis=1)
        for across in panels(n - width, width):
            value = best.reduce(rows[:, across.start + width : across.stop + width], axis=1)
            ahead = better(value, top)
            np.copyto(top, value, where=ahead)
            np.copyto(first, across.start + width, where=ahead)
        np.minimum(first, n - width, out=first)  # the last block may have fewer columns
        place = function(rows[np.arange(len(rows))[:, None], first[:, None] + range(width)], axis=1)
        found[part], values[part] = first + place, top
    return found, values


def _better(y: Array, j: Array, x: Array, i: Array, better: np.ufunc) -> Array:
    """Where (value y, index j) comes before (x, i): nan first, then larger, then earlier."""
    no_x, no_y = np.isnan(x), np.isnan(y)
    with np.errstate(invalid="ignore"):  # of complex numbers with nan
        ahead = (no_y & ~no_x) | (~no_x & better(y, x))
    equal = (no_x & no_y) | (x == y)
    found: Array = (j >= 0) & ((i < 0) | ahead | (equal & (j < i)))
    return found


def _best(values: Array, index: Array, better: np.ufunc) -> tuple[Array, Array]:
    """The first of several, in pairs."""
    while len(values) > 1:
        if len(values) % 2:
            values, index = np.append(values, values[-1:]), np.append(index, index[-1])
        (x, y), (i, j) = (np.split(one, 2) for one in (values, index))
        found = _better(y, j, x, i, better)
        values, index = np.where(found, y, x), np.where(found, j, i)
    if not len(values):
        return np.zeros(1, values.dtype), np.full(1, -1, np.int64)
    return values, index


def _packed(values: Array, index: Array) -> Array:
    return np.concatenate([np.ascontiguousarray(x).view(np.uint8) for x in (values, index)])


def _unpacked(packed: Array, kind: np.dtype[np.generic], count: int) -> tuple[Array, Array]:
    cut = kind.itemsize * count
    return packed[:cut].copy().view(kind), packed[cut:].copy().view(np.int64)


REDUCTIONS: dict[str, Reduction] = {
    "prod": prod, "nanprod": nanprod, "nansum": nansum, "nanmin": nanmin, "nanmax": nanmax,
    "nanmean": nanmean, "nanvar": nanvar, "nanstd": nanstd, "argmin": argmin, "argmax": argmax,
}  # fmt: skip
NEED_ELEMENTS = ("nanmin", "nanmax", "argmin", "argmax")
