"""Operands of expressions on handles, and reductions.

A command carries the elements of a small operand, for example a vector that is subtracted from
every row, and the reply carries those of a small result. Elements are little-endian and C-ordered.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ali.arrays import extremes
from ali.arrays.exchanges import permuted, reshaped
from ali.blocks import Array, require, require_choice, require_layout
from ali.interface import Context, routine
from ali.linalg import arithmetic, creation, reductions
from ali.linalg.arithmetic import as_rows, broadcast_shape, common_layout, part_layout, received
from ali.linalg.products import plan as product_plan
from mpi_workers.matrix.dist_matrix import REPLY_NBYTES, DistMatrix
from mpi_workers.matrix.dtypes import DTYPES
from mpi_workers.matrix.layout import MAX_AXES, as_array, stored_shape

REDUCTIONS: dict[str, Any] = {
    "sum": reductions.sum, "mean": reductions.mean, "min": reductions.min, "max": reductions.max,
    "var": reductions.var, "std": reductions.std, **extremes.REDUCTIONS,
}  # fmt: skip
DEVIATIONS = ("var", "std", "nanvar", "nanstd")  # these take a ddof
NEED_ELEMENTS = ("min", "max", *extremes.NEED_ELEMENTS)
TRUTH = ("any", "all")
PRODUCT_IN = {  # by way: the layouts of result and operands
    "rows": ("VC_STAR", "VC_STAR", "VC_STAR"), "cols": ("STAR_VC", "STAR_VC", "STAR_VC"),
    "inner": ("VC_STAR", "STAR_VC", "VC_STAR"), "grid": ("MC_MR", "MC_MR", "MC_MR"),
}  # fmt: skip


@routine("A")
def array(
    ctx: Context, values: bytes, shape: list[int], dtype: str, layout: str = "STAR_STAR"
) -> DistMatrix:
    """Create an array from elements in the call.

    Parameters
    ----------
    values : bytes
        The elements, little-endian, C-ordered.
    shape : list of int
        Of a matrix, a vector or a number.
    dtype : str
        One of `DTYPES` (mpi_workers/matrix/dtypes.py).
    layout : str
        One of Elemental's 14, or in blocks.

    Returns
    -------
    A : array of that shape

    Raises
    ------
    DtypeError, LayoutError
        If there is no such dtype or layout.
    BadArgumentError
        If the number of bytes of `values` does not match the shape and dtype.

    Notes
    -----
    No communication: every rank receives all elements and keeps its part.
    """
    require_layout("array", layout)
    return ctx.new_replicated(decoded("array", values, shape, dtype), layout)


@routine("A")
def filled(
    ctx: Context, shape: list[int], value: complex, dtype: str, layout: str = "VC_STAR"
) -> DistMatrix:
    """An array in which all elements have the same value.

    Parameters
    ----------
    shape : list of int
        Of a matrix, a vector or a number.
    value : complex
        As in `full` of linalg.
    dtype, layout : str
        As in `array`.

    Returns
    -------
    A : array of that shape

    Raises
    ------
    ShapeError, DtypeError, LayoutError, BadArgumentError
        As `full` of linalg.

    Notes
    -----
    No communication.
    """
    m, n = stored_shape(shape)
    return creation.full(ctx, m, n, value, dtype, layout).with_shape(tuple(shape))


@routine("A")
def progression(
    ctx: Context, start: float, step: float, count: int, dtype: str, layout: str = "VC_STAR"
) -> DistMatrix:
    """The vector ``start + step * k`` for k below `count`.

    Parameters
    ----------
    start, step : float
        Of integers up to 2**53.
    count : int
    dtype, layout : str
        As in `array`.

    Returns
    -------
    A : vector with `count` elements

    Notes
    -----
    No communication. Elements are computed in float64, or in int64 for an integer dtype.
    """
    A = ctx.empty((count,), dtype, layout)
    index = as_array(A.rows)
    whole = A.dtype.kind in "iu"
    values = int(start) + int(step) * index if whole else start + step * index
    A.local[...] = values[:, None]
    return A


@routine("C", any_axes=True)
def combine(
    ctx: Context,
    op: str,
    A: DistMatrix,
    values: bytes,
    shape: list[int],
    dtype: str,
    reflected: bool = False,
) -> DistMatrix:
    """C = op(A, B) or op(B, A), element by element, with a small B in the call.

    Parameters
    ----------
    op : str
        See `elementwise` of linalg.
    A : array
    values, shape, dtype
        B, as in `array`. The shapes of A and B must broadcast.
    reflected : bool
        Whether B is the first operand.

    Returns
    -------
    C : array
        As `elementwise` returns it.

    Raises
    ------
    BadArgumentError, DtypeError, ShapeError, RoutineError
        As `array` and `elementwise`.

    Notes
    -----
    One pass. No communication if A has the shape of C.
    """
    B = ctx.new_replicated(decoded("combine", values, shape, dtype))
    return arithmetic.elementwise(ctx, op, *((B, A) if reflected else (A, B)))


@routine("C", any_axes=True)
def choose(
    ctx: Context,
    condition: DistMatrix,
    values: bytes,
    shape: list[int],
    dtype: str,
    A: DistMatrix | None = None,
    B: DistMatrix | None = None,
) -> DistMatrix:
    """Elements of A where a condition is not zero, else of B; small operands are in the call.

    Parameters
    ----------
    condition : array
    values, shape, dtype
        In place of A or B, as in `array`; of both, along a first axis.
    A, B : array, optional

    Returns
    -------
    C : array
        As `where` of linalg returns it.

    Raises
    ------
    BadArgumentError, DtypeError, ShapeError
        As `array` and `where`.

    Notes
    -----
    As `where`; operands in the call need no communication.
    """
    small = decoded("choose", values, shape, dtype)
    left = iter(small if A is B is None else [small])
    A, B = (ctx.new_replicated(np.asarray(next(left))) if x is None else x for x in (A, B))
    return arithmetic.where(ctx, condition, A, B)


@routine("R", any_axes=True)
def reduce(
    ctx: Context,
    op: str,
    A: DistMatrix,
    axes: list[int] | None = None,
    ddof: int = 0,
    keepdims: bool = False,
) -> DistMatrix:
    """Reduce an array along some axes.

    Parameters
    ----------
    op : str
        "sum", "mean", "var", "std", "min" or "max": the routine of linalg; "any" or "all"; "prod",
        "argmin", "argmax", or "nansum", "nanmean" and the like, which leave out nan.
    A : array
    axes : list of int, optional
        None: one number of all elements.
    ddof : int
        See `var`; only for deviations.
    keepdims : bool
        Whether the axes that are reduced stay, with a length of 1.

    Returns
    -------
    R : array
        With the axes of A that stay. Up to 64 KiB in STAR_STAR, so that the reply
        contains the elements; larger ones in the layout of the routine.

    Raises
    ------
    BadArgumentError
        If op is unknown, or ddof is negative.
    ShapeError
        If there is no smallest or largest element, because there are none.

    Notes
    -----
    Costs as the routine; for small results, every rank then gathers them. Of three axes and more,
    the array is first copied with the axes that stay as the rows or columns of a matrix, unless
    they are the first or all others; no element moves.
    """
    require_choice("reduce", "op", op, [*REDUCTIONS, *TRUTH])
    whole = A.array_shape
    gone = sorted(range(A.ndim) if axes is None else axes)
    kept = [axis for axis in range(A.ndim) if axis not in gone]
    require(
        op not in NEED_ELEMENTS or all(whole[axis] for axis in gone),
        "ShapeError",
        f"{op}: an array of shape {whole} has no elements along axis {axes}",
    )
    along = None
    A = A.with_shape(A.shape) if not kept else A
    if kept:  # the first axis stays the first: nothing moves
        along = 0 if 0 in gone else 1
        sides = (kept, gone) if along else (gone, kept)
        A = permuted(ctx, A, [*sides[0], *sides[1]])
        A = reshaped(ctx, A, [math.prod(whole[axis] for axis in side) for side in sides])
    if op in TRUTH:
        R = _truth(ctx, op, A, along)
    else:
        R = REDUCTIONS[op](ctx, A, axis=along, **({"ddof": ddof} if op in DEVIATIONS else {}))
    if R.nbytes <= REPLY_NBYTES:
        R = ctx.to_layout(R, "STAR_STAR")
    lengths = [1 if i in gone else n for i, n in enumerate(whole) if keepdims or i in kept]
    return reshaped(ctx, R, lengths)


def _truth(ctx: Context, op: str, A: DistMatrix, along: int | None) -> DistMatrix:
    """Whether any or all elements are not zero."""
    R = ctx.empty(A.shape, "bool", A.layout)
    np.not_equal(A.local, 0, out=R.local)
    return (reductions.max if op == "any" else reductions.min)(ctx, R, axis=along)


@routine("layout", "a_layout", "b_layout", "a_words", "b_words", "way")
def plan(
    ctx: Context, op: str, A: DistMatrix, B: DistMatrix
) -> tuple[str, str, str, int, int, str]:
    """Predict what an operation on A and B would move, without running it.

    Parameters
    ----------
    op : str
        ``"matmul"``, or a function of `elementwise`.
    A, B : matrices

    Returns
    -------
    layout : str
        Of the result.
    a_layout, b_layout : str
        Of the operands during the operation.
    a_words, b_words : int
        Elements of each operand that the busiest rank receives for that.
    way : str
        Of a product: "rows", "cols", "inner" or "grid" (`ali.linalg.products`); else
        "elementwise".

    Raises
    ------
    ShapeError
        If the shapes do not match.

    Notes
    -----
    No communication. A product moves further words in panels; they are not counted here.
    """
    if op == "matmul":
        require(
            A.shape[1] == B.shape[0],
            "ShapeError",
            f"matmul: {A.shape[0]} x {A.shape[1]} and {B.shape[0]} x {B.shape[1]} do not match",
        )
        way = product_plan(A.distribution, B.distribution)
        layout, *wanted = PRODUCT_IN[way]
    else:
        shape = stored_shape(broadcast_shape(op, (A, B)))
        A, B = as_rows((A, B))
        way = "elementwise"
        layout = common_layout((A, B), shape)
        wanted = [part_layout(layout, x.shape, shape) for x in (A, B)]
    left, right = wanted
    return layout, left, right, received(A, left), received(B, right), way


def decoded(name: str, values: bytes, shape: list[int], dtype: str) -> Array:
    """Elements from a call; raises a `Failure` if they are not the elements of that array."""
    require_choice(name, "dtype", dtype, DTYPES, "DtypeError")
    kind = np.dtype(dtype)
    require(
        len(shape) <= MAX_AXES and min(shape, default=0) >= 0
        and len(values) == math.prod(shape) * kind.itemsize,
        "BadArgumentError",
        f"{name}: values has {len(values)} bytes, which are not elements of {dtype} in the shape "
        f"{tuple(shape)}",
    )  # fmt: skip
    return np.frombuffer(values, kind.newbyteorder("<")).reshape(shape).astype(kind, copy=False)
