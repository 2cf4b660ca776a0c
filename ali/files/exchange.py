"""Boxes of a file and the ranks: which rank reads or writes which box, and the exchange over MPI.

Where it is less work, every rank reads its own elements.

In a round every rank has one box. The owners of its elements follow from arithmetic on ranges, as
in `mpi_workers.matrix.redistribution`, so no index is sent. Each rank reads contiguous parts of the
file whatever the layout, and needs three boxes of memory besides its part of the matrix: one
that it reads, one to send, one to receive.

Every rank computes all of it from the matrix's shape and the file's grain, so nothing is sent.

Rounding to fewer digits is allowed. A number that the dtype cannot hold is an error: NumPy's
casts would wrap integers and turn large floats into infinities.

Ranks on one node share its page cache: bytes that one rank has read from the disk are there for
all, and a rank that skips the others' rows copies no extra byte. Between nodes, and for elements
that are scattered one by one, ranks read contiguous boxes and exchange them (`exchange.scatter`).
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise, zip_longest
from typing import Any, Protocol, TypeGuard, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from ali.files.formats import About, Box, Grain, Pick, Source
from ali.files.paths import together
from ali.interface import Context
from mpi_workers.failures import Failure
from mpi_workers.matrix import copy_kernels
from mpi_workers.matrix.dist_matrix import DistMatrix
from mpi_workers.matrix.dtypes import check_range, narrows
from mpi_workers.matrix.layout import (
    IndexArray,
    Indices,
    LocalIndices,
    Shape,
    as_slice,
    clip,
    positions,
    selector,
    stored_shape,
)
from mpi_workers.matrix.pairwise import NOTHING, Buffers, Order, Share, exchange, serves

PIECE = 16 << 20  # 16 MiB: sequential for a disk, small next to a rank's part
SEVERAL = 4  # least number of boxes per rank: one more or less is a small imbalance
HULL = 4  # indices in a range of this many times their number are read with the gaps


def share(count: int, rank: int, size: int) -> range:
    """The contiguous part of `count` items that a rank of `size` has."""
    return range(count * rank // size, count * (rank + 1) // size)


def cut(shape: Shape, itemsize: int, size: int, grain: Grain) -> list[Box]:
    """Boxes of about `PIECE` bytes, in the file's order, that tile a matrix along its grain.

    No chunk lies in two boxes. Each rank has several boxes where the chunks allow.
    """
    if grain.by_columns:
        turned = cut(shape[::-1], itemsize, size, Grain(grain.cols, grain.rows))
        return [Box(box.cols, box.rows) for box in turned]
    m, n = shape
    if not m or not n:
        return []
    fair = -(-m // (SEVERAL * size))
    boxes = []
    bands = _bands(m, fair, n * itemsize, grain)
    for start, stop in bands:
        width = n
        if grain.columns_apart:
            width = _width(n, (stop - start) * itemsize, len(bands), size)
        elif (stop - start) * n * itemsize > 2 * PIECE:
            width = max(1, PIECE // ((stop - start) * itemsize * grain.cols)) * grain.cols
        for col in range(0, n, width):
            boxes.append(Box(range(start, stop), range(col, min(col + width, n))))
    return boxes


def _width(n: int, column_bytes: int, bands: int, size: int) -> int:
    """Columns of a box of about `PIECE` bytes; ranks have equally many boxes of few bands."""
    count = -(-n * column_bytes // PIECE)
    if bands < SEVERAL * size:
        fair = size // math.gcd(size, bands)
        count = -(-max(1, count) // fair) * fair
    return -(-n // min(n, count))


def _bands(m: int, fair: int, row_bytes: int, grain: Grain) -> list[tuple[int, int]]:
    """Half-open bands of rows: whole chunks of about `PIECE` bytes, or of `fair` rows if fewer."""
    most = max(1, min(fair, PIECE // max(1, row_bytes)))
    if grain.bands is None:
        height = max(1, most // grain.rows) * grain.rows
        return [(a, min(a + height, m)) for a in range(0, m, height)]
    found = []
    starts = [*grain.bands, m]
    first = starts[0]
    for here, after in pairwise(starts[1:]):
        if after - first > most:
            found.append((first, here))
            first = here
    found.append((first, m))
    return [(a, b) for a, b in found if b > a]


def chosen(grain: Grain, rows: Pick, cols: Pick, shape: Shape) -> Grain:
    """The grain of a matrix of some rows and columns of a file."""
    if len(cols) != shape[1] or not _is_run(cols):
        grain = grain._replace(cols=1)
    if _is_run(rows) and len(rows) == shape[0]:
        return grain
    if grain.bands is None and grain.rows == 1:
        return grain
    index = np.asarray(rows, np.int64)
    chunk = (
        index // grain.rows
        if grain.bands is None
        else np.searchsorted(np.asarray(grain.bands), index, "right")
    )
    starts = [0, *(np.flatnonzero(np.diff(chunk)) + 1).tolist()]
    return grain._replace(rows=1, bands=starts)


def _is_run(pick: Pick) -> TypeGuard[range]:
    return isinstance(pick, range) and pick.step == 1


def runs(pick: Pick) -> list[tuple[slice, range, Any]]:
    """Contiguous ranges to read for these indices: target, range to read, selection from it.

    Close indices are read together with the gaps between them.
    """
    if _is_run(pick):
        return [(slice(0, len(pick)), pick, slice(None))]
    index = np.asarray(pick, np.int64)
    low, high = int(index.min()), int(index.max()) + 1
    if high - low <= HULL * len(index):
        return [(slice(0, len(index)), range(low, high), index - low)]
    breaks = [0, *(np.flatnonzero(np.diff(index) != 1) + 1).tolist(), len(index)]
    return [
        (slice(a, b), range(int(index[a]), int(index[b - 1]) + 1), slice(None))
        for a, b in pairwise(breaks)
    ]


def gathered(read: Callable[[range, range], Array], rows: Pick, cols: Pick) -> Array:
    """Any rows and columns, through a function that reads contiguous ranges of both."""
    down, across = runs(rows), runs(cols)
    if len(down) == len(across) == 1:
        (_, these_rows, keep_rows), (_, these_cols, keep_cols) = down[0], across[0]
        found: Array = read(these_rows, these_cols)[keep_rows][:, keep_cols]
        return found
    out: Array | None = None
    for to_rows, these_rows, keep_rows in down:
        for to_cols, these_cols, keep_cols in across:
            part = read(these_rows, these_cols)[keep_rows][:, keep_cols]
            if out is None:
                out = np.empty((len(rows), len(cols)), part.dtype)
            out[to_rows, to_cols] = part
    assert out is not None  # neither is empty
    return out


class ArraySource:
    """A source for an array of a library that reads regions of it, as h5py and zarr do.

    `opened` is closed with it.
    """

    def __init__(self, array: Any, opened: contextlib.ExitStack | None = None) -> None:
        self._array = array
        self._opened = opened or contextlib.ExitStack()

    def about(self, dtype: np.dtype[Any] | None, cols: Pick | None) -> About:
        return About(tuple(self._array.shape), np.dtype(self._array.dtype), self.grain())

    def grain(self) -> Grain:
        # A sharded array of Zarr is read shard by shard. A contiguous one of HDF5 has no chunks.
        chunks = getattr(self._array, "shards", None) or self._array.chunks or (1, 1)
        rows, cols = stored_shape(chunks)
        return Grain(rows, stored_shape(self._array.shape)[1] if self._array.ndim > 2 else cols)

    def read(self, rows: Pick, cols: Pick) -> Array:
        return gathered(self._region, rows, cols)

    def _region(self, rows: range, cols: range) -> Array:
        down = slice(rows.start, rows.stop)
        if self._array.ndim < 2:
            column = self._array[down] if self._array.ndim else self._array[()]
            return np.reshape(np.asarray(column), (-1, 1))
        if self._array.ndim > 2:  # whole rows: all of the other axes
            return np.asarray(self._array[down]).reshape(len(rows), -1)[:, cols.start : cols.stop]
        return np.asarray(self._array[down, cols.start : cols.stop])

    def close(self) -> None:
        self._opened.close()


Array = NDArray[Any]


EMPTY = Box(range(0), range(0))


def rounds(ctx: Context, boxes: Sequence[Box]) -> list[tuple[Box, ...]]:
    """For each round the boxes of all ranks; `EMPTY` for those that have no more."""
    shares = (share(len(boxes), rank, ctx.size) for rank in range(ctx.size))
    parts = ([boxes[i] for i in mine] for mine in shares)
    return list(zip_longest(*parts, fillvalue=EMPTY))


def scatter(
    ctx: Context,
    matrix: DistMatrix,
    boxes: Sequence[Box],
    read: Callable[[Box], Array],
    path: str,
    rows: NDArray[np.int64] | None = None,
    order: Order = "C",
) -> None:
    """Fill a matrix with boxes that the ranks read. Collective.

    Parameters
    ----------
    read : callable
        Returns a box's elements, in any order and any dtype that casts to the matrix's. May raise.
    path : str
        For messages.
    rows : ndarray, optional
        Row i of the boxes is row ``rows[i]`` of the matrix. Default: row i.
    order : str
        In which elements are sent: the order of most boxes, and the same on all ranks.

    Notes
    -----
    Elements are cast by the reading rank, and cross the network once per copy of the layout.
    """
    every = rounds(ctx, boxes)
    buffers = Buffers()
    for number, those in enumerate(every, 1):
        ctx.check()
        mine = those[ctx.rank]
        values = together(ctx, path, partial(_read, read, mine))

        def outgoing(rank: int, box: Box = mine, found: Array = values) -> Share:
            return _in_box(box, found, matrix, rank, rows)

        def incoming(rank: int, those: tuple[Box, ...] = those) -> Share:
            return _in_matrix(those[rank], matrix, rows)

        exchange(ctx.comm, matrix.dtype, outgoing, incoming, order, buffers)
        ctx.progress(number / len(every), f"box {number} of {len(every)}")


def _read(read: Callable[[Box], Array], box: Box) -> Array:
    return read(box) if box.rows else NOTHING.array


def gather(
    ctx: Context,
    matrix: DistMatrix,
    boxes: Sequence[Box],
    write: Callable[[Box, Array], None],
    path: str,
) -> None:
    """Pass a matrix to `write` in boxes: each rank its own, C-ordered, in order. Collective."""
    every = rounds(ctx, boxes)
    buffers = Buffers()
    group_of = {member: group for group in matrix.distribution.owners() for member in group}
    for number, those in enumerate(every, 1):
        ctx.check()
        mine = those[ctx.rank]
        whole = buffers.take("box", mine.shape, matrix.dtype)

        def outgoing(rank: int, those: tuple[Box, ...] = those) -> Share:
            box = those[rank] if serves(group_of, ctx.rank, rank) else EMPTY
            return _in_matrix(box, matrix)

        def incoming(rank: int, box: Box = mine, room: Array = whole) -> Share:
            served = box if serves(group_of, rank, ctx.rank) else EMPTY
            return _in_box(served, room, matrix, rank)

        exchange(ctx.comm, matrix.dtype, outgoing, incoming, "C", buffers)

        def done(box: Box = mine, values: Array = whole) -> None:
            if box.rows:
                write(box, values)

        together(ctx, path, done)
        ctx.progress(number / len(every), f"box {number} of {len(every)}")


def _in_box(
    box: Box,
    values: Array,
    matrix: DistMatrix,
    rank: int,
    rows: NDArray[np.int64] | None = None,
) -> Share:
    """The elements of this rank's box that are in the part of `rank` of the matrix."""
    here, cols, at = _common(box, matrix, rank, rows)
    down = selector(here, box.rows.start) if at is None else at
    return Share(values, down, selector(cols, box.cols.start))


def _in_matrix(box: Box, matrix: DistMatrix, rows: NDArray[np.int64] | None = None) -> Share:
    """The elements of a box that are in this rank's part of the matrix."""
    both = matrix.distribution.runs(matrix.rank)
    if both is None:
        return NOTHING
    here, cols, at = _common(box, matrix, matrix.rank, rows)
    down: slice | IndexArray = positions(matrix.rows, here)
    if at is not None and rows is not None:
        down = both[0].positions(rows[as_slice(box.rows)][at])
    return Share(matrix.stored, down, positions(matrix.cols, cols))


def _common(
    box: Box, matrix: DistMatrix, rank: int, rows: NDArray[np.int64] | None
) -> tuple[Indices, Indices, IndexArray | None]:
    """The rows and columns of the matrix that are in a box and in the part of a rank.

    With `rows` (see `scatter`) no rows, but their positions in the box.
    """
    part, both = matrix.distribution.local_indices(rank), matrix.distribution.runs(rank)
    cols = clip(part.cols, box.cols.start, box.cols.stop)
    if rows is None or both is None:
        return clip(part.rows, box.rows.start, box.rows.stop), cols, None
    return range(0), cols, np.flatnonzero(both[0].holds(rows[as_slice(box.rows)]))


def fitting(values: Array, dtype: np.dtype[Any], path: str) -> Array:
    """The elements, in `dtype` if that cannot hold every element of theirs.

    Raises
    ------
    Failure
        DtypeError, if one is out of range; names it.
    """
    try:
        check_range(values, dtype, path)
    except ValueError as error:
        raise Failure("DtypeError", str(error)) from None
    return values.astype(dtype) if narrows(values.dtype, dtype) else values


# Work of an element that is read, packed, sent, received and placed, over the work of one that is
# only read; measured.
EXCHANGE = 3
DIRECT_PIECE = 64 << 20  # 64 MiB read straight into the matrix before the call is checked again
# Rows of a piece are a multiple: the copy kernel writes whole runs, and whole cache lines. With
# pieces of 16 MiB and any number of rows, a rank needed 1.2 times the CPU time.
LINES = 512


@runtime_checkable
class Direct(Source, Protocol):
    """A source that can read scattered elements straight into a matrix."""

    def take(self, rows: range, cols: range, target: Array) -> None:
        """These elements (ranges of positive step) into an array of any strides and dtype."""

    def toll(self, rows: range, cols: range) -> int:
        """Bytes of the file that `take` reads for these elements."""


def pays(
    source: Source, matrix: DistMatrix, rows: Pick, cols: Pick, ranks: int
) -> TypeGuard[Direct]:
    """Whether each rank of a node should read its own part. The same on all ranks."""
    if not isinstance(source, Direct):
        return False
    if not (isinstance(rows, range) and isinstance(cols, range)) or min(rows.step, cols.step) < 1:
        return False
    held = read = 0
    for rank in range(ranks):
        local_indices = matrix.distribution.local_indices(rank)
        if local_indices.size:
            in_file = _in_file(local_indices, rows, cols)
            if in_file is None:
                return False
            held += local_indices.size
            read += source.toll(*in_file)
    return read <= EXCHANGE * held * source.about(None, None).dtype.itemsize


def fill(
    ctx: Context, matrix: DistMatrix, source: Direct, rows: range, cols: range, path: str
) -> None:
    """Fill a matrix, each rank its own part. Collective.

    Parameters
    ----------
    rows, cols : range
        The rows and columns of the file that are loaded.
    path : str
        For messages.

    Notes
    -----
    No messages except at the end; 4 MiB of memory besides the matrix, and a piece of 16 MiB if
    the dtype becomes narrower.
    """
    mine = matrix.distribution.local_indices(ctx.rank)
    wanted = _in_file(mine, rows, cols) if mine.size else None

    def work() -> None:
        if wanted is not None:
            _fill(ctx, matrix, source, wanted, path)

    together(ctx, path, work)


def _fill(
    ctx: Context, matrix: DistMatrix, source: Direct, in_file: tuple[range, range], path: str
) -> None:
    about = source.about(None, None)
    checked = narrows(about.dtype, matrix.dtype)
    # Along the lines of the file, so that a piece of the work is contiguous in the file.
    axis = 1 if about.grain.by_columns else 0
    count = len(in_file[axis])
    nbytes = matrix.stored.size * matrix.dtype.itemsize
    step = max(1, (PIECE if checked else DIRECT_PIECE) * count // nbytes)
    step -= step % LINES if step > LINES else 0
    for start in range(0, count, step):
        ctx.check()
        part = slice(start, min(start + step, count))
        pick = (part, slice(None)) if axis == 0 else (slice(None), part)
        target = matrix.stored[pick]
        room = np.empty(target.shape, about.dtype.newbyteorder("=")) if checked else target
        source.take(in_file[0][pick[0]], in_file[1][pick[1]], room)
        if checked:
            copy_kernels.copy(target, fitting(room, matrix.dtype, path))
        ctx.progress(part.stop / count, f"{part.stop} of {count} {('rows', 'columns')[axis]}")


def _in_file(local_indices: LocalIndices, rows: range, cols: range) -> tuple[range, range] | None:
    """A rank's rows and columns in the file; None if they are not ranges."""
    r, c = local_indices.rows, local_indices.cols
    if not (isinstance(r, range) and isinstance(c, range)):
        return None
    return rows[r.start : r.stop : r.step], cols[c.start : c.stop : c.step]
