"""Sums, means, extremes, norms and column statistics.

``axis=0`` gives one number for each column, a (1, n) matrix; 1 gives one for each row, (m, 1); None
gives one number, (1, 1). The layout of the result matches A's (for A in VC_STAR: a row is on every
rank, a column is distributed as A's rows), so that A minus its mean needs no communication.
"""

from __future__ import annotations

import numpy as np

from ali.blocks import PANEL, Array, frobenius, require, require_choice
from ali.interface import Context, routine
from ali.linalg.block_reduction import (
    Measure,
    check_axis,
    extreme_measure,
    join_moments,
    moment_measure,
    reduce_matrix,
    result_matrix,
    sum_measure,
)
from ali.linalg.singular import singular_values
from mpi_workers.matrix.dist_matrix import DistMatrix

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
    measure, nothing = sum_measure(A.dtype)
    values, layout, shape = reduce_matrix(ctx, A, axis, measure, nothing, np.add, PANEL)
    return result_matrix(ctx, values, np.int64 if A.dtype.kind in "bi" else A.dtype, layout, shape)


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
    kind = A.dtype if A.dtype.kind not in "bi" else np.dtype(np.float64)
    wide = np.dtype(np.float64) if A.dtype.kind in "bi" else A.dtype  # sums of integers could wrap
    measure, nothing = sum_measure(wide)
    values, layout, shape = reduce_matrix(ctx, A, axis, measure, nothing, np.add, PANEL)
    count = {0: A.shape[0], 1: A.shape[1], None: A.shape[0] * A.shape[1]}[axis]
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
    ``4 m n / ranks`` flops in one pass, in double precision. Each block of 1 MiB is centred on its
    own mean; blocks and ranks are combined by Chan's rule, so that a mean much larger than the
    deviation costs no digits. Three times the words of `sum`. Source: Chan, Golub, LeVeque 1983.

    Error: 1 eps, relative to the largest element. Peak memory: 1.2 times arguments and results.
    """
    return _deviation(ctx, "var", A, axis, ddof, root=False)


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
    return _deviation(ctx, "std", A, axis, ddof, root=True)


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
    return _extreme(ctx, "min", A, axis, largest=False)


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
    return _extreme(ctx, "max", A, axis, largest=True)


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
    ``6 m n / ranks`` flops, one tree with messages of ``5 n`` words; as accurate as `var`.

    Error: 0.5 eps, relative to the largest element. Peak memory: 1.2 times arguments and results.
    """
    require(
        A.dtype.kind != "c",
        "DtypeError",
        f"column_stats: A is {A.dtype}, and complex numbers have no order",
    )
    _check_ddof("column_stats", ddof)
    basic, nothing = moment_measure(A.dtype)

    def measure(part: Array, axis: int | None) -> Array:
        ends = [
            np.minimum.reduce(part, axis=axis),
            np.maximum.reduce(part, axis=axis),
        ]
        return np.concatenate([basic(part, axis), np.stack(ends).reshape(2, -1)])

    def join(a: Array, b: Array) -> Array:
        ends = [np.minimum(a[3], b[3]), np.maximum(a[4], b[4])]
        return np.concatenate([join_moments(a[:3], b[:3]), np.stack(ends)])

    empty = np.concatenate([nothing, [[np.inf], [-np.inf]]])
    values, layout, shape = reduce_matrix(ctx, A, 0, measure, empty, join)
    kind = np.dtype(np.float64) if A.dtype.kind in "bi" else A.dtype
    with np.errstate(all="ignore"):
        deviation = np.sqrt(values[2] / np.maximum(values[0] - ddof, 0))
    statistics = (values[1], deviation, values[3], values[4])
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
    RoutineError
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
            wide = part.astype(np.float64) if A.dtype.kind in "bi" else part
            return np.asarray(np.abs(wide).max(axis=axis), np.float64).reshape(1, -1)

        found, _, _ = reduce_matrix(ctx, A, None, measure, np.zeros((1, 1)), np.maximum)
        return float(found[0, 0])
    return largest_sum(ctx, A, 0 if ord == "1" else 1)


def largest_sum(ctx: Context, A: DistMatrix, axis: int) -> float:
    """The largest sum of absolute values of a column (``axis=0``) or of a row (1). Collective."""
    measure, nothing = sum_measure(A.dtype, absolute=True)
    values, layout, shape = reduce_matrix(ctx, A, axis, measure, nothing, np.add, PANEL)
    sums_of = result_matrix(ctx, values, np.float64, layout, shape)
    measure, nothing, join = extreme_measure(np.dtype(np.float64), largest=True)
    found, _, _ = reduce_matrix(ctx, sums_of, None, measure, nothing, join)
    return float(found[0, 0]) if all(A.shape) else 0.0


def _extreme(ctx: Context, name: str, A: DistMatrix, axis: int | None, largest: bool) -> DistMatrix:
    check_axis(name, axis)
    measure, nothing, join = extreme_measure(A.dtype, largest)
    values, layout, shape = reduce_matrix(ctx, A, axis, measure, nothing, join)
    return result_matrix(ctx, values, A.dtype, layout, shape)


def _deviation(
    ctx: Context, name: str, A: DistMatrix, axis: int | None, ddof: int, root: bool
) -> DistMatrix:
    check_axis(name, axis)
    _check_ddof(name, ddof)
    measure: Measure
    measure, nothing = moment_measure(A.dtype)
    values, layout, shape = reduce_matrix(ctx, A, axis, measure, nothing, join_moments)
    with np.errstate(all="ignore"):
        found = values[2].real / np.maximum(values[0].real - ddof, 0)
    kind = np.dtype(np.float64) if A.dtype.kind in "bi" else A.dtype.type(0).real.dtype
    return result_matrix(ctx, np.sqrt(found) if root else found, kind, layout, shape)


def _check_ddof(name: str, ddof: int) -> None:
    require(ddof >= 0, "BadArgumentError", f"{name}: ddof={ddof}: it must be at least 0")
