"""Rows, columns, slices, triangles and diagonals of matrices; copies between selections.

Every rank knows all indices and computes which elements it sends and receives: no indices are sent.
"""

from __future__ import annotations

import builtins
from typing import NamedTuple

import numpy as np

from ali.blocks import Array, block, keep_triangle, require, shape_text
from ali.interface import Context, routine
from ali.linalg.collectives import sum_over_ranks
from mpi_workers.matrix.dist_matrix import DistMatrix
from mpi_workers.matrix.layout import Distribution, Runs, Shape, as_array, evenly
from mpi_workers.matrix.pairwise import NOTHING, Share, exchange, serves


class IndexMap(NamedTuple):
    """Index ``source[k]`` of one matrix is copied to index ``target[k]`` of the other (int64).

    Of a target that is a range, those of a rank are found without a comparison.
    """

    source: Array
    target: Array | range


def transfer(
    ctx: Context, source: DistMatrix, target: DistMatrix, rows: IndexMap, cols: IndexMap
) -> None:
    """``target[rows.target, cols.target] = source[rows.source, cols.source]``. Collective.

    Both have the same dtype and any layouts; no element of the target may occur twice.
    Each element crosses the network at most once per copy in the target's layout. Memory: two
    messages of 16 MiB, and the indices.
    """
    me = ctx.rank
    groups = {member: group for group in source.distribution.owners() for member in group}
    giving = [
        _narrow(w.source, w, owned) for w, owned in _pairs(rows, cols, source.distribution, me)
    ]
    taking = [
        _narrow(w.target, w, owned) for w, owned in _pairs(rows, cols, target.distribution, me)
    ]

    def outgoing(taker: int) -> Share:
        ctx.check()
        if not serves(groups, me, taker):
            return NOTHING
        return _selection(giving, target.distribution, taker, True, source)

    def incoming(giver: int) -> Share:
        if not serves(groups, giver, me):
            return NOTHING
        return _selection(taking, source.distribution, giver, False, target)

    exchange(ctx.comm, source.dtype, outgoing, incoming, "F")


def _pairs(
    rows: IndexMap, cols: IndexMap, distribution: Distribution, rank: int
) -> list[tuple[IndexMap, Runs | None]]:
    down, across = distribution.runs(rank) or (None, None)
    return [(rows, down), (cols, across)]


def _narrow(side: Array | range, index_map: IndexMap, owned: Runs | None) -> IndexMap:
    """The part of a map whose `side` is among the indices that a rank owns."""
    source, target = index_map
    if owned is None:
        return IndexMap(source[:0], target[:0])
    if owned.width == owned.period:
        return index_map
    if isinstance(side, range):
        if owned.width == 1 and (side.start, side.step) == (0, 1):
            return IndexMap(source[owned.first :: owned.period], side[owned.first :: owned.period])
        side = as_array(side)
    places = np.flatnonzero(owned.holds(side))  # a quarter of the time of a mask
    if isinstance(target, range):
        return IndexMap(source[places], target.start + target.step * places)
    return IndexMap(source[places], target[places])


def _selection(
    maps: list[IndexMap], other: Distribution, rank: int, giving: bool, matrix: DistMatrix
) -> Share:
    """The elements of this rank's part that go to, or come from, another rank."""
    theirs = other.runs(rank) or (None, None)
    mine = matrix.distribution.runs(matrix.rank)
    found = []
    if mine is None:
        return NOTHING
    for index_map, owned, runs in zip(maps, theirs, mine, strict=True):
        part = _narrow(index_map.target if giving else index_map.source, index_map, owned)
        side = part.source if giving else part.target
        found.append(evenly(runs.positions(as_array(side) if isinstance(side, range) else side)))
    return Share(matrix.stored, *found)


@routine("B")
def slice(
    ctx: Context,
    A: DistMatrix,
    row_start: int | None = None,
    row_stop: int | None = None,
    row_step: int | None = None,
    col_start: int | None = None,
    col_stop: int | None = None,
    col_step: int | None = None,
) -> DistMatrix:
    """``A[row_start:row_stop:row_step, col_start:col_stop:col_step]``.

    Parameters
    ----------
    A : matrix, shape (m, n)
    row_start, row_stop, row_step, col_start, col_stop, col_step : int, optional
        As in a Python slice: negative indices count from the end, steps may be negative, and
        indices beyond the end are cut off.

    Returns
    -------
    B : matrix, dtype and layout of A
        A copy.

    Raises
    ------
    BadArgumentError
        If a step is 0.

    Notes
    -----
    Each element crosses the network at most once per copy in the layout; none does if step and
    start are multiples of the stride of the layout. Memory in addition to B: two messages of
    16 MiB, and 32 bytes for each row and column of B.

    Error: 0 eps. Peak memory: 1.8 times arguments and results.
    """
    steps = (row_step, col_step)
    require(0 not in steps, "BadArgumentError", f"slice: steps are {steps}; a step cannot be 0")
    rows = builtins.slice(row_start, row_stop, row_step).indices(A.shape[0])
    cols = builtins.slice(col_start, col_stop, col_step).indices(A.shape[1])
    return taken(ctx, A, np.arange(*rows), np.arange(*cols))


@routine("B")
def take_rows(ctx: Context, A: DistMatrix, rows: list[int]) -> DistMatrix:
    """The rows with these indices, in this order: ``A[rows]``.

    Parameters
    ----------
    A : matrix, shape (m, n)
    rows : list of int
        Each from -m to m - 1 (negative: from the end). Repetition is allowed.

    Returns
    -------
    B : matrix, shape (len(rows), n), dtype and layout of A

    Raises
    ------
    BadArgumentError
        If an index is out of range.

    Notes
    -----
    As `slice`; every rank has the list.

    Error: 0 eps. Peak memory: 1.0 times arguments and results.
    """
    index = _indices("take_rows", rows, A.shape[0], "rows")
    return taken(ctx, A, rows=index)


@routine("B")
def take_cols(ctx: Context, A: DistMatrix, cols: list[int]) -> DistMatrix:
    """The columns with these indices, in this order: ``A[:, cols]``.

    Parameters
    ----------
    A : matrix, shape (m, n)
    cols : list of int
        Each from -n to n - 1 (negative: from the end). Repetition is allowed.

    Returns
    -------
    B : matrix, shape (m, len(cols)), dtype and layout of A

    Raises
    ------
    BadArgumentError
        If an index is out of range.

    Notes
    -----
    As `slice`; every rank has the list.

    Error: 0 eps. Peak memory: 1.6 times arguments and results.
    """
    index = _indices("take_cols", cols, A.shape[1], "columns")
    return taken(ctx, A, cols=index)


@routine("B")
def select_rows(ctx: Context, A: DistMatrix, mask: DistMatrix) -> DistMatrix:
    """The rows where a mask is not zero: ``A[mask]``.

    Parameters
    ----------
    A : matrix, shape (m, n)
    mask : matrix, shape (m, 1)
        For example the result of a comparison.

    Returns
    -------
    B : matrix, dtype and layout of A

    Raises
    ------
    ShapeError
        If the mask has another shape.

    Notes
    -----
    As `slice`; every rank receives the mask, m words.

    Error: 0 eps. Peak memory: 1.8 times arguments and results.
    """
    return taken(ctx, A, rows=_marked(ctx, "select_rows", A, mask, (A.shape[0], 1)))


@routine("B")
def select_cols(ctx: Context, A: DistMatrix, mask: DistMatrix) -> DistMatrix:
    """The columns where a mask is not zero: ``A[:, mask]``.

    Parameters
    ----------
    A : matrix, shape (m, n)
    mask : matrix, shape (1, n)
        For example the result of a comparison.

    Returns
    -------
    B : matrix, dtype and layout of A

    Raises
    ------
    ShapeError
        If the mask has another shape.

    Notes
    -----
    As `slice`; every rank receives the mask, n words.

    Error: 0 eps. Peak memory: 1.8 times arguments and results.
    """
    return taken(ctx, A, cols=_marked(ctx, "select_cols", A, mask, (1, A.shape[1])))


@routine("C", any_axes=True)
def concatenate(ctx: Context, A: DistMatrix, B: DistMatrix, axis: int = 0) -> DistMatrix:
    """B below A (``axis=0``), or B to the right of A (1).

    Parameters
    ----------
    A, B : matrices
        With equal numbers of columns (``axis=0``) or rows (1); any layouts and dtypes.
    axis : int

    Returns
    -------
    C : matrix, NumPy's common dtype, layout of the larger operand

    Raises
    ------
    ShapeError
        If the shapes do not match.
    BadArgumentError
        If axis is neither 0 nor 1.

    Notes
    -----
    Each element crosses the network at most once per copy in the layout. If dtypes differ, one
    operand is first copied locally.

    Error: 0 eps. Peak memory: 1.2 times arguments and results.
    """
    require(axis in (0, 1), "BadArgumentError", f"concatenate: axis={axis} is neither 0 nor 1")
    require(
        A.ndim == B.ndim and axis < A.ndim,
        "ShapeError",
        f"concatenate: A is {shape_text(A)} and B is {shape_text(B)}; both must have "
        "two dimensions" + (", or both one" if axis == 0 else ""),
    )
    other = 1 - axis
    same = A.ndim < 3 or (axis == 0 and A.array_shape[1:] == B.array_shape[1:])
    require(
        same and A.shape[other] == B.shape[other],
        "ShapeError",
        f"concatenate: A is {shape_text(A)} and B is {shape_text(B)}; their numbers of "
        f"{'columns' if axis == 0 else 'rows'} must match",
    )
    dtype = np.result_type(A.dtype, B.dtype)
    shape = [A.shape[0], A.shape[1]]
    shape[axis] += B.shape[axis]
    layout = A.layout if A.nbytes >= B.nbytes else B.layout
    C = ctx.empty((shape[0], shape[1]), dtype, layout)
    offset = 0
    for part in (A, B):
        converted = part
        if part.dtype != dtype:
            converted = ctx.empty(part.shape, dtype, part.layout)
            converted.stored[...] = part.stored
        maps = [IndexMap(np.arange(n), range(n)) for n in part.shape]
        maps[axis] = IndexMap(maps[axis].source, maps[axis].source + offset)
        transfer(ctx, converted, C, maps[0], maps[1])
        offset += part.shape[axis]
    return C.with_shape((C.shape[0], *A.array_shape[1:])) if A.ndim > 2 else C.with_ndim(A.ndim)


@routine("B")
def triu(ctx: Context, A: DistMatrix, k: int = 0) -> DistMatrix:
    """Upper triangle: a copy of A with zeros below the k-th diagonal.

    Parameters
    ----------
    A : matrix, shape (m, n)
    k : int
        0: the main diagonal; above it k > 0, below it k < 0.

    Returns
    -------
    B : matrix, shape (m, n), dtype and layout of A

    Notes
    -----
    One local copy, no communication, no temporary.

    Error: 0 eps. Peak memory: 1.0 times arguments and results.
    """
    return keep_triangle(_copied(ctx, A), lower=False, k=k)


@routine("B")
def tril(ctx: Context, A: DistMatrix, k: int = 0) -> DistMatrix:
    """Lower triangle: a copy of A with zeros above the k-th diagonal.

    Parameters
    ----------
    A : matrix, shape (m, n)
    k : int
        0: the main diagonal; above it k > 0, below it k < 0.

    Returns
    -------
    B : matrix, shape (m, n), dtype and layout of A

    Notes
    -----
    One local copy, no communication, no temporary.

    Error: 0 eps. Peak memory: 1.0 times arguments and results.
    """
    return keep_triangle(_copied(ctx, A), lower=True, k=k)


@routine("D")
def diagonal(ctx: Context, A: DistMatrix) -> DistMatrix:
    """The main diagonal as a column.

    Parameters
    ----------
    A : matrix, shape (m, n)

    Returns
    -------
    D : matrix, shape (min(m, n), 1), dtype of A, STAR_STAR

    Notes
    -----
    ``min(m, n)`` words in ``2 log2(ranks)`` messages.

    Error: 0 eps. Peak memory: 1.0 times arguments and results.
    """
    return ctx.new_replicated(diagonal_of(ctx, A))


@routine("trace")
def trace(ctx: Context, A: DistMatrix) -> complex:
    """Sum of the main diagonal, in double precision.

    Parameters
    ----------
    A : matrix, shape (m, n)

    Returns
    -------
    trace : complex
        With an imaginary part of 0 if A is real.

    Notes
    -----
    As `diagonal`.

    Error: 0 eps. Peak memory: 1.0 times arguments and results.
    """
    return complex(diagonal_of(ctx, A).sum(dtype=np.complex128))


def _copied(ctx: Context, A: DistMatrix) -> DistMatrix:
    B = ctx.empty_like(A)
    B.local[...] = A.local
    return B


def diagonal_of(ctx: Context, A: DistMatrix) -> Array:
    """The main diagonal, whole on every rank. Collective."""
    found = np.zeros(min(A.shape), A.dtype)
    # One rank of each group of copies.
    if any(group[0] == ctx.rank for group in A.distribution.owners()):
        local = block(A)
        for j, col in enumerate(A.cols):
            if col in A.rows:
                found[col] = local[A.rows.index(col), j]
    return sum_over_ranks(ctx.comm, found)


def taken(
    ctx: Context,
    A: DistMatrix,
    rows: Array | None = None,
    cols: Array | None = None,
    layout: str = "",
) -> DistMatrix:
    """Some rows and columns (None: all of them) in a new matrix, by default in A's layout."""
    down, across = (
        np.arange(length) if index is None else index
        for index, length in zip((rows, cols), A.shape, strict=True)
    )
    B = ctx.empty((down.size, across.size), A.dtype, layout or A.layout)
    maps = [IndexMap(index, range(index.size)) for index in (down, across)]
    transfer(ctx, A, B, maps[0], maps[1])
    return B


def _marked(ctx: Context, name: str, A: DistMatrix, mask: DistMatrix, shape: Shape) -> Array:
    """Where a mask, which must have this shape, is not zero."""
    require(
        mask.shape == shape,
        "ShapeError",
        f"{name}: the mask is {shape_text(mask)} and A is {shape_text(A)}; it must be "
        f"{shape[0]} x {shape[1]}",
    )
    return np.flatnonzero(ctx.to_layout(mask, "STAR_STAR").local)


def _indices(name: str, given: list[int], length: int, what: str) -> Array:
    index = np.array(given, np.int64)
    wrong = index[(index < -length) | (index >= length)]
    require(
        not wrong.size,
        "BadArgumentError",
        f"{name}: A has {length} {what}, and index {sum(wrong[:1])} is out of range",
    )
    return np.where(index < 0, index + length, index)
