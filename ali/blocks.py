"""Helpers for routines of all libraries: checks of arguments, local blocks, panels, the norm."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ali.interface import Context
from mpi_workers.failures import Failure
from mpi_workers.matrix.dist_matrix import DistMatrix, check_range, narrows
from mpi_workers.matrix.layout import check_layout

Array = NDArray[Any]

PANEL = 32 << 20  # 32 MiB: large enough for BLAS's full speed, small compared with matrices
CHUNK = 1 << 20  # 1 MiB: stays in a core's cache between two passes


def require(condition: bool, kind: str, message: str) -> None:
    """Raise a `Failure` unless `condition` holds; it must be the same on all ranks."""
    if not condition:
        raise Failure(kind, message)


def refuse_loss(ctx: Context, values: Array, dtype: np.dtype[Any], what: str) -> None:
    """Require that a dtype can hold the elements of all ranks. Collective if it is narrower.

    Raises
    ------
    Failure
        DtypeError on all ranks, if a rank has nan, inf or a number out of range for an integer
        dtype, or a finite number that would become infinite.
    """
    if not narrows(values.dtype, dtype):
        return
    told = ""
    try:
        check_range(values, dtype, what)
    except ValueError as error:
        told = str(error)
    told = next(filter(None, ctx.comm.allgather(told)), "")
    require(not told, "DtypeError", told)


def block(matrix: DistMatrix) -> Array:
    """`matrix.local`; an empty one has its true shape, ``(0, n)`` instead of ``(0, 0)``."""
    both = matrix.distribution.runs(matrix.rank)
    if both is None:
        return matrix.local
    rows, cols = (runs.count(length) for runs, length in zip(both, matrix.shape, strict=True))
    return matrix.local.reshape(rows, cols, order="F")


def shape_text(matrix: DistMatrix) -> str:
    """The shape for a message: ``4 x 3``, or ``(4,)`` of a vector."""
    m, n = matrix.shape
    return f"{m} x {n}" if matrix.ndim == 2 else str(matrix.array_shape)


def require_square(routine: str, A: DistMatrix) -> int:
    """Raise ShapeError unless A is square; return its number of rows."""
    m, n = A.shape
    require(m == n, "ShapeError", f"{routine}: A is {shape_text(A)}; it must be square")
    return m


def require_same_rows(routine: str, A: DistMatrix, B: DistMatrix, names: str = "AB") -> None:
    """Require as many rows in B as in A. Raises `Failure` (ShapeError)."""
    require(
        A.shape[0] == B.shape[0],
        "ShapeError",
        f"{routine}: {names[0]} is {shape_text(A)} and {names[1]} is {shape_text(B)}; the numbers "
        "of rows must match",
    )


def require_choice(
    routine: str,
    name: str,
    value: str,
    choices: Collection[str],
    kind: str = "BadArgumentError",
) -> None:
    """Raise a `Failure` of that kind unless `value` is one of `choices`."""
    require(
        value in choices,
        kind,
        f"{routine}: {name} must be one of {', '.join(choices)}; got {value!r}",
    )


def require_layout(routine: str, layout: str) -> None:
    """Raise a `Failure` (LayoutError) unless there is a layout of that name."""
    try:
        check_layout(layout)
    except ValueError as error:
        raise Failure("LayoutError", f"{routine}: {error}") from None


def count_owned(length: int, rank: int, size: int) -> int:
    """How many of `length` indices `rank` owns if index i is on rank ``i % size``."""
    return len(range(rank, length, size))


def panel_width(length: int, itemsize: int) -> int:
    """The number of vectors of `length` elements in a panel."""
    return max(1, PANEL // max(1, length * itemsize))


def panels(stop: int, width: int) -> Iterator[slice]:
    """Cut ``range(stop)`` into half-open slices of `width`."""
    for start in range(0, stop, width):
        yield slice(start, min(start + width, stop))


def floating(array: Array) -> Array:
    """The array; integers and bool are promoted to float64."""
    return array.astype(np.float64) if array.dtype.kind in "bi" else array


def float_dtype(*dtypes: np.dtype[Any]) -> np.dtype[Any]:
    """The dtype of computations with matrices of these dtypes; integers and bool give float64."""
    wide = np.dtype(np.float64)
    return np.result_type(*(wide if dtype.kind in "bi" else dtype for dtype in dtypes))


def frobenius(ctx: Context, matrix: DistMatrix) -> float:
    """The Frobenius norm, the same number on every rank. Collective.

    Sums of squares are kept as ``scale**2 * total`` with every term at most 1, as in
    LAPACK's lassq, so that neither 1e200 overflows nor 1e-200 underflows.
    """
    scale, total = 0.0, 0.0
    if any(group[0] == ctx.rank for group in matrix.distribution.owners()):  # each copy counts once
        local = matrix.local.reshape(-1, order="F")
        if local.dtype.kind == "c":
            local = local.view(local.real.dtype)
        for part in panels(local.size, CHUNK // 8):
            values = np.abs(local[part].astype(np.float64))
            scale, total = _add_squares(scale, total, values)
    mine = np.array([scale, total])
    pairs = np.empty((ctx.size, 2))
    ctx.comm.Allgather(mine, pairs)
    top = float(pairs[:, 0].max())
    if top == 0.0 or not math.isfinite(top):
        return top
    return top * math.sqrt(math.fsum(t * (s / top) ** 2 for s, t in pairs.tolist()))


def _add_squares(scale: float, total: float, values: Array) -> tuple[float, float]:
    top = float(values.max())
    if not (top > 0.0 and math.isfinite(top) and math.isfinite(scale)):
        return (scale if top <= scale or math.isnan(scale) else top), total
    if top > scale:
        total *= (scale / top) ** 2
        scale = top
    values /= scale
    return scale, total + float(values @ values)
