"""Fetches a matrix, or a part of it, into a NumPy array of this process."""

from __future__ import annotations

import os
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from alchemist_ray.attached.connection import GangConnection
from alchemist_ray.attached.matrix_ref import MatrixRef
from alchemist_ray.attached.progress import say, times_table, transfer_bar
from alchemist_ray.errors import (
    BadIndexError,
    ShapeError,
    from_failure,
)
from alchemist_ray.measures import events
from alchemist_ray.transfer.watching import counted, repeated, watched
from mpi_workers.data.description import NodeTimes, TransferTarget
from mpi_workers.data.transfers import MatrixReader
from mpi_workers.failures import Failure
from mpi_workers.matrix.layout import Distribution
from mpi_workers.matrix.node_shares import Region
from mpi_workers.matrix.sparse_rows import of_layout


def fetch(
    connection: GangConnection,
    ref: MatrixRef,
    rows: slice | int | None = None,
    cols: slice | int | None = None,
    *,
    print_times: bool = False,
) -> NDArray[Any]:
    """The elements as a C-ordered array; see `Handle.fetch`."""
    return repeated(lambda: _fetched(connection, ref, rows, cols, print_times))


def _fetched(
    connection: GangConnection,
    ref: MatrixRef,
    rows: slice | int | None,
    cols: slice | int | None,
    print_times: bool,
) -> NDArray[Any]:
    begun = events.now()
    connection.check(ref)
    length, width = ref.stored_shape
    if cols is not None and len(ref.shape) != 2:
        raise ShapeError(
            f"cols={cols!r}: {ref.name} has shape {ref.shape}, and no columns: A[...].fetch() "
            "fetches a part of any axes"
        )
    selected = _selected(rows, length, "rows"), _selected(cols, width, "cols")
    # Small results come with the routine's reply; for a table of times, they are fetched.
    version = ref.version
    known = None if print_times else ref.known_elements()
    if known is not None:
        return known.reshape(length, width)[np.ix_(*selected)].reshape(_shape_of(ref, selected))
    row0, m, row_step = _bounding_range(selected[0])
    col0, n, col_step = _bounding_range(selected[1])
    out = _result_array((m, n), ref.dtype)
    region = Region(row0, row0 + m, col0, col0 + n)
    shown = connection.options

    def read(of: MatrixRef) -> dict[int, NodeTimes]:
        distribution = Distribution(of.layout, of.stored_shape, connection.grid)
        target = TransferTarget(of.id, distribution, of.dtype)
        with (
            transfer_bar("fetch", out.nbytes, shown.progress) as progress,
            MatrixReader(connection.nodes, target, progress, shown.buffer_bytes, region) as reader,
        ):
            if out.size:
                reader.read_block(out, (row0, col0))
        return reader.times

    times = connection.read(ref, lambda of: watched(connection, lambda: read(of)))
    if not row_step == col_step == 1:
        out = np.ascontiguousarray(out[::row_step, ::col_step])
    counted("fetch", times, begun)
    if print_times:
        say(times_table(times, sending=False))
    if rows is None and cols is None:
        ref.remember_elements(out, version)
    return out.reshape(_shape_of(ref, selected))


def fetch_sparse(
    connection: GangConnection, ref: MatrixRef, wanted: slice | int | None = None
) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
    """Elements, columns and starts of rows of a sparse matrix, or of some of its rows.

    Of rows with a step those between them come too.
    """
    return repeated(lambda: _fetched_sparse(connection, ref, wanted))


def _fetched_sparse(
    connection: GangConnection, ref: MatrixRef, wanted: slice | int | None
) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
    begun = events.now()
    connection.check(ref)
    layout = ref.layout
    if connection.address.epoch != ref.epoch:  # results that were made again may be cut otherwise
        layout = connection.request({"op": "describe", "matrix": ref.id})["layout"]
    form = of_layout(layout)
    assert form is not None
    first, length, _ = _bounding_range(_selected(wanted, form.shape[0], "rows"))
    distribution = Distribution(layout, (form.nbytes, 1), connection.grid)
    target = TransferTarget(ref.id, distribution, np.dtype(np.uint8))

    def read(reader: MatrixReader, out: NDArray[Any], at: int, start: int) -> None:
        if out.size:
            origin = at + start * out.itemsize
            reader.read_block(out.view(np.uint8)[:, np.newaxis], (origin, 0))

    def transfer(_: MatrixRef) -> tuple[dict[int, NodeTimes], Any]:
        with (
            transfer_bar("fetch", form.nbytes, connection.options.progress) as progress,
            MatrixReader(
                connection.nodes, target, progress, connection.options.buffer_bytes
            ) as reader,
        ):
            parts = []  # of each part: its number, and starts
            for part in range(len(form.counts)):
                own = form.rows(part)
                low, high = max(own.start, first), min(own.stop, first + length)
                if low < high:
                    starts = np.empty(high - low + 1, form.index)
                    read(reader, starts, form.sections(part)[0].start, low - own.start)
                    parts.append((part, starts))
            counts = [int(starts[-1] - starts[0]) for _, starts in parts]
            ends = np.cumsum([0, *counts])
            columns = _result_array((int(ends[-1]), 1), form.index)[:, 0]
            elements = _result_array((int(ends[-1]), 1), form.dtype)[:, 0]
            for (part, starts), a, b in zip(parts, ends[:-1], ends[1:], strict=True):
                for out, at in zip((columns, elements), form.sections(part)[1:], strict=True):
                    read(reader, out[a:b], at.start, int(starts[0]))
        heights = [np.diff(starts) for _, starts in parts]
        lines = np.concatenate([np.zeros(1, np.int64), *heights]).cumsum()
        return reader.times, (elements, columns, lines)

    times, arrays = connection.read(ref, lambda of: watched(connection, lambda: transfer(of)))
    counted("fetch", times, begun)
    return cast("tuple[NDArray[Any], NDArray[Any], NDArray[Any]]", arrays)


def _shape_of(ref: MatrixRef, selected: tuple[range, range]) -> tuple[int, ...]:
    """The shape of a part: a vector's has one axis, a number's has none."""
    if len(ref.shape) > 2:
        return (len(selected[0]), *ref.shape[1:])
    return tuple(map(len, selected))[: len(ref.shape)]


def _selected(wanted: slice | int | None, length: int, what: str) -> range:
    if wanted is None:
        return range(length)
    try:
        if isinstance(wanted, bool):
            raise TypeError
        if isinstance(wanted, slice):
            return range(length)[wanted]
        index = range(length)[wanted]
    except IndexError:
        raise BadIndexError(f"{what}={wanted} is outside a matrix with {length} {what}") from None
    except TypeError:
        raise ShapeError(
            f"{what} must be an integer or a slice of integers, not {wanted!r}"
        ) from None
    return range(index, index + 1)


def _bounding_range(selected: range) -> tuple[int, int, int]:
    """First index and length of the range to move, and the step by which to cut it."""
    if not selected:
        return 0, 0, 1
    low, high = min(selected[0], selected[-1]), max(selected[0], selected[-1])
    return low, high - low + 1, selected.step


# --- memory for results: large ones reuse memory that is mapped already, because the first touch of
# fresh memory costs ten times a copy into warm memory ---

POOLED_NBYTES = 1 << 20  # 1 MiB: smaller results come from the ordinary allocator
KEPT_NBYTES = 1 << 30  # 1 GiB, or an eighth of the machine's memory

try:
    from mpi_workers.matrix.memory import Pool

    _memory_nbytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    _pool: Pool | None = Pool(min(KEPT_NBYTES, _memory_nbytes // 8), shared=False)
except ImportError:  # it needs Linux: NumPy allocates
    _pool = None


def _result_array(shape: tuple[int, int], dtype: np.dtype[Any]) -> NDArray[Any]:
    """An uninitialised C-ordered array. Raises `ResourceError` if the memory is not there."""
    nbytes = shape[0] * shape[1] * dtype.itemsize
    if _pool is None or nbytes < POOLED_NBYTES:
        return np.empty(shape, dtype)
    try:
        return _pool.take(nbytes).array().view(dtype).reshape(shape)
    except Failure as failure:
        raise from_failure(failure) from None
