"""Sums, means, extremes, norms, column statistics: reductions block by block, then over ranks.

``axis=0`` gives one number for each column, a (1, n) matrix; 1 gives one for each row, (m, 1); None
gives one number, (1, 1). The layout of the result matches A's (for A in VC_STAR: a row is on every
rank, a column is distributed as A's rows), so that A minus its mean needs no communication.

A reduction consists of a `measure` of a block and a `join` of two measures. Each rank measures its
part block by block and joins the results; ranks join theirs in a tree. A measure is a small array
with one or more rows (for example count, mean and sum of squares) and one column for each number of
the result.
"""

from __future__ import annotations

import builtins
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from ali.blocks import CHUNK, Array, block, frobenius, panels, require, require_choice, require_real
from ali.interface import Context, routine
from ali.linalg.collectives import Join, ranks_sharing, tree_reduce
from ali.linalg.singular import singular_values
from mpi_workers.matrix.dist_matrix import DistMatrix
from mpi_workers.matrix.layout import distributions, sibling

SUPPORTED = ("MC", "MR", "VC", "VR", "STAR")  # distributions that give indices to every rank
# 4 MiB: pieces for measures of one pass. Smaller ones cost more in calls than the caches save.
LARGE = 4 << 20
SEGMENT = 1024  # elements of a column that einsum adds; sums of segments are added pairwise


class Measure(NamedTuple):
    """The computation of a reduction on each block, and how the numbers of blocks are joined.

    Attributes
    ----------
    of : callable
        ``of(block, axis)`` of a block that is not empty; shape (rows, numbers).
    nothing : ndarray, shape (rows, 1)
        The measure of no elements.
    join : callable
        Of two measures.
    block_nbytes : int
        Size of a block; 0 is `CHUNK`, which stays in a core's cache.
    """

    of: Callable[[Array, int | None], Array]
    nothing: Array
    join: Join
    block_nbytes: int = 0


def check_axis(name: str, axis: int | None) -> None:
    require(
        axis in (None, 0, 1),
        "BadArgumentError",
        f"{name}: axis must be 0 (per column), 1 (per row) or None; got {axis}",
    )


def reduce_matrix(
    ctx: Context, A: DistMatrix, axis: int | None, measure: Measure
) -> tuple[Array, str, tuple[int, int]]:
    """Reduce A over its rows (``axis=0``), its columns (1) or both (None). Collective.

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
    (m, n), local, join = A.shape, block(A), measure.join
    with np.errstate(all="ignore"):
        found = _local(ctx, local, axis, measure)
        if axis != 1:
            found = tree_reduce(ctx.comm, ranks_sharing(rows, ctx.grid, ctx.rank), found, join)
        if axis != 0:
            found = tree_reduce(ctx.comm, ranks_sharing(cols, ctx.grid, ctx.rank), found, join)
    if axis is None:
        return found, "STAR_STAR", (1, 1)
    if axis == 0:
        return found, sibling(A.layout, "STAR", cols), (1, n)
    return found, sibling(A.layout, rows, "STAR"), (m, 1)


def _local(ctx: Context, local: Array, axis: int | None, measure: Measure) -> Array:
    (m, n), nothing = local.shape, measure.nothing
    block_nbytes = measure.block_nbytes or CHUNK
    length = {0: n, 1: m, None: 1}[axis]
    found = np.repeat(nothing, length, axis=1)
    if not local.size:
        return found
    # Columns are contiguous: blocks are as tall as possible. With axis 1 the results, one for
    # each row, need room in the cache as well.
    tall = builtins.max(1, block_nbytes // local.itemsize // (8 if axis == 1 else 1))
    height = builtins.min(m, tall)
    width = builtins.max(1, block_nbytes // (height * local.itemsize))
    for down in panels(m, height):
        ctx.check()
        for across in panels(n, width):
            part = local[down, across]
            numbers = (
                measure.of(part, axis) if part.size else nothing
            )  # of a mask that selects none
            place = {0: across, 1: down, None: slice(0, 1)}[axis]
            first = down.start == 0 if axis == 0 else across.start == 0
            if axis is None:
                first = first and down.start == 0
            found[:, place] = numbers if first else measure.join(found[:, place], numbers)
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
    widest = {"b": np.int64, "i": np.int64, "u": np.uint64, "f": np.float64, "c": np.complex128}
    return np.dtype(widest[dtype.kind])


def sum_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """The dtype of a sum or product, as in NumPy."""
    return accumulator(dtype) if dtype.kind in "biu" else dtype


def _segment_sums(part: Array, squares: bool = False) -> Array:
    """Sums of columns, of their squares if `squares`, in pieces; float64, shape (pieces, n).

    einsum takes a third of the time of add.reduce and 0.83 of BLAS's, but it keeps eight partial
    sums, not pairs: of short segments. All are read in one pass through memory.
    """
    (m, n), count = part.shape, -(-len(part) // SEGMENT)
    length = m // count
    segments = part[: count * length].T.reshape(n, count, length)  # a view: an axis is split
    rest = part[count * length :]
    if squares:
        return np.vstack([np.einsum("jki,jki->kj", segments, segments), rest**2])
    return np.vstack([np.einsum("jki->kj", segments), rest])


def sum_measure(dtype: np.dtype[Any], absolute: bool = False) -> Measure:
    """The measure that adds elements, or absolute values of elements."""
    real = np.dtype(np.float64) if absolute else accumulator(dtype)

    def measure(part: Array, axis: int | None) -> Array:
        if absolute:
            part = np.abs(part.astype(np.float64) if dtype.kind in "biu" else part)
        if part.dtype == np.float64 and axis == 1:
            return (part @ np.ones(part.shape[1])).reshape(1, -1)  # half the time of add.reduce
        if part.dtype != np.float64:
            return np.asarray(np.add.reduce(part, axis=axis, dtype=real)).reshape(1, -1)
        return np.asarray(np.add.reduce(_segment_sums(part), axis=axis)).reshape(1, -1)

    return Measure(measure, np.zeros((1, 1), real), np.add, LARGE)


def extreme_measure(dtype: np.dtype[Any], function: np.ufunc) -> Measure:
    """The measure that takes the smallest or largest element.

    `function`: `minimum` or `maximum`, which give NaN if there is one; `fmin` or `fmax`, which
    give it only of nothing else.
    """
    largest = function in (np.maximum, np.fmax)
    worst: Any
    if dtype.kind == "b":
        worst = not largest
    elif dtype.kind in "iu":
        worst = np.iinfo(dtype).min if largest else np.iinfo(dtype).max
    elif function in (np.fmin, np.fmax):
        worst = np.nan
    else:
        worst = -np.inf if largest else np.inf
        worst = complex(worst, worst) if dtype.kind == "c" else worst

    def measure(part: Array, axis: int | None) -> Array:
        return np.asarray(function.reduce(part, axis=axis)).reshape(1, -1)

    return Measure(measure, np.full((1, 1), worst, dtype), function)


def moment_measure(dtype: np.dtype[Any]) -> Measure:
    """The measure of count, mean, sum of squared deviations and rest of the mean.

    The mean is the sum of the second and the fourth row: of a mean much larger than the deviation,
    float64 has too few digits for the distance to the mean of other elements; see `join_moments`.
    """
    wide = np.dtype(np.complex128 if dtype.kind == "c" else np.float64)

    def measure(part: Array, axis: int | None) -> Array:
        if axis == 1 or wide == np.complex128:
            mean = part.mean(axis=axis, keepdims=True, dtype=wide)
            part = part - mean  # a copy that stays in the cache
            rest = part.mean(axis=axis)
            squares = part.real**2
            if wide == np.complex128:
                squares += part.imag**2
            squared = squares.sum(axis=axis)
        else:
            part = part.astype(wide)
            count = part.shape[0] if axis == 0 else part.size
            mean = np.add.reduce(_segment_sums(part), axis=axis, keepdims=True) / count
            part -= mean
            rest = np.add.reduce(_segment_sums(part), axis=axis) / count
            squared = np.add.reduce(_segment_sums(part, squares=True), axis=axis)
        return moments(part.size // mean.size, mean, squared, rest)

    return Measure(measure, np.zeros((4, 1), wide), join_moments)


def moments(count: Any, mean: Array, squares: Any, rest: Any) -> Array:
    """A measure from counts, approximate means, squares of distances to them and their mean."""
    mean = mean.reshape(-1)
    count, squares, rest = (
        np.broadcast_to(np.ravel(x), mean.shape) for x in (count, squares, rest)
    )
    rest = np.where(np.isfinite(mean), rest, 0)
    return np.stack([count, mean, squares - count * abs(rest) ** 2, rest])


def join_moments(a: Array, b: Array) -> Array:
    """Moments of a union. Source: Chan, Golub, LeVeque, Am. Statistician 37(3), 1983."""
    count = a[0] + b[0]
    share = b[0] / np.maximum(count.real, 1)
    apart = (b[1] - a[1]) + (b[3] - a[3])  # the first difference is exact if the means are close
    apart = np.where((a[0] == 0) | (b[0] == 0), 0, apart)  # an empty set has no mean
    first = np.where(a[0] == 0, b[1], a[1])
    more = np.where(a[0] == 0, b[3], a[3] + apart * share)
    mean = first + more
    # The mean of inf and a number is inf, not nan.
    finite = np.isfinite(mean)
    mean = np.where(finite, mean, a[1] * (1 - share) + b[1] * share)
    rest = np.where(finite, more - (mean - first), 0)
    squares = a[2] + b[2] + abs(apart) ** 2 * a[0] * share
    return np.stack([count, mean, squares, rest])


NORMS = ("fro", "1", "inf", "2", "nuc", "max")


@routine("R")
def sum(ctx: Context, A: DistMatrix, axis: int | None = None) -> DistMatrix:
    """Sum of each column (``axis=0``), each row (1) or all elements (None).

    Parameters
    ----------
    A : matrix, shape (m, n)
    axis : int, optional

    Returns
    -------
    R : matrix, shape (1, n), (m, 1) or (1, 1)
        In the layout that matches A's (A in VC_STAR: STAR_STAR for axis 0, VC_STAR for 1); (1, 1)
        in STAR_STAR. The dtype of A; int64 for integers, which wraps as NumPy's sum does.

    Raises
    ------
    BadArgumentError
        If axis is not 0, 1 or None.

    Notes
    -----
    ``m n / ranks`` flops in one pass, in double precision: up to 128 elements of a column are
    added one after another, their sums pairwise. Ranks add their sums in a tree: ``2 log2(ranks)``
    messages of the result's local part. MD and CIRC layouts are redistributed to VC_STAR first.

    Error: 0.5 eps, relative to the sum of absolute values. Peak memory: 1.0 times arguments and
    results.
    """
    check_axis("sum", axis)
    values, layout, shape = reduce_matrix(ctx, A, axis, sum_measure(A.dtype))
    return result_matrix(ctx, values, sum_dtype(A.dtype), layout, shape)


@routine("R")
def mean(ctx: Context, A: DistMatrix, axis: int | None = None) -> DistMatrix:
    """Mean of each column (``axis=0``), each row (1) or all elements (None).

    Parameters
    ----------
    A : matrix, shape (m, n)
    axis : int, optional

    Returns
    -------
    R : matrix, shape (1, n), (m, 1) or (1, 1)
        In the layout of `sum`; the dtype of A, float64 for integers.

    Raises
    ------
    BadArgumentError
        If axis is not 0, 1 or None.

    Notes
    -----
    `sum` (of integers in float64), divided by the count.

    Error: 0.5 eps, relative to the largest element. Peak memory: 1.0 times arguments and results.
    """
    check_axis("mean", axis)
    kind = A.dtype if A.dtype.kind not in "biu" else np.dtype(np.float64)
    wide = np.dtype(np.float64) if A.dtype.kind in "biu" else A.dtype  # sums of integers could wrap
    values, layout, shape = reduce_matrix(ctx, A, axis, sum_measure(wide))
    count = {0: A.shape[0], 1: A.shape[1], None: A.shape[0] * A.shape[1]}[axis]
    if not count and values.size:
        ctx.warn_of_slice("Mean of empty slice")
    with np.errstate(all="ignore"):  # a mean of no elements is nan
        found = values / count
    return result_matrix(ctx, found, kind, layout, shape)


@routine("R")
def var(ctx: Context, A: DistMatrix, axis: int | None = None, ddof: int = 0) -> DistMatrix:
    """Variance of each column (``axis=0``), each row (1) or all elements (None).

    Parameters
    ----------
    A : matrix, shape (m, n)
    axis : int, optional
    ddof : int
        The divisor is the count minus ddof: 0 as in NumPy, 1 for the variance of a sample.

    Returns
    -------
    R : matrix, shape (1, n), (m, 1) or (1, 1), real
        In the layout of `sum`; A's precision, float64 for integers. nan or inf where the count is
        not above ddof.

    Raises
    ------
    BadArgumentError
        If axis is not 0, 1 or None, or ddof is negative.

    Notes
    -----
    ``5 m n / ranks`` flops in one pass, in double precision. Each block of 1 MiB is centred on its
    own mean; blocks and ranks are combined by Chan's rule with means of twice the digits, so that a
    mean much larger than the deviation costs none. Four times the words of `sum`. Source: Chan,
    Golub, LeVeque 1983.

    Error: 1 eps, relative to the largest element. Peak memory: 1.2 times arguments and results.
    """
    return _deviation(ctx, "var", A, axis, ddof)


@routine("R")
def std(ctx: Context, A: DistMatrix, axis: int | None = None, ddof: int = 0) -> DistMatrix:
    """Standard deviation of each column (``axis=0``), each row (1) or all elements (None).

    Parameters
    ----------
    A : matrix, shape (m, n)
    axis : int, optional
    ddof : int
        See `var`.

    Returns
    -------
    R : matrix, shape (1, n), (m, 1) or (1, 1), real
        As `var`.

    Raises
    ------
    BadArgumentError
        If axis is not 0, 1 or None, or ddof is negative.

    Notes
    -----
    The square root of `var`, taken in double precision.

    Error: 0.5 eps, relative to the largest element. Peak memory: 1.2 times arguments and results.
    """
    return _deviation(ctx, "std", A, axis, ddof)


@routine("R")
def min(ctx: Context, A: DistMatrix, axis: int | None = None) -> DistMatrix:
    """Smallest element of each column (``axis=0``), each row (1) or all elements (None).

    Parameters
    ----------
    A : matrix, shape (m, n)
        Complex numbers are ordered by real part, then imaginary part.
    axis : int, optional

    Returns
    -------
    R : matrix, shape (1, n), (m, 1) or (1, 1), dtype of A
        In the layout of `sum`; nan where a nan is among the elements.

    Raises
    ------
    BadArgumentError
        If axis is not 0, 1 or None.

    Notes
    -----
    One pass; words as `sum`.

    Error: 0 eps. Peak memory: 1.1 times arguments and results.
    """
    check_axis("min", axis)
    return extreme(ctx, A, axis, np.minimum)


@routine("R")
def max(ctx: Context, A: DistMatrix, axis: int | None = None) -> DistMatrix:
    """Largest element of each column (``axis=0``), each row (1) or all elements (None).

    Parameters
    ----------
    A : matrix, shape (m, n)
        Complex numbers are ordered by real part, then imaginary part.
    axis : int, optional

    Returns
    -------
    R : matrix, shape (1, n), (m, 1) or (1, 1), dtype of A
        In the layout of `sum`; nan where a nan is among the elements.

    Raises
    ------
    BadArgumentError
        If axis is not 0, 1 or None.

    Notes
    -----
    One pass; words as `sum`.

    Error: 0 eps. Peak memory: 1.0 times arguments and results.
    """
    check_axis("max", axis)
    return extreme(ctx, A, axis, np.maximum)


@routine("mean", "std", "min", "max")
def column_stats(
    ctx: Context, A: DistMatrix, ddof: int = 0
) -> tuple[DistMatrix, DistMatrix, DistMatrix, DistMatrix]:
    """Mean, standard deviation, minimum and maximum of every column, in one pass.

    Parameters
    ----------
    A : matrix, shape (m, n), real
    ddof : int
        See `var`.

    Returns
    -------
    mean, std, min, max : matrices, shape (1, n)
        In the layout of `sum`; A's precision, float64 for integers.

    Raises
    ------
    DtypeError
        If A is complex.
    BadArgumentError
        If ddof is negative.

    Notes
    -----
    ``7 m n / ranks`` flops, one tree with messages of ``6 n`` words; as accurate as `var`.

    Error: 0.5 eps, relative to the largest element. Peak memory: 1.2 times arguments and results.
    """
    require_real("column_stats", A=A)
    _check_ddof("column_stats", ddof)
    basic = moment_measure(A.dtype)

    def measure(part: Array, axis: int | None) -> Array:
        ends = [
            np.minimum.reduce(part, axis=axis),
            np.maximum.reduce(part, axis=axis),
        ]
        return np.concatenate([basic.of(part, axis), np.stack(ends).reshape(2, -1)])

    def join(a: Array, b: Array) -> Array:
        ends = [np.minimum(a[4], b[4]), np.maximum(a[5], b[5])]
        return np.concatenate([join_moments(a[:4], b[:4]), np.stack(ends)])

    empty = np.concatenate([basic.nothing, [[np.inf], [-np.inf]]])
    values, layout, shape = reduce_matrix(ctx, A, 0, Measure(measure, empty, join))
    kind = np.dtype(np.float64) if A.dtype.kind in "biu" else A.dtype
    with np.errstate(all="ignore"):
        deviation = np.sqrt(values[2] / np.maximum(values[0] - ddof, 0))
    statistics = (values[1], deviation, values[4], values[5])
    first, second, third, fourth = (result_matrix(ctx, x, kind, layout, shape) for x in statistics)
    return first, second, third, fourth


@routine("norm")
def norm(ctx: Context, A: DistMatrix, ord: str = "fro") -> float:
    """A norm of a matrix, by default the Frobenius norm; without intermediate over- or underflow.

    Parameters
    ----------
    A : matrix, shape (m, n)
        Any dtype and layout. NaN gives nan, else inf gives inf ("2", "nuc": an error).
    ord : str
        "fro": Frobenius; "1", "inf": largest sum of absolute values of a column, of a row;
        "2": largest singular value; "nuc": sum of the singular values; "max": largest absolute
        value (not submultiplicative).

    Returns
    -------
    norm : float
        The same on every rank.

    Raises
    ------
    BadArgumentError
        If `ord` is unknown.
    LinAlgError
        "2" and "nuc": if A contains NaN or infinity.

    Notes
    -----
    "fro": one pass over A in blocks of 1 MiB, in float64; two words from each rank. Source:
    LAPACK's lassq. "1", "inf", "max": one pass, words as `sum`. "2", "nuc": as `svdvals`.

    Error: 2 eps, relative to the norm. Peak memory: 1.1 times arguments and results.
    """
    require_choice("norm", "ord", ord, NORMS)
    if ord == "fro":
        return frobenius(ctx, A)
    if ord in ("2", "nuc"):
        values = singular_values(ctx, "norm", A).astype(np.float64)
        return float(values[:1].sum() if ord == "2" else values.sum())
    if ord == "max":

        def measure(part: Array, axis: int | None) -> Array:
            wide = part.astype(np.float64) if A.dtype.kind in "biu" else part
            return np.asarray(np.abs(wide).max(axis=axis), np.float64).reshape(1, -1)

        largest = Measure(measure, np.zeros((1, 1)), np.maximum)
        found, _, _ = reduce_matrix(ctx, A, None, largest)
        return float(found[0, 0])
    return largest_sum(ctx, A, 0 if ord == "1" else 1)


def largest_sum(ctx: Context, A: DistMatrix, axis: int) -> float:
    """The largest sum of absolute values of a column (``axis=0``) or of a row (1). Collective."""
    values, layout, shape = reduce_matrix(ctx, A, axis, sum_measure(A.dtype, absolute=True))
    sums_of = result_matrix(ctx, values, np.float64, layout, shape)
    largest = extreme(ctx, sums_of, None, np.maximum)
    return float(largest.local[0, 0]) if all(A.shape) else 0.0


def extreme(ctx: Context, A: DistMatrix, axis: int | None, function: np.ufunc) -> DistMatrix:
    """The smallest or largest elements; see `extreme_measure`. Collective."""
    values, layout, shape = reduce_matrix(ctx, A, axis, extreme_measure(A.dtype, function))
    return result_matrix(ctx, values, A.dtype, layout, shape)


def _deviation(ctx: Context, name: str, A: DistMatrix, axis: int | None, ddof: int) -> DistMatrix:
    check_axis(name, axis)
    _check_ddof(name, ddof)
    return deviation(ctx, A, axis, ddof, moment_measure(A.dtype), root=name == "std")


def deviation(
    ctx: Context,
    A: DistMatrix,
    axis: int | None,
    ddof: int,
    measure: Measure,
    root: bool,
    beyond: float = 0,
) -> DistMatrix:
    """Variances, or their roots, of measured moments; `beyond`: the divisor if none is left."""
    values, layout, shape = reduce_matrix(ctx, A, axis, measure)
    left = values[0].real - ddof
    if (left <= 0).any():
        ctx.warn_of_slice("Degrees of freedom <= 0 for slice")
    with np.errstate(all="ignore"):
        found = values[2].real / np.where(left > 0, left, beyond)
    kind = np.dtype(np.float64) if A.dtype.kind in "biu" else A.dtype.type(0).real.dtype
    return result_matrix(ctx, np.sqrt(found) if root else found, kind, layout, shape)


def _check_ddof(name: str, ddof: int) -> None:
    require(ddof >= 0, "BadArgumentError", f"{name}: ddof={ddof}: it must be at least 0")
