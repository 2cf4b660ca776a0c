"""Every rank reads its own elements, where that is less work than an exchange.

Ranks on one node share its page cache: bytes that one rank has read from the disk are there for
all, and a rank that skips the others' rows copies no extra byte. Between nodes, and for elements
that are scattered one by one, ranks read contiguous boxes and exchange them (`exchange.scatter`).
"""

from __future__ import annotations

from typing import Protocol, TypeGuard, runtime_checkable

import numpy as np

from ali.files.boxes import PIECE, Array, Pick
from ali.files.casting import converted, narrows
from ali.files.formats import Source
from ali.files.paths import together
from ali.interface import Context
from mpi_workers.matrix import copy_kernels
from mpi_workers.matrix.dist_matrix import DistMatrix
from mpi_workers.matrix.layout import LocalIndices

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
    nbytes = matrix.local.size * matrix.dtype.itemsize
    step = max(1, (PIECE if checked else DIRECT_PIECE) * count // nbytes)
    step -= step % LINES if step > LINES else 0
    for start in range(0, count, step):
        ctx.check()
        part = slice(start, min(start + step, count))
        pick = (part, slice(None)) if axis == 0 else (slice(None), part)
        target = matrix.local[pick]
        room = np.empty(target.shape, about.dtype.newbyteorder("=")) if checked else target
        source.take(in_file[0][pick[0]], in_file[1][pick[1]], room)
        if checked:
            copy_kernels.copy(target, converted(room, matrix.dtype, path))
        ctx.progress(part.stop / count, f"{part.stop} of {count} {('rows', 'columns')[axis]}")


def _in_file(local_indices: LocalIndices, rows: range, cols: range) -> tuple[range, range] | None:
    """A rank's rows and columns in the file; None if they are not ranges."""
    r, c = local_indices.rows, local_indices.cols
    if not (isinstance(r, range) and isinstance(c, range)):
        return None
    return rows[r.start : r.stop : r.step], cols[c.start : c.stop : c.step]
