"""Every rank reads its own elements, where that is less work than to exchange them.

Ranks on one node share the cache of its files: what one of them has brought from the disk is
there for all, and a rank that skips the others' rows copies no byte too many. Between nodes,
and for elements that lie scattered one by one, it pays to read what lies together and to
exchange it (`exchange.scatter`).
"""

from __future__ import annotations

from typing import Protocol, TypeGuard, runtime_checkable

from ali.files.boxes import PIECE, Array, Pick
from ali.files.formats import Source
from ali.files.paths import together
from ali.interface import Context
from mpi_workers.matrix.dist_matrix import DistMatrix
from mpi_workers.matrix.layout import LocalIndices

# An element that goes through boxes is read, packed, sent, received and placed if it is for another
# rank, read and placed if it is not: so many times the work of reading it once, measured.
EXCHANGE = 3


@runtime_checkable
class Direct(Source, Protocol):
    """A source that can read elements that lie apart, straight to where they belong."""

    def take(self, rows: range, cols: range, target: Array) -> None:
        """These elements (ranges of positive step) into an array of any strides and dtype."""

    def toll(self, rows: range, cols: range) -> int:
        """How many bytes of the file `take` would read for them."""


def pays(
    source: Source, matrix: DistMatrix, rows: Pick, cols: Pick, ranks: int
) -> TypeGuard[Direct]:
    """Whether ranks of one node should each read their own part. The same on all ranks."""
    if not isinstance(source, Direct):
        return False
    if not (isinstance(rows, range) and isinstance(cols, range)) or min(rows.step, cols.step) < 1:
        return False
    held = read = 0
    for rank in range(ranks):
        local_indices = matrix.distribution.local_indices(rank)
        if local_indices.size:
            held += local_indices.size
            read += source.toll(*_in_file(local_indices, rows, cols))
    return read <= EXCHANGE * held * source.about(None, None).dtype.itemsize


def fill(
    ctx: Context, matrix: DistMatrix, source: Direct, rows: range, cols: range, path: str
) -> None:
    """Fill a matrix, each rank its own part. Collective.

    Parameters
    ----------
    rows, cols : range
        Which ones of the file they are.
    path : str
        For messages.

    Notes
    -----
    No messages but at the end, and 4 MiB of memory beside the matrix.
    """
    mine = matrix.distribution.local_indices(ctx.rank)
    together(ctx, path, lambda: _fill(ctx, matrix, mine, source, rows, cols))


def _fill(
    ctx: Context, matrix: DistMatrix, mine: LocalIndices, source: Direct, rows: range, cols: range
) -> None:
    if not mine.size:
        return
    in_file = _in_file(mine, rows, cols)
    # Along the lines of the file, so that a piece of the work is a piece of the file.
    axis = 1 if source.about(None, None).grain.by_columns else 0
    count = len(in_file[axis])
    step = max(1, PIECE * count // (mine.size * matrix.dtype.itemsize))
    for start in range(0, count, step):
        ctx.check()
        part = slice(start, min(start + step, count))
        if axis == 0:
            source.take(in_file[0][part], in_file[1], matrix.local[part])
        else:
            source.take(in_file[0], in_file[1][part], matrix.local[:, part])
        ctx.progress(part.stop / count, f"{part.stop} of {count} {('rows', 'columns')[axis]}")


def _in_file(local_indices: LocalIndices, rows: range, cols: range) -> tuple[range, range]:
    r, c = local_indices.rows, local_indices.cols
    return rows[r.start : r.stop : r.step], cols[c.start : c.stop : c.step]
