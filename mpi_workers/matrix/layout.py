"""The elements of a matrix that each rank of a gang holds: Elemental's 14 layouts, and blocks.

Pure functions: no MPI, no memory. A layout is a pair of distributions, one for the rows and one
for the columns, over a ``height x width`` grid of ranks that is numbered column by column (rank
``r`` is at row ``r % height``, column ``r // height``). Every distribution assigns blocks of
indices to ranks in turn (`Runs`). In Elemental's layouts a block is one index, so the indices of a
rank are an arithmetic progression, stored as a `range`: the intersection of two is a range again,
and a NumPy slice selects it without an index list. ``BLOCK_CYCLIC:nb`` is MC_MR with ``nb x nb``
blocks, ScaLAPACK's distribution. ``BLOCK`` is MC_MR with blocks so large that each rank has one:
its indices are a range too. The other layouts may have blocks as well, ``MC_STAR:64`` or
``VC_STAR:BLOCK``: sums of rows, transposes and the like of matrices in blocks are in those.

Source of the rules: Poulson et al., "Elemental: A New Framework for
Distributed Memory Dense Matrix Computations", ACM TOMS 39(2), 2013.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import gcd, isqrt, lcm, prod
from typing import Any, NamedTuple, TypeAlias, overload

import numpy as np
from numpy.typing import NDArray

from mpi_workers.matrix.sparse_rows import of_layout

IndexArray = NDArray[np.int64]


class Runs(NamedTuple):
    """Indices of an axis: `width` neighbours from `first` on, again after each `period`.

    ``first + width <= period``, so every index from 0 on belongs to the period of its run.
    """

    first: int
    width: int
    period: int

    def of_blocks(self, size: int) -> Runs:
        """The indices in the blocks of `size` indices whose numbers these are."""
        return self if size == 1 else Runs(self.first * size, self.width * size, self.period * size)

    def count(self, stop: int) -> int:
        """How many of them are less than `stop`."""
        whole, rest = divmod(stop - self.first, self.period)
        return 0 if stop <= self.first else whole * self.width + min(rest, self.width)

    def at(self, position: int) -> int:
        """The index at a position."""
        run, place = divmod(position, self.width)
        return self.first + run * self.period + place

    def members(self, start: int, stop: int) -> Indices:
        """Those in the half-open interval: a range if they are one."""
        first, width, period = self
        if width == 1:
            low = first if start <= first else first - (first - start) // period * period
            return range(low, max(low, stop), period)
        before, after = self.count(start), self.count(stop)
        if before >= after:
            return range(0)
        low, high = self.at(before), self.at(after - 1) + 1
        if high - low == after - before:
            return range(low, high)
        return BlockIndices(self, low, high)

    def holds(self, indices: IndexArray) -> NDArray[np.bool_]:
        """Which of some indices belong to the runs."""
        inside: NDArray[np.bool_] = (indices - self.first) % self.period < self.width
        return inside

    def positions(self, indices: IndexArray) -> IndexArray:
        """The positions of indices that belong to the runs."""
        run, place = np.divmod(indices - self.first, self.period)
        found: IndexArray = run * self.width + place
        return found


@dataclass(frozen=True, slots=True)
class BlockIndices(Sequence[int]):
    """Ascending indices in several blocks, from `start` up to `stop`, which is exclusive.

    Both bounds are those of members, so that equal indices are equal objects. An object behaves
    as a `range` does: `len`, membership, positions, `index`, cuts ``[a:b]``; `np.asarray` is fast.
    """

    runs: Runs
    start: int
    stop: int

    def __len__(self) -> int:
        return self.runs.count(self.stop) - self.runs.count(self.start)

    @overload
    def __getitem__(self, at: int, /) -> int: ...
    @overload
    def __getitem__(self, at: slice, /) -> Indices: ...
    def __getitem__(self, at: int | slice, /) -> int | Indices:
        before = self.runs.count(self.start)
        if isinstance(at, slice):
            first, last, step = at.indices(len(self))
            if step != 1:
                raise ValueError(f"indices in blocks cannot be taken in steps of {step}")
            return self.runs.members(self.runs.at(before + first), self.runs.at(before + last))
        position = range(len(self))[at]
        return self.runs.at(before + position)

    def __iter__(self) -> Iterator[int]:
        for part in self.ranges():
            yield from part

    def __contains__(self, index: object) -> bool:
        first, width, period = self.runs
        return (
            isinstance(index, (int, np.integer))
            and self.start <= int(index) < self.stop
            and (int(index) - first) % period < width
        )

    def index(self, value: int, start: int = 0, stop: int | None = None) -> int:
        """The position of a member. Raises `ValueError` if it is not one."""
        if value in self:
            position = self.runs.count(value) - self.runs.count(self.start)
            if start <= position and (stop is None or position < stop):
                return position
        raise ValueError(f"{value!r} is not one of the indices")

    def ranges(self) -> Iterator[range]:
        """The parts of blocks, in order."""
        first, width, period = self.runs
        head = self.start - (self.start - first) % period
        for low in range(head, self.stop, period):
            yield range(max(low, self.start), min(low + width, self.stop))

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        if copy is False:
            raise ValueError("the indices are computed into a new array: leave out copy=False")
        first, width, period = self.runs
        positions = np.arange(self.runs.count(self.start), self.runs.count(self.stop))
        run, place = np.divmod(positions, width)
        return (first + run * period + place).astype(dtype or np.int64, copy=False)


Indices: TypeAlias = range | BlockIndices


def as_array(indices: Indices) -> IndexArray:
    """Indices as an array; of a range much faster than `np.asarray`."""
    if isinstance(indices, range):
        return np.arange(indices.start, indices.stop, indices.step, dtype=np.int64)
    found: IndexArray = np.asarray(indices)
    return found


def spacing(indices: Indices) -> int:
    """How many indices of the axis there are for each of these."""
    if isinstance(indices, range):
        return indices.step
    return indices.runs.period // indices.runs.width


def block_length(indices: Indices) -> int:
    """How many indices a slice selects: all of a range, those of a block."""
    return len(indices) if isinstance(indices, range) else indices.runs.width


def selector(indices: Indices, origin: int = 0) -> slice | IndexArray:
    """Selects indices from an axis whose first index is `origin`: a slice if they rise evenly."""
    if isinstance(indices, range):
        return as_slice(indices, origin)
    return as_array(indices) - origin


def evenly(positions: IndexArray) -> slice | IndexArray:
    """Positions as a slice if they rise evenly: a view, and much faster."""
    if positions.size < 2:
        return slice(int(positions[0]), int(positions[0]) + 1) if positions.size else slice(0, 0)
    steps = np.diff(positions)
    step = int(steps[0])
    if step > 0 and (steps == step).all():
        return slice(int(positions[0]), int(positions[-1]) + 1, step)
    return positions


def taken(array: NDArray[Any], rows: slice | IndexArray, cols: slice | IndexArray) -> NDArray[Any]:
    """The elements in some rows and columns: a view if slices select both."""
    found: NDArray[Any]
    if isinstance(rows, slice) and isinstance(cols, slice):
        found = array[rows, cols]
        return found
    if abs(array.strides[0]) < abs(array.strides[1]):  # in the order of the memory
        return taken(array.T, cols, rows).T
    if not isinstance(rows, slice) and not isinstance(cols, slice):
        return array[np.ix_(rows, cols)]
    index: Any = cols if isinstance(rows, slice) else rows
    lines, axis = (array[rows], 1) if isinstance(rows, slice) else (array[:, cols], 0)
    if lines.flags.c_contiguous:  # else `take` copies all of them
        found = lines.take(index, axis)  # a third of the time of an index
    else:
        found = lines[:, index] if axis else lines[index]
    return found


def put(
    array: NDArray[Any], rows: slice | IndexArray, cols: slice | IndexArray, values: Any
) -> None:
    """Replace the elements in some rows and columns."""
    if isinstance(rows, slice) or isinstance(cols, slice):
        array[rows, cols] = values
    elif abs(array.strides[0]) < abs(array.strides[1]):
        array.T[np.ix_(cols, rows)] = values.T
    else:
        array[np.ix_(rows, cols)] = values


Grid = tuple[int, int]
Shape = tuple[int, int]
ArrayShape = tuple[int, ...]  # of an array with up to `MAX_AXES` axes

LAYOUTS: tuple[str, ...] = (
    "MC_MR", "MC_STAR", "MD_STAR", "MR_MC", "MR_STAR", "STAR_MC", "STAR_MD",
    "STAR_MR", "STAR_STAR", "STAR_VC", "STAR_VR", "VC_STAR", "VR_STAR", "CIRC_CIRC",
)  # fmt: skip
BLOCK = "BLOCK"
BLOCK_CYCLIC = "BLOCK_CYCLIC"
BLOCKED = ("MC", "MR", "VC", "VR")  # distributions that may deal blocks
MAX_AXES = 8
MAX_BLOCK = (1 << 23) - 2  # the C interface has 23 bits for it
ELEMENTS = 1, 1  # the blocks of Elemental's layouts


class LocalIndices(NamedTuple):
    """One rank's part of a matrix, as global indices (both empty if it has none).

    They are ranges, but in layouts with several blocks per rank.
    """

    rows: Indices
    cols: Indices

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
    """Rows and columns in which ranks store an array: those of its first axis by all others.

    A vector is a column, a number 1 x 1; of three axes and more, a row holds the elements of the
    other axes in C order.

    Raises
    ------
    ValueError
        If there are more than `MAX_AXES` axes, or a length is negative, or 2**63 or more.
    """
    m, n = (int(shape[0]) if shape else 1), prod(map(int, shape[1:]))
    if len(shape) > MAX_AXES or min(shape, default=0) < 0 or max(m, n, *shape) >= 1 << 63:
        raise ValueError(
            f"shape {tuple(shape)}: it must have at most {MAX_AXES} axes, not negative, below 2**63"
        )
    return m, n


class Form(NamedTuple):
    """A layout: the distributions of rows and columns, and how many indices a block has.

    `block` is 1 in Elemental's layouts; None: large enough that each rank has at most one.
    """

    rows: str
    cols: str
    block: int | None = 1

    @property
    def layout(self) -> str:
        """The name."""
        elemental = f"{self.rows}_{self.cols}"
        if self.block == 1 or {self.rows, self.cols} <= {"STAR", "CIRC"}:
            return elemental
        if elemental == "MC_MR":
            return BLOCK if self.block is None else f"{BLOCK_CYCLIC}:{self.block}"
        return f"{elemental}:{BLOCK if self.block is None else self.block}"


@lru_cache(maxsize=256)
def form(layout: str) -> Form:
    """The form of a layout of that name. Raises `ValueError`, naming the layouts, if none is."""
    if not isinstance(layout, str):
        raise ValueError(f"layout={layout!r}: it must be a string, e.g. 'VC_STAR'")
    if of_layout(layout) is not None:
        return Form("VC", "STAR")  # but each rank has one run: `rank_runs`
    name, _, size = layout.partition(":")
    if layout in LAYOUTS:
        rows, cols = layout.split("_")
        return Form(rows, cols)
    number = int(size) if size.isascii() and size.isdecimal() and size[0] != "0" else 0
    if layout == BLOCK:
        return Form("MC", "MR", None)
    if number <= MAX_BLOCK:
        if name == BLOCK_CYCLIC and number:
            return Form("MC", "MR", number)
        rows, _, cols = name.partition("_")
        found = Form(rows, cols, number or None)
        if name in LAYOUTS and {rows, cols} & {*BLOCKED} and found.layout == layout:
            return found
    raise ValueError(
        f"layout must be one of {', '.join(LAYOUTS)}, {BLOCK} or {BLOCK_CYCLIC}:nb with nb rows "
        f"and columns in a block, e.g. {BLOCK_CYCLIC}:64; got {layout!r}"
    )


def check_layout(layout: str) -> str:
    """Return `layout` if there is one of that name, else raise `ValueError` naming them."""
    form(layout)
    return layout


def distributions(layout: str) -> tuple[str, str]:
    """The distributions of the rows and of the columns: "MC", "MR" of ``BLOCK``."""
    return form(layout)[:2]


def sibling(layout: str, rows: str, cols: str) -> str:
    """The layout with these distributions, and with the blocks of another."""
    return Form(rows, cols, form(layout).block).layout


def mirrored(layout: str) -> str:
    """The layout of the transpose if every rank transposes its part."""
    rows, cols, block = form(layout)
    return Form(cols, rows, block).layout


def number_of(layout: str) -> int:
    """The number in C: of Elemental's layout, from 1 on; above its 8 bits the size of blocks."""
    rows, cols, block = form(layout)
    size = MAX_BLOCK + 1 if block is None else block if block > 1 else 0
    return LAYOUTS.index(f"{rows}_{cols}") + 1 | size << 8


def layout_of(number: int) -> str:
    """The layout of a number in C. Raises `ValueError` if it stands for no layout."""
    size, elemental = divmod(number, 1 << 8)
    if not (0 < elemental <= len(LAYOUTS) and 0 <= size <= MAX_BLOCK + 1):
        raise ValueError(f"layout {number} does not exist")
    rows, cols, _ = form(LAYOUTS[elemental - 1])
    return check_layout(Form(rows, cols, None if size > MAX_BLOCK else size or 1).layout)


def block_shape(layout: str, shape: Shape, grid: Grid) -> Shape:
    """Rows and columns of a block: 1 x 1 in Elemental's layouts."""
    rows, cols, size = form(layout)
    if size is not None:
        return (size if rows in BLOCKED else 1), (size if cols in BLOCKED else 1)
    height, width = grid
    ranks = {"MC": height, "MR": width, "VC": height * width, "VR": height * width}
    m, n = (
        max(1, -(-length // ranks[dist])) if dist in BLOCKED else 1
        for dist, length in zip((rows, cols), shape, strict=True)
    )
    return m, n


def _runs(dist: str, grid: Grid, rank: int) -> Runs | None:
    """The indices of `rank` in distribution `dist`; None if the rank takes no part."""
    height, width = grid
    row, col = rank % height, rank // height
    match dist:
        case "MC":
            return Runs(row, 1, height)
        case "MR":
            return Runs(col, 1, width)
        case "VC":
            return Runs(rank, 1, height * width)
        case "VR":
            return Runs(row * width + col, 1, height * width)
        case "STAR":
            return Runs(0, 1, 1)
        case "CIRC":
            return Runs(0, 1, 1) if rank == 0 else None
        case "MD":  # index k is on the grid's diagonal, at (k % height, k % width)
            if (row - col) % gcd(height, width):
                return None
            stride = lcm(height, width)
            shift = next(k for k in range(row, stride, height) if k % width == col)
            return Runs(shift, 1, stride)
    raise ValueError(f"unknown distribution {dist!r}")


@lru_cache(maxsize=1 << 14)
def rank_runs(
    layout: str, grid: Grid, rank: int, block: Shape = ELEMENTS
) -> tuple[Runs, Runs] | None:
    """The rows and the columns of `rank`; None if it takes no part.

    `block` is the layout's `block_shape`; without it, the indices are those of blocks.
    """
    row_dist, col_dist = distributions(layout)
    if not 0 <= rank < grid[0] * grid[1]:
        raise ValueError(f"rank {rank} is not on a {grid[0]} x {grid[1]} grid")
    if (sparse := of_layout(layout)) is not None:
        mine = sparse.bytes_of(rank, grid[0] * grid[1])
        return (Runs(mine.start, len(mine), sparse.nbytes), Runs(0, 1, 1)) if mine else None
    rows, cols = _runs(row_dist, grid, rank), _runs(col_dist, grid, rank)
    if rows is None or cols is None:
        return None
    return rows.of_blocks(block[0]), cols.of_blocks(block[1])


def local_indices(layout: str, shape: Shape, grid: Grid, rank: int) -> LocalIndices:
    """The part of a matrix that `rank` holds, as global indices. Cost: O(1)."""
    both = rank_runs(layout, grid, rank, block_shape(layout, shape, grid))
    if both is None:
        return NOTHING
    rows, cols = both[0].members(0, shape[0]), both[1].members(0, shape[1])
    return LocalIndices(rows, cols) if rows and cols else NOTHING


def shape_of_parts(layout: str, grid: Grid, parts: Sequence[Shape]) -> Shape:
    """The shape of a matrix of which each rank has a part of that shape; empty ones may be (0, 0).

    Raises
    ------
    ValueError
        If no matrix has such parts.
    """
    some = block_shape(layout, (len(parts), len(parts)), grid)
    lengths = []
    for axis in (0, 1):
        longest: dict[Runs, int] = {}  # of the ranks with the same rows or columns
        for rank, part in enumerate(parts):
            both = rank_runs(layout, grid, rank, some)
            if both is not None:
                longest[both[axis]] = max(longest.get(both[axis], 0), part[axis])
        lengths.append(sum(longest.values()))
    shape = lengths[0], lengths[1]
    for rank, part in enumerate(parts):
        own = local_indices(layout, shape, grid, rank).shape
        if own != part and (0 not in own or 0 not in part):
            raise ValueError(
                f"parts of these shapes make no matrix in {layout}: of a {shape[0]} x {shape[1]} "
                f"matrix rank {rank} would have {own}, and it has {part}"
            )
    return shape


@lru_cache(maxsize=256)
def owners(layout: str, grid: Grid) -> tuple[tuple[int, ...], ...]:
    """Groups of ranks that hold copies of the same part.

    In a layout without copies each group has one rank. Ranks that take no part are in no group.
    Cost: O(ranks), once per layout and grid.
    """
    groups: dict[tuple[Runs, Runs], list[int]] = {}
    for rank in range(grid[0] * grid[1]):
        both = rank_runs(layout, grid, rank)
        if both is not None:
            groups.setdefault(both, []).append(rank)
    return tuple(tuple(group) for group in groups.values())


GridPlace: TypeAlias = tuple[int | None, int | None]  # row and column; None: all of them


def _grid_places(dist: str, grid: Grid, size: int, start: int, stop: int) -> Iterator[GridPlace]:
    """Where in the grid the ranks are that hold indices of an interval, in blocks of `size`."""
    height, width = grid
    runs = _runs(dist, grid, 0)
    if start >= stop or runs is None:  # not of rank 0: it always takes part
        return
    for block in range(start // size, -(-stop // size))[: runs.period]:
        match dist:
            case "MC":
                yield block % height, None
            case "MR":
                yield None, block % width
            case "VC":
                yield block % height, block // height % width
            case "VR":
                yield block // width % height, block % width
            case "MD":
                yield block % height, block % width
            case "STAR":
                yield None, None
            case "CIRC":
                yield 0, 0


def copies(layout: str, grid: Grid) -> int:
    """How many ranks hold each element."""
    return len(owners(layout, grid)[0])


def clip(owned: Indices, start: int, stop: int) -> Indices:
    """The members of `owned` in the half-open interval ``[start, stop)``."""
    if isinstance(owned, BlockIndices):
        return owned.runs.members(max(start, owned.start), min(stop, owned.stop))
    first = owned.start
    if start > first:
        first += -(-(start - first) // owned.step) * owned.step
    return range(first, max(first, min(owned.stop, stop)), owned.step)


def positions(owned: Indices, part: Indices) -> slice:
    """The positions of the indices `part`, all members of `owned`, in a local block.

    Of `BlockIndices`, a part must be a `clip` of them.
    """
    if not part:
        return slice(0, 0)
    step = 1
    if isinstance(owned, range) and isinstance(part, range):
        step = max(1, part.step // owned.step)
    return slice(owned.index(part[0]), owned.index(part[-1]) + 1, step)


def contiguous(part: Indices) -> Iterator[range]:
    """`part` as ranges: itself, or each of its blocks."""
    if isinstance(part, range):
        yield part
    else:
        yield from part.ranges()


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

    @property
    def block(self) -> Shape:
        """Rows and columns of a block, which is held by one rank."""
        return block_shape(self.layout, self.shape, self.grid)

    def runs(self, rank: int) -> tuple[Runs, Runs] | None:
        """The rows and the columns of a rank; None if it takes no part."""
        return rank_runs(self.layout, self.grid, rank, self.block)

    def local_indices(self, rank: int) -> LocalIndices:
        return local_indices(self.layout, self.shape, self.grid, rank)

    def owners(self) -> tuple[tuple[int, ...], ...]:
        return owners(self.layout, self.grid)

    def holders(self, row0: int, row1: int, col0: int, col1: int) -> Iterator[tuple[int, ...]]:
        """The groups of `owners` that hold elements of a region of the matrix.

        Cost: O(ranks found).
        """
        if (sparse := of_layout(self.layout)) is not None:
            yield from ((rank,) for rank in sparse.holders(row0, row1, self.size))
            return
        (row_dist, col_dist), (m, n) = distributions(self.layout), self.block
        height, width = self.grid
        across = list(_grid_places(col_dist, self.grid, n, col0, col1))
        for row, col in _grid_places(row_dist, self.grid, m, row0, row1):
            for other_row, other_col in across:  # of the two, one says where, or none
                i = other_row if row is None else row
                j = other_col if col is None else col
                rows = range(height) if i is None else (i,)
                cols = range(width) if j is None else (j,)
                yield tuple(r + c * height for c in cols for r in rows)
