"""The elements of a matrix that each rank of a gang holds: Elemental's 14 layouts.

Pure functions: no MPI, no memory. A layout is a pair of distributions, one for the rows and one
for the columns, over a ``height x width`` grid of ranks that is numbered column by column (rank
``r`` is at row ``r % height``, column ``r // height``). Every distribution assigns indices to ranks
in turn, so the indices of a rank are an arithmetic progression, stored as a `range`: the
intersection of two is a range again, and a NumPy slice selects it without an index list.

Source of the rules: Poulson et al., "Elemental: A New Framework for
Distributed Memory Dense Matrix Computations", ACM TOMS 39(2), 2013.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import gcd, isqrt, lcm
from typing import NamedTuple

Grid = tuple[int, int]
Shape = tuple[int, int]
ArrayShape = tuple[int, ...]  # of an array with up to two dimensions

LAYOUTS: tuple[str, ...] = (
    "MC_MR", "MC_STAR", "MD_STAR", "MR_MC", "MR_STAR", "STAR_MC", "STAR_MD",
    "STAR_MR", "STAR_STAR", "STAR_VC", "STAR_VR", "VC_STAR", "VR_STAR", "CIRC_CIRC",
)  # fmt: skip


class Stride(NamedTuple):
    """The indices of one rank in one distribution: ``shift, shift + stride, ...``."""

    shift: int
    stride: int


class LocalIndices(NamedTuple):
    """One rank's part of a matrix, as ranges of global indices (both empty if it has none)."""

    rows: range
    cols: range

    @property
    def shape(self) -> Shape:
        return len(self.rows), len(self.cols)

    @property
    def size(self) -> int:
        return len(self.rows) * len(self.cols)


NOTHING = LocalIndices(range(0), range(0))


def default_grid(size: int) -> Grid:
    """Elemental's grid for `size` ranks: the height is the largest divisor <= sqrt(size).

    Parameters
    ----------
    size : int
        Number of ranks, >= 1.

    Returns
    -------
    (int, int)
        ``(height, width)`` with ``height * width == size``.
    """
    if size < 1:
        raise ValueError(f"a grid needs at least one rank, not {size}")
    height = next(h for h in range(isqrt(size), 0, -1) if size % h == 0)
    return height, size // height


def stored_shape(shape: Sequence[int]) -> Shape:
    """Rows and columns in which ranks store an array: a vector is a column, a number 1 x 1.

    Raises
    ------
    ValueError
        If there are more than two dimensions, or one is negative.
    """
    if len(shape) > 2 or any(length < 0 for length in shape):
        raise ValueError(f"shape {tuple(shape)}: it must be (), (m,) or (m, n), not negative")
    m, n = (*map(int, shape), 1, 1)[:2]
    return m, n


def check_layout(layout: str) -> str:
    """Return `layout` if it is one of the 14, else raise `ValueError` naming them."""
    if layout not in LAYOUTS:
        raise ValueError(f"layout must be one of {', '.join(LAYOUTS)}; got {layout!r}")
    return layout


def _stride(dist: str, grid: Grid, rank: int) -> Stride | None:
    """The indices of `rank` in distribution `dist`; None if the rank takes no part."""
    height, width = grid
    row, col = rank % height, rank // height
    match dist:
        case "MC":
            return Stride(row, height)
        case "MR":
            return Stride(col, width)
        case "VC":
            return Stride(rank, height * width)
        case "VR":
            return Stride(row * width + col, height * width)
        case "STAR":
            return Stride(0, 1)
        case "CIRC":
            return Stride(0, 1) if rank == 0 else None
        case "MD":  # index k is on the grid's diagonal, at (k % height, k % width)
            if (row - col) % gcd(height, width):
                return None
            stride = lcm(height, width)
            shift = next(k for k in range(row, stride, height) if k % width == col)
            return Stride(shift, stride)
    raise ValueError(f"unknown distribution {dist!r}")


@lru_cache(maxsize=1 << 14)
def rank_strides(layout: str, grid: Grid, rank: int) -> tuple[Stride, Stride] | None:
    """The rows and the columns of `rank`; None if it takes no part."""
    check_layout(layout)
    if not 0 <= rank < grid[0] * grid[1]:
        raise ValueError(f"rank {rank} is not on a {grid[0]} x {grid[1]} grid")
    row_dist, col_dist = layout.split("_")
    rows, cols = _stride(row_dist, grid, rank), _stride(col_dist, grid, rank)
    return None if rows is None or cols is None else (rows, cols)


def local_indices(layout: str, shape: Shape, grid: Grid, rank: int) -> LocalIndices:
    """The part of a matrix that `rank` holds, as ranges of global indices. Cost: O(1)."""
    both = rank_strides(layout, grid, rank)
    if both is None:
        return NOTHING
    (row0, row_step), (col0, col_step) = both
    rows, cols = range(row0, shape[0], row_step), range(col0, shape[1], col_step)
    return LocalIndices(rows, cols) if rows and cols else NOTHING


@lru_cache(maxsize=256)
def owners(layout: str, grid: Grid) -> tuple[tuple[int, ...], ...]:
    """Groups of ranks that hold copies of the same part.

    In a layout without copies each group has one rank. Ranks that take no part are in no group.
    Cost: O(ranks), once per layout and grid.
    """
    groups: dict[tuple[Stride, Stride], list[int]] = {}
    for rank in range(grid[0] * grid[1]):
        both = rank_strides(layout, grid, rank)
        if both is not None:
            groups.setdefault(both, []).append(rank)
    return tuple(tuple(group) for group in groups.values())


def copies(layout: str, grid: Grid) -> int:
    """How many ranks hold each element."""
    return len(owners(layout, grid)[0])


def intersect(a: range, b: range) -> range:
    """The common members of two ascending ranges, as a range. Cost: O(log step).

    By the Chinese remainder theorem the intersection of two arithmetic progressions is one whose
    step is the least common multiple of theirs.
    """
    if not a or not b:
        return range(0)
    common = gcd(a.step, b.step)
    if (b.start - a.start) % common:
        return range(0)
    step_a, step_b = a.step // common, b.step // common
    k = (b.start - a.start) // common * pow(step_a, -1, step_b) % step_b if step_b > 1 else 0
    step = a.step * step_b
    first = a.start + k * a.step
    lowest = max(a.start, b.start)
    if first < lowest:
        first += -(-(lowest - first) // step) * step
    return range(first, min(a.stop, b.stop), step)


def clip(owned: range, start: int, stop: int) -> range:
    """The members of `owned` in the half-open interval ``[start, stop)``."""
    first = owned.start
    if start > first:
        first += -(-(start - first) // owned.step) * owned.step
    return range(first, max(first, min(owned.stop, stop)), owned.step)


def positions(owned: range, part: range) -> slice:
    """The positions of the indices `part`, all members of `owned`, in a local block."""
    if not part:
        return slice(0, 0)
    return slice(owned.index(part[0]), owned.index(part[-1]) + 1, max(1, part.step // owned.step))


def as_slice(part: range, origin: int = 0) -> slice:
    """The slice that selects `part` from an array whose first index is `origin`."""
    return slice(part.start - origin, max(part.start, part.stop) - origin, part.step)


@dataclass(frozen=True, slots=True)
class Distribution:
    """Layout, shape and grid of a matrix: they determine the part of each rank."""

    layout: str
    shape: Shape
    grid: Grid

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.grid[0] * self.grid[1]

    def local_indices(self, rank: int) -> LocalIndices:
        return local_indices(self.layout, self.shape, self.grid, rank)

    def owners(self) -> tuple[tuple[int, ...], ...]:
        return owners(self.layout, self.grid)
