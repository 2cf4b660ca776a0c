"""`A[...]` and `A[...] = B` on the ranks, by NumPy's rules.

The client reduces every index to one selection for the rows and one for the columns, or to a
mask of all elements, or to a list of element positions. A selection is one of

- a progression ``[start, step, count]``,
- indices in the call, as little-endian int64,
- a vector on the ranks: of bool, one element for each row (column), or of integers.
"""

from __future__ import annotations

import numpy as np

from ali.arrays.dimensions import with_shape
from ali.arrays.element_order import array_of, numbered, positions_of
from ali.arrays.paired_indices import castable
from ali.blocks import Array, block, require
from ali.interface import Context, routine
from ali.linalg.index_transfer import IndexMap, transfer
from ali.linalg.views import operand
from mpi_workers.matrix.dist_matrix import REPLY_NBYTES, DistMatrix
from mpi_workers.matrix.layout import stored_shape


@routine("B")
def part(
    ctx: Context,
    A: DistMatrix,
    rows: list[int],
    cols: list[int],
    row_list: bytes = b"",
    col_list: bytes = b"",
    row_vector: DistMatrix | None = None,
    col_vector: DistMatrix | None = None,
    drop: str = "",
) -> DistMatrix:
    """The selected rows and columns of an array, as a copy.

    Parameters
    ----------
    A : array
        A vector is a column.
    rows, cols : list of int
        A progression ``[start, step, count]``; empty if a list or vector is given.
    row_list, col_list : bytes
        Indices, 0 to the length - 1.
    row_vector, col_vector : vector, optional
        Of bool, or of integers from minus the length to the length - 1.
    drop : str
        Axes that an integer has selected, and new axes: "" (a matrix), "r" (rows were), "c",
        "rc", "column", "row", "vector": of a selection of one row or column the shape (k, 1),
        (1, k) or (k,).

    Returns
    -------
    B : array, dtype of A
        Up to 64 KiB in STAR_STAR, so that the reply contains the elements; else in the layout of
        A (a row that becomes a vector: in the mirrored layout).

    Raises
    ------
    ShapeError
        If an index or a mask does not fit A.

    Notes
    -----
    Each element crosses the network at most once per copy in the layout. Every rank has all
    indices.
    """
    down = _selected(ctx, "rows", A.shape[0], rows, row_list, row_vector)
    across = _selected(ctx, "columns", A.shape[1], cols, col_list, col_vector)
    small = down.size * across.size * A.dtype.itemsize <= REPLY_NBYTES
    B = ctx.empty((down.size, across.size), A.dtype, "STAR_STAR" if small else A.layout)
    maps = [IndexMap(index, np.arange(index.size)) for index in (down, across)]
    transfer(ctx, A, B, maps[0], maps[1])
    shapes = {
        "": B.shape, "r": (across.size,), "c": (down.size,), "rc": (),
        "column": (B.shape[0] * B.shape[1], 1), "row": (1, B.shape[0] * B.shape[1]),
        "vector": (B.shape[0] * B.shape[1],),
    }  # fmt: skip
    if drop == "" and A.ndim < 2:
        return B.with_ndim(A.ndim)
    return with_shape(ctx, B, shapes[drop])


@routine("B")
def elements(ctx: Context, A: DistMatrix, mask: DistMatrix) -> DistMatrix:
    """The elements where a mask is true, in C order.

    Parameters
    ----------
    A : array
    mask : array of bool, of A's shape

    Returns
    -------
    B : vector, dtype of A, VC_STAR

    Raises
    ------
    ShapeError
        If the shapes differ.

    Notes
    -----
    Selected elements cross the network once; both operands are moved to VC_STAR. Every rank
    gathers one count for each row.
    """
    _require_mask(A, mask)
    A, mask = ctx.to_layout(A, "VC_STAR"), ctx.to_layout(mask, "VC_STAR")
    numbers, count = numbered(ctx, mask)
    chosen = numbers >= 0
    return array_of(ctx, block(A)[chosen], numbers[chosen], (count,))


@routine("indices")
def nonzero(ctx: Context, A: DistMatrix, axis: int) -> DistMatrix:
    """Indices along an axis of the elements that are not zero, in C order.

    Parameters
    ----------
    A : array
    axis : int

    Returns
    -------
    indices : vector of int64, VC_STAR

    Notes
    -----
    As `elements`.
    """
    A = ctx.to_layout(A, "VC_STAR")
    numbers, count = numbered(ctx, A)
    chosen = numbers >= 0
    n = max(1, A.shape[1])
    positions = positions_of(ctx, A)[chosen]
    return array_of(ctx, positions % n if axis else positions // n, numbers[chosen], (count,))


@routine(writes=("A",))
def assign(
    ctx: Context,
    A: DistMatrix,
    value: DistMatrix,
    rows: list[int],
    cols: list[int],
    row_list: bytes = b"",
    col_list: bytes = b"",
    row_vector: DistMatrix | None = None,
    col_vector: DistMatrix | None = None,
    drop: str = "",
) -> None:
    """Write to the selected rows and columns of A: ``A[rows, cols] = value``.

    Parameters
    ----------
    A : array
        It is changed.
    value : array
        Broadcasts to what `part` would return; it is converted to the dtype of A.
    rows, cols, row_list, col_list, row_vector, col_vector, drop
        As in `part`, without new axes. Of indices that occur twice, the last element counts.

    Raises
    ------
    ShapeError
        If an index does not fit A, or the value the selection.

    Notes
    -----
    As `part`, from the value to A.
    """
    down = _selected(ctx, "rows", A.shape[0], rows, row_list, row_vector)
    across = _selected(ctx, "columns", A.shape[1], cols, col_list, col_vector)
    shapes = {"": (down.size, across.size), "r": (across.size,), "c": (down.size,), "rc": ()}
    shape = (down.size,) if A.ndim == 1 and drop == "" else shapes[drop]
    wanted = value.array_shape
    while shape and len(wanted) > len(shape) and wanted[0] == 1:
        wanted = wanted[1:]  # as NumPy does for the right-hand side
    try:
        fits = np.broadcast_shapes(wanted, shape) == shape
    except ValueError:
        fits = False
    require(
        fits,
        "ShapeError",
        f"a value of shape {value.array_shape} does not broadcast to the selection, {shape}",
    )
    whole = (down.size, across.size)
    if value.ndim and (value.shape[0] not in (1, whole[0]) or value.shape[1] not in (1, whole[1])
                       or _is_row(A, value, drop)):  # fmt: skip
        value = operand(value, "T")
    if value.dtype != A.dtype or np.shares_memory(value.local, A.local):
        converted = ctx.empty(value.shape, A.dtype, value.layout)
        with np.errstate(all="ignore"):
            np.copyto(converted.local, castable(value.local, A.dtype), casting="unsafe")
        value = converted
    maps = []
    for index, length in ((down, value.shape[0]), (across, value.shape[1])):
        target, last = np.unique(index[::-1], return_index=True)
        source = index.size - 1 - last
        maps.append(IndexMap(source if length == index.size else np.zeros_like(source), target))
    transfer(ctx, value, A, maps[0], maps[1])


def _is_row(A: DistMatrix, value: DistMatrix, drop: str) -> bool:
    """Whether a vector stands for a row of the selection: always, unless that is a column."""
    return value.ndim == 1 and A.ndim == 2 and drop != "c"


@routine(writes=("A",))
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
    ShapeError
        If the shapes do not fit.

    Notes
    -----
    A number: one local pass. A vector: every rank receives all of it.
    """
    _require_mask(A, mask)
    if value.shape == (1, 1) and value.ndim < 2:
        number = ctx.to_layout(value, "STAR_STAR").local[0, 0]
        local = ctx.to_layout(mask, A.layout).local
        with np.errstate(all="ignore"):
            chosen = local.astype(bool, copy=False)
            np.copyto(A.local, castable(number, A.dtype), where=chosen, casting="unsafe")
        return
    rows = ctx.to_layout(A, "VC_STAR")
    numbers, count = numbered(ctx, ctx.to_layout(mask, "VC_STAR"))
    require(
        value.shape == (count, 1) and value.ndim == 1,
        "ShapeError",
        f"a value of shape {value.array_shape} for {count} selected elements",
    )
    values = castable(ctx.to_layout(value, "STAR_STAR").local.reshape(-1), A.dtype)
    chosen = numbers >= 0
    with np.errstate(all="ignore"):
        block(rows)[chosen] = values[numbers[chosen]].astype(A.dtype)
    if rows is not A:
        maps = [IndexMap(np.arange(n), np.arange(n)) for n in A.shape]
        transfer(ctx, rows, A, maps[0], maps[1])


@routine("B")
def reshape(ctx: Context, A: DistMatrix, shape: list[int]) -> DistMatrix:
    """The elements of A in C order in another shape; a copy.

    Parameters
    ----------
    A : array
    shape : list of int
        With as many elements.

    Returns
    -------
    B : array of that shape, dtype of A

    Notes
    -----
    Axes of length 1 come and go without communication; otherwise each element crosses the
    network once with its position, and B is in VC_STAR.
    """
    if A.shape == stored_shape(shape) or (1 in A.shape and A.shape[::-1] == stored_shape(shape)):
        B = ctx.empty(A.shape, A.dtype, A.layout)
        B.local[...] = A.local
        return with_shape(ctx, B, shape)
    A = ctx.to_layout(A, "VC_STAR")
    values, positions = block(A).reshape(-1), positions_of(ctx, A).reshape(-1)
    return array_of(ctx, values, positions, shape)


def _selected(
    ctx: Context,
    what: str,
    length: int,
    progression: list[int],
    listed: bytes,
    vector: DistMatrix | None,
) -> Array:
    """The indices of one axis, the same on every rank."""
    if vector is None:
        if progression:
            start, step, count = progression
            return start + step * np.arange(count, dtype=np.int64)
        return np.frombuffer(listed, "<i8").astype(np.int64, copy=False)
    values = ctx.to_layout(vector, "STAR_STAR").local.reshape(-1)
    if vector.dtype.kind == "b":
        require(
            values.size == length,
            "ShapeError",
            f"a mask of {values.size} elements does not fit {length} {what}: give one element for "
            "each",
        )
        return np.flatnonzero(values)
    index = values.astype(np.int64)
    wrong = (index < -length) | (index >= length)
    require(
        not wrong.any(),
        "ShapeError",
        f"index {index[wrong][0] if wrong.any() else 0} is out of range for {length} {what}",
    )
    return np.where(index < 0, index + length, index)


def _require_mask(A: DistMatrix, mask: DistMatrix) -> None:
    require(
        mask.array_shape == A.array_shape,
        "ShapeError",
        f"a mask of shape {mask.array_shape} for an array of shape {A.array_shape}",
    )
