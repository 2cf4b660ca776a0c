"""Reductions of rows, columns or all elements of a matrix, block by block.

A reduction consists of a `measure` of a block and a `join` of two measures. Each rank measures its
part block by block and joins the results; ranks join theirs in a tree. A measure is a small array
with one or more rows (for example count, mean and sum of squares) and one column for each number of
the result.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ali.blocks import CHUNK, Array, block, panels, require
from ali.interface import Context
from ali.linalg.collectives import Join, ranks_sharing, tree_reduce
from mpi_workers.matrix.dist_matrix import DistMatrix
from mpi_workers.matrix.layout import distributions, sibling

Measure = Callable[[Array, int | None], Array]
SUPPORTED = ("MC", "MR", "VC", "VR", "STAR")  # distributions that give indices to every rank
SEGMENT = 1024  # elements of a column that einsum adds; sums of segments are added pairwise


def check_axis(name: str, axis: int | None) -> None:
    require(
        axis in (None, 0, 1),
        "BadArgumentError",
        f"{name}: axis must be 0 (per column), 1 (per row) or None; got {axis}",
    )


def reduce_matrix(
    ctx: Context,
    A: DistMatrix,
    axis: int | None,
    measure: Measure,
    nothing: Array,
    join: Join,
    block_nbytes: int = 0,
) -> tuple[Array, str, tuple[int, int]]:
    """Reduce A over its rows (``axis=0``), its columns (1) or both (None). Collective.

    Parameters
    ----------
    measure : callable
        ``measure(block, axis)`` of a block that is not empty; shape (rows, numbers).
    nothing : ndarray, shape (rows, 1)
        The measure of no elements.
    join : callable
        Of two measures.
    block_nbytes : int
        Size of a block; 0 is `CHUNK`, which stays in a core's cache.

    Returns
    -------
    values : ndarray, shape (rows, numbers)
        For this rank's part of the result.
    layout : str
        Of the result: it broadcasts against A without communication.
    shape : (int, int)
        Of the result: (1, n), (m, 1) or (1, 1).
    """
    if not all(dist in SUPPORTED for dist in distributions(A.layout)):
        A = ctx.to_layout(A, "VC_STAR")
    rows, cols = distributions(A.layout)
    (m, n), local = A.shape, block(A)
    with np.errstate(all="ignore"):
        found = _local(ctx, local, axis, measure, nothing, join, block_nbytes or CHUNK)
        if axis != 1:
            found = tree_reduce(ctx.comm, ranks_sharing(rows, ctx.grid, ctx.rank), found, join)
        if axis != 0:
            found = tree_reduce(ctx.comm, ranks_sharing(cols, ctx.grid, ctx.rank), found, join)
    if axis is None:
        return found, "STAR_STAR", (1, 1)
    if axis == 0:
        return found, sibling(A.layout, "STAR", cols), (1, n)
    return found, sibling(A.layout, rows, "STAR"), (m, 1)


def _local(
    ctx: Context,
    local: Array,
    axis: int | None,
    measure: Measure,
    nothing: Array,
    join: Join,
    block_nbytes: int,
) -> Array:
    m, n = local.shape
    length = {0: n, 1: m, None: 1}[axis]
    found = np.repeat(nothing, length, axis=1)
    if not local.size:
        return found
    # Columns are contiguous: blocks are as tall as possible. With axis 1 the results, one for
    # each row, need room in the cache as well.
    tall = max(1, block_nbytes // local.itemsize // (8 if axis == 1 else 1))
    height = min(m, tall)
    width = max(1, block_nbytes // (height * local.itemsize))
    for down in panels(m, height):
        ctx.check()
        for across in panels(n, width):
            numbers = measure(local[down, across], axis)
            place = {0: across, 1: down, None: slice(0, 1)}[axis]
            first = down.start == 0 if axis == 0 else across.start == 0
            if axis is None:
                first = first and down.start == 0
            found[:, place] = numbers if first else join(found[:, place], numbers)
    return found


def result_matrix(
    ctx: Context, values: Array, dtype: Any, layout: str, shape: tuple[int, int]
) -> DistMatrix:
    """A matrix from this rank's part of the numbers."""
    R = ctx.empty(shape, dtype, layout)
    if R.local.size:
        with np.errstate(all="ignore"):
            R.local[...] = values.reshape(R.local.shape)
    return R


def accumulator(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """The dtype in which numbers of `dtype` are added: the widest of their kind."""
    return np.dtype({"b": np.int64, "i": np.int64, "f": np.float64, "c": np.complex128}[dtype.kind])


def sum_measure(dtype: np.dtype[Any], absolute: bool = False) -> tuple[Measure, Array]:
    """The measure that adds elements, or absolute values of elements."""
    real = np.dtype(np.float64) if absolute else accumulator(dtype)

    def measure(part: Array, axis: int | None) -> Array:
        if absolute:
            part = np.abs(part.astype(np.float64) if dtype.kind in "bi" else part)
        if axis == 1 or part.dtype != np.float64:
            return np.asarray(np.add.reduce(part, axis=axis, dtype=real)).reshape(1, -1)
        # einsum takes a third of the time of add.reduce and 0.83 of BLAS's, but it keeps eight
        # partial sums, not pairs: of short segments. All are read in one pass through memory.
        (m, n), count = part.shape, -(-len(part) // SEGMENT)
        length = m // count
        segments = part[: count * length].T.reshape(n, count, length)  # a view: an axis is split
        sums = np.vstack([np.einsum("jki->kj", segments), part[count * length :]])
        return np.asarray(np.add.reduce(sums, axis=axis)).reshape(1, -1)

    return measure, np.zeros((1, 1), real)


def extreme_measure(dtype: np.dtype[Any], largest: bool) -> tuple[Measure, Array, Join]:
    """The measure that takes the smallest or largest element; NaN if there is one."""
    function = np.maximum if largest else np.minimum
    worst: Any
    if dtype.kind == "b":
        worst = not largest
    elif dtype.kind == "i":
        worst = np.iinfo(dtype).min if largest else np.iinfo(dtype).max
    else:
        worst = -np.inf if largest else np.inf
        worst = complex(worst, worst) if dtype.kind == "c" else worst

    def measure(part: Array, axis: int | None) -> Array:
        return np.asarray(function.reduce(part, axis=axis)).reshape(1, -1)

    return measure, np.full((1, 1), worst, dtype), function


def moment_measure(dtype: np.dtype[Any]) -> tuple[Measure, Array]:
    """The measure of count, mean and sum of squared deviations; see `join_moments`."""
    wide = np.dtype(np.complex128 if dtype.kind == "c" else np.float64)

    def measure(part: Array, axis: int | None) -> Array:
        part = part.astype(wide)  # a copy that stays in the cache
        mean = part.mean(axis=axis, keepdims=True)
        part -= mean
        squares = part.real**2
        if dtype.kind == "c":
            squares += part.imag**2
        mean = mean.reshape(1, -1)
        squared = np.asarray(squares.sum(axis=axis)).reshape(1, -1)
        count = np.full_like(mean, part.size // mean.size)
        return np.concatenate([count, mean, squared])

    return measure, np.zeros((3, 1), wide)


def join_moments(a: Array, b: Array) -> Array:
    """Moments of a union. Source: Chan, Golub, LeVeque, Am. Statistician 37(3), 1983."""
    count = a[0] + b[0]
    share = b[0] / np.maximum(count.real, 1)
    apart = np.where((a[0] == 0) | (b[0] == 0), 0, b[1] - a[1])  # an empty set has no mean
    mean = a[1] + apart * share
    # The mean of inf and a number is inf, not nan.
    mean = np.where(np.isfinite(mean), mean, a[1] * (1 - share) + b[1] * share)
    mean = np.where(a[0] == 0, b[1], mean)
    squares = apart.real**2 + apart.imag**2
    return np.stack([count, mean, a[2] + b[2] + squares * a[0] * share])
