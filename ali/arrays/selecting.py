"""`A[...]`, `A[...] = B` and operators in place on the ranks, by NumPy's rules.

The client reduces every index to one selection for the rows and one for the columns, or to a
mask of all elements, or to a list of element positions. A selection is one of

- a progression ``[start, step, count]``,
- indices in the call, as little-endian int64,
- a vector on the ranks: of bool, one element for each row (column), or of integers.

All matrices here are in VC_STAR: a rank holds whole rows, every `size`-th.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from mpi4py import MPI

from ali.arrays.operands import decoded, with_shape
from ali.blocks import Array, block, refuse_loss, require
from ali.interface import Context, routine
from ali.linalg import arithmetic
from ali.linalg.indexing import IndexMap, transfer
from ali.linalg.products import operand
from mpi_workers.matrix.dist_matrix import REPLY_NBYTES, DistMatrix
from mpi_workers.matrix.layout import stored_shape


def positions_of(ctx: Context, A: DistMatrix) -> Array:
    """The positions in C order of this rank's elements, in the shape of its block."""
    m, n = A.shape
    return np.arange(ctx.rank, m, ctx.size, dtype=np.int64)[:, None] * n + np.arange(n)


def array_of(ctx: Context, values: Array, positions: Array, shape: Sequence[int]) -> DistMatrix:
    """An array from elements that ranks hold, each with its position. Collective.

    Parameters
    ----------
    values, positions : ndarray, shape (k,)
        Of this rank; over all ranks every position occurs once.
    shape : sequence of int
        Of the array.

    Returns
    -------
    DistMatrix
        In VC_STAR.

    Notes
    -----
    Each element crosses the network once, with its position. Memory: three copies of this rank's
    elements and positions.
    """
    size, (_, n) = ctx.size, stored_shape(shape)
    found = ctx.empty(shape, values.dtype)
    owner = positions // max(1, n) % size
    order = np.argsort(owner, kind="stable")
    counts = np.bincount(owner, minlength=size).astype(np.int64)
    theirs = np.empty(size, np.int64)
    ctx.comm.Alltoall(counts, theirs)
    places = _exchanged(ctx, positions[order], counts, theirs)
    elements = _exchanged(ctx, values[order], counts, theirs)
    if elements.size:
        found.local[places // n // size, places % n] = elements
    return found


def _exchanged(ctx: Context, mine: Array, counts: Array, theirs: Array) -> Array:
    width = mine.dtype.itemsize
    received = np.empty(int(theirs.sum()), mine.dtype)
    raw_in, raw_out = (np.ascontiguousarray(x).view(np.uint8) for x in (mine, received))
    send, receive = counts * width, theirs * width
    ctx.comm.Alltoallv((raw_in, (send, _starts(send))), (raw_out, (receive, _starts(receive))))
    return received


def _starts(counts: Array) -> Array:
    return np.cumsum(counts) - counts


def numbered(ctx: Context, mask: DistMatrix) -> tuple[Array, int]:
    """Number the elements where a mask is true, in C order. Collective.

    Returns
    -------
    numbers : ndarray of int64, the shape of this rank's block
        Of true elements; -1 of others.
    count : int
        How many there are in all.

    Notes
    -----
    Every rank gathers the number of true elements of each row.
    """
    local = block(mask) != 0
    counts = np.zeros(mask.shape[0], np.int64)
    counts[ctx.rank :: ctx.size] = local.sum(axis=1)
    total = np.empty_like(counts)
    ctx.comm.Allreduce(counts, total)
    before = (np.cumsum(total) - total)[ctx.rank :: ctx.size]
    numbers = np.cumsum(local, axis=1, dtype=np.int64) - 1 + before[:, None]
    return np.where(local, numbers, -1), int(total.sum())


KEPT_NBYTES = 1 << 20  # 1 MiB: longer results of `pick` are distributed


@routine("B")
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
        found[mine] = A.local[i, j]
    every = np.empty_like(found)
    ctx.comm.Allreduce(found.view(np.uint8), every.view(np.uint8), MPI.BOR)
    layout = "STAR_STAR" if every.nbytes <= KEPT_NBYTES else "VC_STAR"
    return ctx.new_replicated(every.reshape(shape), layout)


def _own(A: DistMatrix, row_list: bytes, col_list: bytes) -> tuple[Array, Array, Array]:
    """Which of the listed elements this rank has, and their places in its block."""
    down, across = (np.frombuffer(x, "<i8").astype(np.int64) for x in (row_list, col_list))
    both = A.distribution.runs(A.rank)
    if both is None:
        return down[:0], down[:0], down[:0]
    rows, cols = both
    mine = np.flatnonzero(rows.holds(down) & cols.holds(across))
    return mine, rows.positions(down[mine]), cols.positions(across[mine])


@routine(writes=("A",))
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
    given = ctx.to_layout(value, "STAR_STAR").local.reshape(value.array_shape)
    while given.ndim > len(shape) and given.shape[0] == 1:
        given = given[0]  # as NumPy does for the right-hand side
    try:
        every = np.broadcast_to(given, shape).reshape(-1)
    except ValueError:
        every = None
    require(
        every is not None,
        "ShapeError",
        f"a value of shape {value.array_shape} does not broadcast to the selection, {tuple(shape)}",
    )
    assert every is not None
    mine, i, j = _own(A, row_list, col_list)
    A.local[i, j] = castable(ctx, every, A.dtype)[mine]


def castable(ctx: Context, values: Array, dtype: np.dtype[Any]) -> Array:
    """Elements that an array of that dtype can hold, see `refuse_loss`. Collective.

    Imaginary parts are left out if the dtype has none; as bool an imaginary part counts.
    """
    values = values if dtype.kind in "bc" else values.real
    refuse_loss(ctx, values, dtype, "the value of an assignment")
    return values


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
    DtypeError
        If A cannot hold an element, see `astype`.

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
        own = ctx.empty(value.shape, A.dtype, value.layout)
        own.local[...] = castable(ctx, value.local, A.dtype)
        value = own
    maps = []
    for index, length in ((down, value.shape[0]), (across, value.shape[1])):
        target, last = np.unique(index[::-1], return_index=True)
        source = index.size - 1 - last
        maps.append(IndexMap(source if length == index.size else np.zeros_like(source), target))
    transfer(ctx, value, A, maps[0], maps[1])


@routine(writes=("A",))
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
    DtypeError
        If A cannot hold an element, see `astype`.
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
        chosen = local.astype(bool, copy=False)
        np.copyto(A.local, castable(ctx, number, A.dtype), where=chosen, casting="unsafe")
        return
    rows = ctx.to_layout(A, "VC_STAR")
    numbers, count = numbered(ctx, ctx.to_layout(mask, "VC_STAR"))
    require(
        value.shape == (count, 1) and value.ndim == 1,
        "ShapeError",
        f"a value of shape {value.array_shape} for {count} selected elements",
    )
    values = castable(ctx, ctx.to_layout(value, "STAR_STAR").local.reshape(-1), A.dtype)
    chosen = numbers >= 0
    block(rows)[chosen] = values[numbers[chosen]]
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


def _require_mask(A: DistMatrix, mask: DistMatrix) -> None:
    require(
        mask.array_shape == A.array_shape,
        "BadIndexError",
        f"a mask of shape {mask.array_shape} for an array of shape {A.array_shape}",
    )
