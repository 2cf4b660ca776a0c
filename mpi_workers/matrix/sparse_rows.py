"""SparseRows: where a sparse matrix is: its rows in contiguous blocks over the ranks, CSR on each.

The gang keeps it as a vector of bytes whose layout, ``ROWS:<m>x<n>:<dtype>:<elements of each
part>``, says all that is to be known of it. So whatever holds for a matrix (transfers, leases,
recovery, checkpoints, quotas) holds for it. A part has the starts of its rows (from 0 on), the
columns and the elements, each section padded to `ALIGNED` bytes. There is one part for each rank
of the gang that made the matrix; on a gang of another size ranks hold several parts, or none.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpi_workers.matrix.dtypes import DTYPES

ROWS = "ROWS"
ALIGNED = 8
INT32_MAX = (1 << 31) - 1


@dataclass(frozen=True)
class SparseRows:
    """The shape, dtype and division of a sparse matrix.

    Attributes
    ----------
    shape : (int, int)
    dtype : numpy.dtype
        Of the elements.
    counts : tuple of int
        Stored elements of each part.
    """

    shape: tuple[int, int]
    dtype: np.dtype[Any]
    counts: tuple[int, ...]

    @property
    def layout(self) -> str:
        """The layout that says all this; `of_layout` reads it."""
        m, n = self.shape
        return f"{ROWS}:{m}x{n}:{self.dtype.name}:{','.join(map(str, self.counts))}"

    @property
    def nnz(self) -> int:
        return sum(self.counts)

    @property
    def height(self) -> int:
        """Rows of a part; the last ones have fewer, or none."""
        return max(1, -(-self.shape[0] // len(self.counts)))

    def rows(self, part: int) -> range:
        """The rows of a part."""
        return range(*(min(self.shape[0], self.height * k) for k in (part, part + 1)))

    @cached_property
    def index(self) -> np.dtype[Any]:
        """The integers of starts and columns: SciPy's for such a part."""
        small = max(self.shape[1], self.height, *self.counts) <= INT32_MAX
        return np.dtype(np.int32 if small else np.int64)

    @cached_property
    def ends(self) -> NDArray[np.int64]:
        """The bytes before each section of each part, and of all; shape (3 parts + 1,)."""
        counts = np.array(self.counts, np.int64)
        heights = np.array([len(self.rows(part)) + 1 for part in range(len(counts))], np.int64)
        sizes = (heights * self.index.itemsize, counts * self.index.itemsize,
                 counts * self.dtype.itemsize)  # fmt: skip
        padded = -(-np.stack(sizes, 1).reshape(-1) // ALIGNED) * ALIGNED
        return np.concatenate([[0], np.cumsum(padded)])

    @property
    def nbytes(self) -> int:
        return int(self.ends[-1])

    def sections(self, part: int) -> tuple[slice, slice, slice]:
        """The bytes of the starts, columns and elements of a part, without padding."""
        first, count = self.ends[3 * part : 3 * part + 3].tolist(), self.counts[part]
        sizes = (
            (len(self.rows(part)) + 1) * self.index.itemsize, count * self.index.itemsize,
            count * self.dtype.itemsize,
        )  # fmt: skip
        starts, columns, elements = (slice(a, a + b) for a, b in zip(first, sizes, strict=True))
        return starts, columns, elements

    def parts(self, rank: int, size: int) -> range:
        """The parts that a rank of a gang of `size` holds."""
        first, stop = (-(-k * len(self.counts) // size) for k in (rank, rank + 1))
        return range(first, stop)

    def bytes_of(self, rank: int, size: int) -> range:
        """The bytes of the vector that a rank of a gang of `size` holds."""
        parts = self.parts(rank, size)
        return range(int(self.ends[3 * parts.start]), int(self.ends[3 * parts.stop]))

    def holders(self, start: int, stop: int, size: int) -> range:
        """The ranks of a gang of `size` that hold bytes of an interval, or are between these."""
        if start >= stop:
            return range(0)
        parts = np.searchsorted(self.ends[::3], (start, stop - 1), "right") - 1
        first, last = (int(part) * size // len(self.counts) for part in parts)
        return range(first, last + 1)


@lru_cache(maxsize=256)
def _read(layout: str) -> SparseRows:
    try:
        _, shape, dtype, counts = layout.split(":")
        m, n = map(int, shape.split("x"))
        found = SparseRows((m, n), np.dtype(dtype), tuple(map(int, counts.split(","))))
        if min(m, n, *found.counts) < 0 or dtype not in DTYPES or found.layout != layout:
            raise ValueError
    except (ValueError, TypeError):
        raise ValueError(f"{layout[:80]!r} is not the layout of a sparse matrix") from None
    return found


def of_layout(layout: str) -> SparseRows | None:
    """The division of a sparse matrix by its layout; None for layouts of dense matrices.

    Raises
    ------
    ValueError
        If it begins with ``ROWS:`` and the rest cannot be read.
    """
    return _read(layout) if layout.startswith(f"{ROWS}:") else None


def divided(starts: NDArray[Any], shape: tuple[int, int], dtype: Any, parts: int) -> SparseRows:
    """The division of a CSR matrix whose rows start at these elements into parts."""
    height = max(1, -(-shape[0] // parts))
    edges = [min(shape[0], height * part) for part in range(parts + 1)]
    counts = tuple(int(starts[b] - starts[a]) for a, b in pairwise(edges))
    return SparseRows(shape, np.dtype(dtype), counts)
