"""Routines for expressions on handles: small operands in a command, small results in its reply.

A command carries the elements of a small operand, for example a row that is subtracted from every
row, and a reply carries the result of a reduction. Elements are little-endian and C-ordered.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ali.blocks import Array, require
from ali.interface import Context, routine
from ali.linalg import arithmetic, reductions
from ali.linalg.broadcasting import broadcast_shape, common_layout, part_layout
from ali.linalg.gemm import plan as product_plan
from mpi_workers.matrix.dist_matrix import DTYPES, DistMatrix
from mpi_workers.matrix.layout import LAYOUTS, owners

REDUCTIONS: dict[str, Any] = {
    "sum": reductions.sum, "mean": reductions.mean, "min": reductions.min, "max": reductions.max,
    "var": reductions.var, "std": reductions.std,
}  # fmt: skip
DEVIATIONS = ("var", "std")  # these take a ddof
RESULT_IN = {"rows": "VC_STAR", "cols": "STAR_VC", "inner": "VC_STAR", "grid": "MC_MR"}
OPERANDS_IN = {
    "rows": ("VC_STAR", "VC_STAR"), "cols": ("STAR_VC", "STAR_VC"),
    "inner": ("STAR_VC", "VC_STAR"), "grid": ("MC_MR", "MC_MR"),
}  # fmt: skip


@routine("A")
def array(
    ctx: Context, values: bytes, m: int, n: int, dtype: str, layout: str = "STAR_STAR"
) -> DistMatrix:
    """Create a matrix from elements in the call.

    Parameters
    ----------
    values : bytes
        The elements, little-endian, row by row.
    m, n : int
        Its shape.
    dtype : str
        float32, float64, complex64, complex128, int32 or int64.
    layout : str
        One of Elemental's 14.

    Returns
    -------
    A : matrix, shape (m, n)

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
    require(
        layout in LAYOUTS,
        "LayoutError",
        f"array: layout={layout!r}; the layouts are {', '.join(LAYOUTS)}",
    )
    return ctx.new_replicated(_decoded("array", values, m, n, dtype), layout)


@routine("C")
def combine(
    ctx: Context,
    op: str,
    A: DistMatrix,
    values: bytes,
    m: int,
    n: int,
    dtype: str,
    reflected: bool = False,
) -> DistMatrix:
    """C = op(A, B) or op(B, A), element by element, with a small B in the call.

    Parameters
    ----------
    op : str
        See `elementwise` of linalg.
    A : matrix
    values, m, n, dtype
        B, as in `array`. The shapes of A and B must broadcast: sizes are equal, or 1.
    reflected : bool
        Whether B is the first operand.

    Returns
    -------
    C : matrix
        As `elementwise` returns it.

    Raises
    ------
    BadArgumentError, DtypeError, ShapeError, RoutineError
        As `array` and `elementwise`.

    Notes
    -----
    One pass. No communication if A has the shape of C.
    """
    B = ctx.new_replicated(_decoded("combine", values, m, n, dtype))
    return arithmetic.elementwise(ctx, op, *((B, A) if reflected else (A, B)))


@routine("values", "dtype")
def reduce(
    ctx: Context, op: str, A: DistMatrix, axis: int | None = None, ddof: int = 0
) -> tuple[bytes, str]:
    """Reduce A and return the elements of the result in the reply.

    Parameters
    ----------
    op : str
        "sum", "mean", "var", "std", "min" or "max": the routine of that name.
    A : matrix, shape (m, n)
    axis : int, optional
        0: one number per column, 1: one per row, None: one in all.
    ddof : int
        See `var`; only for "var" and "std".

    Returns
    -------
    values : bytes
        The elements, little-endian.
    dtype : str

    Raises
    ------
    BadArgumentError
        If op or axis is unknown, or ddof is negative.

    Notes
    -----
    Costs as the routine; then every rank gathers n, m or 1 words.
    """
    require(
        op in REDUCTIONS,
        "BadArgumentError",
        f"reduce: op={op!r}; it can be one of {', '.join(REDUCTIONS)}",
    )
    extra = {"ddof": ddof} if op in DEVIATIONS else {}
    R = REDUCTIONS[op](ctx, A, axis=axis, **extra)
    return _encoded(ctx.to_layout(R, "STAR_STAR").local), R.dtype.name


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
        Of a product: "rows", "cols", "inner" or "grid" (ali/linalg/gemm.py); else "elementwise".

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
        layout, wanted = RESULT_IN[way], OPERANDS_IN[way]
    else:
        shape = broadcast_shape(op, (A, B))
        way, layout = "elementwise", common_layout((A, B), shape)
        wanted = part_layout(layout, A.shape, shape), part_layout(layout, B.shape, shape)
    words = [_words(x, to) for x, to in zip((A, B), wanted, strict=True)]
    return layout, wanted[0], wanted[1], words[0], words[1], way


def _words(matrix: DistMatrix, layout: str) -> int:
    if matrix.layout in (layout, "STAR_STAR"):
        return 0
    m, n = matrix.shape
    return -(-m * n // len(owners(layout, matrix.grid)))


def _decoded(name: str, values: bytes, m: int, n: int, dtype: str) -> Array:
    require(
        dtype in DTYPES,
        "DtypeError",
        f"{name}: dtype={dtype!r}; a matrix is one of {', '.join(DTYPES)}",
    )
    kind = np.dtype(dtype)
    require(
        m >= 1 and n >= 1 and len(values) == m * n * kind.itemsize,
        "BadArgumentError",
        f"{name}: values has {len(values)} bytes; {m} x {n} elements of {dtype} are expected",
    )
    return np.frombuffer(values, kind.newbyteorder("<")).reshape(m, n).astype(kind, copy=False)


def _encoded(local: Array) -> bytes:
    return local.astype(local.dtype.newbyteorder("<"), copy=False).tobytes()
