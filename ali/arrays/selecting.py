"""`A[...]`, `A[...] = B` and operators in place on the ranks, by NumPy's rules.

The client reduces every index to one selection for each axis, or to a mask of all elements, or to
a list of element positions. A selection is one of

- a progression ``[start, step, count]``,
- indices in the call, as little-endian int64,
- a vector on the ranks: of bool, one element for each row (column), or of integers.

Masks select from consecutive rows on each rank: their order is that of the ranks.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from mpi4py import MPI

from ali.arrays.exchanges import (
    contiguous_rows,
    from_contiguous,
    in_order,
    listed,
    reshaped,
)
from ali.arrays.operands import decoded
from ali.blocks import Array, refuse_loss, require
from ali.interface import Context, routine
from ali.linalg import arithmetic
from ali.linalg.indexing import IndexMap, taken, transfer
from mpi_workers.matrix.dist_matrix import REPLY_NBYTES, DistMatrix
from mpi_workers.matrix.layout import ArrayShape
from mpi_workers.matrix.redistribution import redistribute

KEPT_NBYTES = 1 << 20  # 1 MiB: longer results of `pick` are distributed


@routine("B", any_axes=True)
def pick(
    ctx: Context, A: DistMatrix, row_list: bytes, col_list: bytes, shape: list[int]
) -> DistMatrix:
    """Single elements: ``A[rows, cols]`` of two lists.

    Parameters
    ----------
    A : matrix
    row_list, col_list : bytes
        Indices, little-endian int64, 0 to the length - 1.
    shape : list of int
        Of the result.

    Returns
    -------
    B : array of that shape, dtype of A
        STAR_STAR up to 1 MiB, else VC_STAR.

    Notes
    -----
    Every rank receives all elements of the result.
    """
    found = np.zeros(len(row_list) // 8, A.dtype)
    if any(group[0] == ctx.rank for group in A.distribution.owners()):
        mine, i, j = _own(A, row_list, col_list)
        found[mine] = A.stored[i, j]
    every = np.empty_like(found)
    ctx.comm.Allreduce(found.view(np.uint8), every.view(np.uint8), MPI.BOR)
    layout = "STAR_STAR" if every.nbytes <= KEPT_NBYTES else "VC_STAR"
    return ctx.new_replicated(every.reshape(shape), layout)


def _own(A: DistMatrix, row_list: bytes, col_list: bytes) -> tuple[Array, Array, Array]:
    """Which of the listed elements this rank has, and their places in its block."""
    down, across = map(listed, (row_list, col_list))
    both = A.distribution.runs(A.rank)
    if both is None:
        return down[:0], down[:0], down[:0]
    rows, cols = both
    mine = np.flatnonzero(rows.holds(down) & cols.holds(across))
    return mine, rows.positions(down[mine]), cols.positions(across[mine])


@routine(writes=("A",), any_axes=True)
def put_elements(
    ctx: Context,
    A: DistMatrix,
    row_list: bytes,
    col_list: bytes,
    shape: list[int],
    value: DistMatrix,
) -> None:
    """Write to single elements: ``A[rows, cols] = value`` of two lists.

    Parameters
    ----------
    A : matrix
        It is changed.
    row_list, col_list, shape
        As in `pick`. Of elements that occur twice, the last one counts.
    value : array
        Broadcasts to that shape; it is converted to the dtype of A.

    Raises
    ------
    DtypeError
        If A cannot hold an element, see `astype`.
    ShapeError
        If the value does not broadcast.

    Notes
    -----
    Every rank receives all of the value.
    """
    given = ctx.to_layout(value, "STAR_STAR").local.reshape(_lengths(value, shape))
    every = np.broadcast_to(given, shape).reshape(-1)
    mine, i, j = _own(A, row_list, col_list)
    A.stored[i, j] = castable(ctx, every, A.dtype)[mine]


def _lengths(value: DistMatrix, shape: list[int]) -> ArrayShape:
    """The shape in which a value broadcasts to a selection: axes of length 1 in front may go."""
    lengths = value.array_shape
    while len(lengths) > len(shape) and lengths[0] == 1:
        lengths = lengths[1:]  # as NumPy does for the right-hand side
    pairs = zip(lengths[::-1], shape[::-1], strict=False)
    require(
        len(lengths) <= len(shape) and all(n in (1, there) for n, there in pairs),
        "ShapeError",
        f"a value of shape {value.array_shape} does not broadcast to the selection, {tuple(shape)}",
    )
    return lengths


def castable(ctx: Context, values: Array, dtype: np.dtype[Any]) -> Array:
    """Elements that an array of that dtype can hold, see `refuse_loss`. Collective.

    Imaginary parts are left out if the dtype has none; as bool an imaginary part counts.
    """
    values = values if dtype.kind in "bc" else values.real
    refuse_loss(ctx, values, dtype, "the value of an assignment")
    return values


@routine("B", any_axes=True)
def part(
    ctx: Context,
    A: DistMatrix,
    steps: list[int],
    lists: list[bytes],
    shape: list[int],
    vector: DistMatrix | None = None,
    axis: int = 0,
) -> DistMatrix:
    """The selected part of an array, as a copy.

    Parameters
    ----------
    A : array
    steps : list of int
        For each axis start, step and count; a count of -1: the next of `lists`.
    lists : list of bytes
        Indices, little-endian int64, 0 to the length - 1.
    shape : list of int
        Of the result; -1 stands for the number of elements that a mask in `vector` selects.
    vector : vector, optional
        In place of the list of an `axis`: bool, or integers, which may count from the end.
    axis : int

    Returns
    -------
    B : array of that shape, dtype of A
        Up to 64 KiB in STAR_STAR, so that the reply contains the elements; else in the layout of
        A, or what `reshaped` makes of it.

    Raises
    ------
    ShapeError
        If an index or a mask does not fit A.

    Notes
    -----
    Each element crosses the network at most once per copy in the layout. Every rank has all
    indices.
    """
    down, across, known = _stored_index(ctx, A, steps, lists, shape, vector, axis)
    small = down.size * across.size * A.dtype.itemsize <= REPLY_NBYTES
    B = taken(ctx, A, down, across, "STAR_STAR" if small else "")
    return reshaped(ctx, B, known)


def _stored_index(
    ctx: Context,
    A: DistMatrix,
    steps: list[int],
    lists: list[bytes],
    shape: list[int],
    vector: DistMatrix | None,
    axis: int,
) -> tuple[Array, Array, list[int]]:
    """Rows and columns of the stored matrix that a part selects, and the part's shape."""
    given = iter(lists)
    found = []
    for i, length in enumerate(A.array_shape):
        start, step, count = steps[3 * i : 3 * i + 3]
        if count >= 0:
            found.append(start + step * np.arange(count, dtype=np.int64))
            continue
        indices = listed(next(given))
        found.append(indices if vector is None or i != axis else _of_vector(ctx, length, vector, i))
    down = found[0] if found else np.zeros(1, np.int64)
    across = np.zeros(1, np.int64)
    for index, length in zip(found[1:], A.array_shape[1:], strict=True):
        across = (across[:, None] * length + index).reshape(-1)
    selected = found[axis].size if vector is not None else 0
    return down, across, [selected if n < 0 else n for n in shape]


@routine("B", any_axes=True)
def elements(ctx: Context, A: DistMatrix, mask: DistMatrix) -> DistMatrix:
    """The elements where a mask is true, in C order.

    Parameters
    ----------
    A : array
    mask : array of bool, of A's shape

    Returns
    -------
    B : vector, dtype of A, VC_STAR:BLOCK

    Raises
    ------
    ShapeError
        If the shapes differ.

    Notes
    -----
    Elements and mask cross the network once, to ranks with consecutive rows (not if they are in
    ``VC_STAR:BLOCK``), and the selected elements once more.
    """
    require_mask(A, mask)
    rows, _ = contiguous_rows(ctx, A)
    chosen, _ = contiguous_rows(ctx, mask)
    return in_order(ctx, np.compress(chosen.reshape(-1), rows.reshape(-1)))


@routine("indices", any_axes=True)
def nonzero(ctx: Context, A: DistMatrix, axis: int) -> DistMatrix:
    """Indices along an axis of the elements that are not zero, in C order.

    Parameters
    ----------
    A : array
    axis : int

    Returns
    -------
    indices : vector of int64, VC_STAR:BLOCK

    Notes
    -----
    As `elements`.
    """
    rows, start = contiguous_rows(ctx, A)
    flat = np.flatnonzero(rows) + start * A.shape[1]
    return in_order(ctx, np.unravel_index(flat, A.array_shape)[axis].astype(np.int64))


@routine(writes=("A",), any_axes=True)
def assign(
    ctx: Context,
    A: DistMatrix,
    value: DistMatrix,
    steps: list[int],
    lists: list[bytes],
    shape: list[int],
    axes: list[int],
    vector: DistMatrix | None = None,
    axis: int = 0,
) -> None:
    """Write to the selected part of A.

    Parameters
    ----------
    A : array
        It is changed.
    value : array
        Broadcasts to what `part` would return; it is converted to the dtype of A.
    steps, lists, shape, vector, axis
        As in `part`. Of indices that occur twice, the last element counts.
    axes : list of int
        For each axis of that result the axis of A, or -1: a new one.

    Raises
    ------
    ShapeError
        If an index does not fit A, or the value the selection.
    DtypeError
        If A cannot hold an element, see `astype`.

    Notes
    -----
    As `part`, from the value to A.
    """
    down, across, part_shape = _stored_index(ctx, A, steps, lists, shape, vector, axis)
    lengths = _lengths(value, part_shape)
    if not down.size or not across.size:
        return
    own, whole = (
        [1] * max(1, A.ndim) for _ in range(2)
    )  # along the axes of A: the value, the part
    padded = (1,) * (len(part_shape) - len(lengths)) + lengths
    for n, length, to in zip(padded, part_shape, axes, strict=True):
        if to >= 0:
            own[to], whole[to] = n, length
    if value.dtype != A.dtype or np.shares_memory(value.stored, A.stored):
        converted = ctx.empty(value.array_shape, A.dtype, value.layout)
        converted.stored[...] = castable(ctx, value.stored, A.dtype)
        value = converted
    value = reshaped(ctx, value, own)
    source = np.zeros(1, np.int64)
    for n, length in zip(own[1:], whole[1:], strict=True):
        index = np.arange(length) if n == length else np.zeros(length, np.int64)
        source = (source[:, None] * n + index).reshape(-1)
    rows = np.arange(down.size) if own[0] == down.size else np.zeros(down.size, np.int64)
    transfer(ctx, value, A, _last_of(rows, down), _last_of(source, across))


def _last_of(source: Array, target: Array) -> IndexMap:
    """Each index of the target once, with the last of its sources."""
    if (np.diff(target) > 0).all():
        return IndexMap(source, target)
    places, last = np.unique(target[::-1], return_index=True)
    return IndexMap(source[::-1][last], places)


@routine(writes=("A",), any_axes=True)
def update(
    ctx: Context,
    op: str,
    A: DistMatrix,
    shape: list[int],
    B: DistMatrix | None = None,
    values: bytes = b"",
    dtype: str = "",
    value: complex = 0.0,
    kind: str = "",
) -> None:
    """A = op(A, B), element by element, in A's memory.

    Parameters
    ----------
    op : str
        See `elementwise` of linalg.
    A : array
        It is changed, and keeps its dtype and layout.
    B : array, optional
        It broadcasts to the shape of A.
    shape, values, dtype
        In place of B, as in `array`.
    value, kind
        In place of B if `kind` is given, as in `elementwise_scalar` of linalg.

    Raises
    ------
    DtypeError
        If NumPy's rule "same_kind" does not let the result be cast to the dtype of A.
    BadArgumentError, ShapeError, RoutineError
        As `elementwise`. A is unchanged after an error.

    Notes
    -----
    One pass. B is moved to the layout of A.
    """
    if kind:
        arithmetic.with_number(ctx, op, A, value, False, kind, in_place=True)
        return
    if B is None:
        B = ctx.new_replicated(decoded("update", values, shape, dtype))
    arithmetic.binary(ctx, "update", op, A, B, in_place=True)


@routine(writes=("A",), any_axes=True)
def assign_elements(ctx: Context, A: DistMatrix, mask: DistMatrix, value: DistMatrix) -> None:
    """Write to the elements where a mask is true: ``A[mask] = value``.

    Parameters
    ----------
    A : array
        It is changed.
    mask : array of bool, of A's shape
    value : array
        A number, or a vector with as many elements as the mask selects.

    Raises
    ------
    DtypeError
        If A cannot hold an element, see `astype`.
    ShapeError
        If the shapes do not fit.

    Notes
    -----
    A number: one local pass. A vector: every rank receives all of it.
    """
    require_mask(A, mask)
    if value.shape == (1, 1) and value.ndim < 2:
        number = ctx.to_layout(value, "STAR_STAR").local[0, 0]
        chosen = ctx.to_layout(mask, A.layout).stored.astype(bool, copy=False)
        np.copyto(A.stored, castable(ctx, number, A.dtype), where=chosen, casting="unsafe")
        return
    rows, start = contiguous_rows(ctx, A)
    chosen = contiguous_rows(ctx, mask)[0].astype(bool, copy=False)
    counts = np.asarray(ctx.comm.allgather(int(chosen.sum())))
    before, count = counts[: ctx.rank].sum(), counts.sum()
    require(
        value.shape == (count, 1) and value.ndim == 1,
        "ShapeError",
        f"a value of shape {value.array_shape} for {count} selected elements",
    )
    values = castable(ctx, ctx.to_layout(value, "STAR_STAR").local.reshape(-1), A.dtype)
    rows[chosen] = values[before : before + counts[ctx.rank]]
    changed = from_contiguous(ctx, rows, start, A.array_shape)
    redistribute(changed, A, ctx.comm)


def _of_vector(ctx: Context, length: int, vector: DistMatrix, axis: int) -> Array:
    """The indices along an axis that a vector on the ranks selects, on every rank."""
    what = ("rows", "columns")[axis] if axis < 2 else f"elements of axis {axis}"
    values = ctx.to_layout(vector, "STAR_STAR").local.reshape(-1)
    if vector.dtype.kind == "b":
        require(
            values.size == length,
            "BadIndexError",
            f"a mask of {values.size} elements does not fit {length} {what}: give one element for "
            "each",
        )
        return np.flatnonzero(values)
    index = values.astype(np.int64)
    wrong = (index < -length) | (index >= length)
    require(
        not wrong.any(),
        "BadIndexError",
        f"index {index[wrong][0] if wrong.any() else 0} is out of range for {length} {what}",
    )
    return np.where(index < 0, index + length, index)


def require_mask(A: DistMatrix, mask: DistMatrix) -> None:
    require(
        mask.array_shape == A.array_shape,
        "BadIndexError",
        f"a mask of shape {mask.array_shape} for an array of shape {A.array_shape}",
    )
