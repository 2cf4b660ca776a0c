"""Elements in another order, repeated, or with another number of dimensions; outer products."""

from __future__ import annotations

import numpy as np

from ali.arrays.ordering import flattened, replied
from ali.blocks import Array, require
from ali.interface import Context, routine
from ali.linalg import arithmetic
from ali.linalg.indexing import taken
from ali.linalg.products import operand
from mpi_workers.matrix.available_memory import available_bytes
from mpi_workers.matrix.dist_matrix import DistMatrix
from mpi_workers.matrix.layout import stored_shape
from mpi_workers.matrix.memory import UNCHECKED_BYTES
from mpi_workers.matrix.sizes import readable


@routine("B")
def roll(ctx: Context, A: DistMatrix, shifts: list[int]) -> DistMatrix:
    """Shift elements along the axes; those that leave at an end come back at the other.

    Parameters
    ----------
    A : array
    shifts : list of int
        One for each axis of A.

    Returns
    -------
    B : array, shape and dtype of A

    Notes
    -----
    Each element crosses the network at most once per copy in the layout.
    """
    index = [
        (np.arange(n, dtype=np.int64) - by) % max(1, n)
        for n, by in zip(A.shape, (*shifts, 0, 0), strict=False)
    ]
    return _taken(ctx, A, index[0], index[1]).with_ndim(A.ndim)


@routine("B")
def repeat(ctx: Context, A: DistMatrix, repeats: DistMatrix, axis: int | None = None) -> DistMatrix:
    """Repeat each element, row (axis 0) or column (1).

    Parameters
    ----------
    A : array
    repeats : vector of integers
        How often; one for each, or one for all.
    axis : int, optional
        None: of all elements, in C order.

    Returns
    -------
    B : array, dtype of A; a vector if axis is None

    Raises
    ------
    ShapeError
        If the number of repeats does not fit, or one is negative.

    Notes
    -----
    As `roll`; every rank has the repeats.
    """
    if A.ndim == 2 and axis is None:
        A = flattened(ctx, A)
    along = axis if A.ndim == 2 and axis is not None else 0
    times = ctx.to_layout(repeats, "STAR_STAR").local.reshape(-1)
    length = A.shape[along]
    require(
        times.size in (1, length) and times.min(initial=0) >= 0,
        "ShapeError",
        f"repeat: repeats has {times.size} elements; it must have 1 or {length}, all >= 0",
    )
    check_indices(ctx, int(times.sum()) * (length if times.size == 1 else 1))
    index = [np.arange(n, dtype=np.int64) for n in A.shape]
    index[along] = np.repeat(index[along], times if times.size != 1 else int(times[0]))
    return _taken(ctx, A, index[0], index[1]).with_ndim(max(1, A.ndim))


@routine("B")
def tile(ctx: Context, A: DistMatrix, times: list[int], ndim: int) -> DistMatrix:
    """Repeat the whole array along its axes.

    Parameters
    ----------
    A : array
        A vector of which a matrix is wanted is a row.
    times : list of int
        Along the rows and columns.
    ndim : int
        Dimensions of the result.

    Returns
    -------
    B : array, dtype of A

    Notes
    -----
    As `roll`.
    """
    source = operand(A, "T") if A.ndim == 1 and ndim == 2 else A
    check_indices(ctx, sum(n * k for n, k in zip(source.shape, times, strict=True)))
    index = [
        np.tile(np.arange(n, dtype=np.int64), k) for n, k in zip(source.shape, times, strict=True)
    ]
    return _taken(ctx, source, index[0], index[1]).with_ndim(ndim)


@routine("B", any_axes=True)
def broadcast(ctx: Context, A: DistMatrix, shape: list[int]) -> DistMatrix:
    """A copy in a larger shape, to which A broadcasts.

    Parameters
    ----------
    A : array
    shape : list of int

    Returns
    -------
    B : array of that shape, dtype of A

    Raises
    ------
    ShapeError
        If A does not broadcast to it.

    Notes
    -----
    As `roll`.
    """
    try:
        fits = np.broadcast_shapes(A.array_shape, shape) == tuple(shape)
    except ValueError:
        fits = False
    require(fits, "ShapeError", f"an array of shape {A.array_shape} does not broadcast to {shape}")
    if len(shape) > 2:
        zeros = ctx.zeros(shape, A.dtype)
        return arithmetic.where(ctx, ctx.new_replicated(np.ones((), bool)), A, zeros)
    source = operand(A, "T") if A.ndim == 1 and len(shape) == 2 else A
    check_indices(ctx, sum(stored_shape(shape)))
    index = [
        np.arange(n, dtype=np.int64) if n == have else np.zeros(n, np.int64)
        for n, have in zip(stored_shape(shape), source.shape, strict=True)
    ]
    return _taken(ctx, source, index[0], index[1]).with_ndim(len(shape))


def check_indices(ctx: Context, count: int) -> None:
    """Raise `Failure` (ResourceError) unless there is room for lists of `count` indices.

    On this rank: NumPy would allocate them, and the kernel end the gang later.
    """
    nbytes = 4 * 8 * count
    if nbytes <= UNCHECKED_BYTES:
        return
    left = available_bytes()
    require(
        nbytes <= left,
        "ResourceError",
        f"rank {ctx.rank} needs {readable(nbytes)} for {count} indices, and its node has "
        f"{readable(left)} left: make a smaller array, or request workers on more nodes",
    )


def _taken(ctx: Context, A: DistMatrix, rows: Array, cols: Array) -> DistMatrix:
    layout = "VC_STAR" if A.layout == "STAR_STAR" else A.layout
    return replied(ctx, taken(ctx, A, rows, cols, layout))


@routine("C")
def outer(ctx: Context, op: str, A: DistMatrix, B: DistMatrix) -> DistMatrix:
    """``op(a, b)`` for every element a of one vector and b of another.

    Parameters
    ----------
    op : str
        See `elementwise` of linalg.
    A, B : arrays
        Of (m, n) elements; matrices are taken in C order.

    Returns
    -------
    C : matrix, shape (m, n)

    Raises
    ------
    BadArgumentError, DtypeError
        As `elementwise`.

    Notes
    -----
    One pass; the smaller vector goes to all ranks.
    """
    left, right = flattened(ctx, A), flattened(ctx, B)
    return arithmetic.elementwise(ctx, op, left.with_ndim(2), operand(right, "T"))
