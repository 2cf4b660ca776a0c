"""Small arrays that travel in a command or its reply, and where an operation would take place.

A reduction of a large matrix and its result, or a row that is subtracted from every row, are
one command this way. Elements travel as base64 of their bytes, little-endian and C-ordered.
"""

from __future__ import annotations

import base64
import binascii
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
SPREADS = ("var", "std")  # take a ddof
RESULT_IN = {"rows": "VC_STAR", "cols": "STAR_VC", "inner": "VC_STAR", "grid": "MC_MR"}
WAYS = {  # layouts of the operands, by way
    "rows": ("VC_STAR", "VC_STAR"), "cols": ("STAR_VC", "STAR_VC"),
    "inner": ("STAR_VC", "VC_STAR"), "grid": ("MC_MR", "MC_MR"),
}  # fmt: skip


@routine("A")
def array(
    ctx: Context, values: str, m: int, n: int, dtype: str, layout: str = "STAR_STAR"
) -> DistMatrix:
    """A matrix of elements that come with the call.

    Parameters
    ----------
    values : str
        base64 of the elements, little-endian, row by row.
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
        If `values` are not so many elements.

    Notes
    -----
    No communication: every rank is given all elements, and keeps its own.
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
    values: str,
    m: int,
    n: int,
    dtype: str,
    reflected: bool = False,
) -> DistMatrix:
    """C = op(A, B), or op(B, A), element by element, with a small B that comes with the call.

    Parameters
    ----------
    op : str
        See `elementwise` of linalg.
    A : matrix
    values, m, n, dtype
        B, as in `array`. Its shape and A's broadcast: in rows and in columns equal, or 1.
    reflected : bool
        Whether B comes first.

    Returns
    -------
    C : matrix
        As `elementwise` gives it.

    Raises
    ------
    BadArgumentError, DtypeError, ShapeError, RoutineError
        As `array` and `elementwise`.

    Notes
    -----
    One pass; nothing is communicated where A has the shape of C.
    """
    B = ctx.new_replicated(_decoded("combine", values, m, n, dtype))
    return arithmetic.elementwise(ctx, op, *((B, A) if reflected else (A, B)))


@routine("values", "dtype")
def reduce(
    ctx: Context, op: str, A: DistMatrix, axis: int | None = None, ddof: int = 0
) -> tuple[str, str]:
    """The elements of a small reduction, which come with the reply.

    Parameters
    ----------
    op : str
        sum, mean, var, std, min or max: the routines of these names.
    A : matrix, shape (m, n)
    axis : int, optional
        0: a number per column, 1: per row, None: one.
    ddof : int
        Of var and std.

    Returns
    -------
    values : str
        base64 of the elements, little-endian.
    dtype : str

    Raises
    ------
    BadArgumentError
        If there is no such op or axis, or ddof is negative.

    Notes
    -----
    As the routine; then n, m or 1 words are gathered on every rank.
    """
    require(
        op in REDUCTIONS,
        "BadArgumentError",
        f"reduce: op={op!r}; it can be one of {', '.join(REDUCTIONS)}",
    )
    extra = {"ddof": ddof} if op in SPREADS else {}
    R = REDUCTIONS[op](ctx, A, axis=axis, **extra)
    return _encoded(ctx.to_layout(R, "STAR_STAR").local), R.dtype.name


@routine("layout", "a_layout", "b_layout", "a_words", "b_words", "way")
def plan(
    ctx: Context, op: str, A: DistMatrix, B: DistMatrix
) -> tuple[str, str, str, int, int, str]:
    """What an operation on A and B would move, without doing it.

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
        In which the operands are taken.
    a_words, b_words : int
        Elements that the busiest rank receives of each to have it so.
    way : str
        Of a product: rows, cols, inner or grid (ali/linalg/gemm.py), else "elementwise".

    Raises
    ------
    ShapeError
        If the shapes do not go together.

    Notes
    -----
    No communication. A product moves further words by its way, in panels.
    """
    if op == "matmul":
        require(
            A.shape[1] == B.shape[0],
            "ShapeError",
            f"matmul: {A.shape[0]} x {A.shape[1]} and {B.shape[0]} x {B.shape[1]} do not go "
            "together",
        )
        way = product_plan(A.distribution, B.distribution)
        layout, wanted = RESULT_IN[way], WAYS[way]
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


def _decoded(name: str, values: str, m: int, n: int, dtype: str) -> Array:
    require(
        dtype in DTYPES,
        "DtypeError",
        f"{name}: dtype={dtype!r}; a matrix is one of {', '.join(DTYPES)}",
    )
    kind = np.dtype(dtype)
    try:
        content = base64.b64decode(values, validate=True)
    except binascii.Error:
        content = b""
    require(
        m >= 1 and n >= 1 and len(content) == m * n * kind.itemsize,
        "BadArgumentError",
        f"{name}: values are not the base64 of {m} x {n} elements of {dtype}",
    )
    return np.frombuffer(content, kind.newbyteorder("<")).reshape(m, n).astype(kind, copy=False)


def _encoded(local: Array) -> str:
    content = np.ascontiguousarray(local, local.dtype.newbyteorder("<")).tobytes()
    return base64.b64encode(content).decode("ascii")
