"""Rows, columns or all of a matrix reduced to a number each.

A reduction is a `measure` of a piece and a `join` of two measures. Pieces have the size of a
cache, ranks join theirs in a tree. A measure is a small array of one or more rows (a count, a
mean, ...) with a column for each number that is wanted.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ali.blocks import CHUNK, Array, block, panels, require
from ali.interface import Context
from ali.linalg.collectives import Join, ranks_sharing, tree_reduce
from mpi_workers.matrix.dist_matrix import DistMatrix

Measure = Callable[[Array, int | None], Array]
SPREADS_WHOLE = ("MC", "MR", "VC", "VR", "STAR")  # distributions in which every rank takes part


def check_axis(name: str, axis: int | None) -> None:
    require(
        axis in (None, 0, 1),
        "BadArgumentError",
        f"{name}: axis={axis}; it can be 0 (a number per column), 1 (per row) or None (one)",
    )


def reduce_matrix(
    ctx: Context, A: DistMatrix, axis: int | None, measure: Measure, nothing: Array, join: Join
) -> tuple[Array, str, tuple[int, int]]:
    """Reduce A over its rows (``axis=0``), its columns (1) or both (None). Collective.

    Parameters
    ----------
    measure : callable
        ``measure(piece, axis)`` of a piece that is not empty: shape (parts, numbers).
    nothing : ndarray, shape (parts, 1)
        The measure of no elements.
    join : callable
        Of two measures.

    Returns
    -------
    values : ndarray, shape (parts, numbers)
        For this rank's part of the result.
    layout : str
        Of the result: beside A's parts, so that what was reduced broadcasts without a move.
    shape : (int, int)
        Of the result: (1, n), (m, 1) or (1, 1).
    """
    if not all(dist in SPREADS_WHOLE for dist in A.layout.split("_")):
        A = ctx.to_layout(A, "VC_STAR")
    rows, cols = A.layout.split("_")
    (m, n), local = A.shape, block(A)
    with np.errstate(all="ignore"):
        found = _local(ctx, local, axis, measure, nothing, join)
        if axis != 1:
            found = tree_reduce(ctx.comm, ranks_sharing(rows, ctx.grid, ctx.rank), found, join)
        if axis != 0:
            found = tree_reduce(ctx.comm, ranks_sharing(cols, ctx.grid, ctx.rank), found, join)
    if axis is None:
        return found, "STAR_STAR", (1, 1)
    return (found, f"STAR_{cols}", (1, n)) if axis == 0 else (found, f"{rows}_STAR", (m, 1))


def _local(
    ctx: Context, local: Array, axis: int | None, measure: Measure, nothing: Array, join: Join
) -> Array:
    m, n = local.shape
    length = {0: n, 1: m, None: 1}[axis]
    found = np.repeat(nothing, length, axis=1)
    if not local.size:
        return found
    # Sums along rows are kept for many rows at once: the columns are what lies together.
    tall = CHUNK // local.itemsize // (8 if axis == 1 else 1)
    height = min(m, tall)
    width = max(1, CHUNK // (height * local.itemsize))
    for down in panels(m, height):
        ctx.check()
        for across in panels(n, width):
            part = measure(local[down, across], axis)
            place = {0: across, 1: down, None: slice(0, 1)}[axis]
            first = down.start == 0 if axis == 0 else across.start == 0
            if axis is None:
                first = first and down.start == 0
            found[:, place] = part if first else join(found[:, place], part)
    return found


def result_matrix(
    ctx: Context, values: Array, dtype: Any, layout: str, shape: tuple[int, int]
) -> DistMatrix:
    """The result, from the numbers of this rank's part."""
    R = ctx.empty(shape, dtype, layout)
    if R.local.size:
        with np.errstate(all="ignore"):
            R.local[...] = values.reshape(R.local.shape)
    return R


def accumulator(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """In what numbers of this dtype are added up: the widest of their kind."""
    return np.dtype({"i": np.int64, "f": np.float64, "c": np.complex128}[dtype.kind])


def sum_measure(dtype: np.dtype[Any], absolute: bool = False) -> tuple[Measure, Array]:
    """The measure that adds up elements, or absolute values."""
    real = np.dtype(np.float64) if absolute else accumulator(dtype)

    def measure(part: Array, axis: int | None) -> Array:
        if absolute:
            part = np.abs(part.astype(np.float64) if dtype.kind == "i" else part)
        return np.asarray(np.add.reduce(part, axis=axis, dtype=real)).reshape(1, -1)

    return measure, np.zeros((1, 1), real)


def extreme_measure(dtype: np.dtype[Any], largest: bool) -> tuple[Measure, Array, Join]:
    """The measure that takes the smallest or the largest; NaN, if there is one."""
    function = np.maximum if largest else np.minimum
    worst: Any
    if dtype.kind == "i":
        worst = np.iinfo(dtype).min if largest else np.iinfo(dtype).max
    else:
        worst = -np.inf if largest else np.inf
        worst = complex(worst, worst) if dtype.kind == "c" else worst

    def measure(part: Array, axis: int | None) -> Array:
        return np.asarray(function.reduce(part, axis=axis)).reshape(1, -1)

    return measure, np.full((1, 1), worst, dtype), function


def moment_measure(dtype: np.dtype[Any]) -> tuple[Measure, Array]:
    """Count, mean, and sum of squared distances from the mean; see `join_moments`."""
    wide = np.dtype(np.complex128 if dtype.kind == "c" else np.float64)

    def measure(part: Array, axis: int | None) -> Array:
        part = part.astype(wide)  # a copy, in the cache
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
    apart = np.where((a[0] == 0) | (b[0] == 0), 0, b[1] - a[1])  # of nothing there is no mean
    mean = a[1] + apart * share
    # Of inf and a number the mean is inf, and not nan.
    mean = np.where(np.isfinite(mean), mean, a[1] * (1 - share) + b[1] * share)
    mean = np.where(a[0] == 0, b[1], mean)
    squares = apart.real**2 + apart.imag**2
    return np.stack([count, mean, a[2] + b[2] + squares * a[0] * share])
