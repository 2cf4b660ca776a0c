"""Copies between C-ordered arrays and Fortran-ordered blocks, in cache-sized tiles.

The compiled kernel (`copy_kernel.c`) is used where it was built.

A copy that changes the order reads along one axis and writes along the other. Without tiles it
misses the cache at every element. If ranks hold every k-th column, one pass per rank would read
each cache line k times; one pass for all ranks reads it once. The sizes were chosen with
benchmarks/transfer.py on a machine with 2 MiB of L2. Where the compiled kernel was built, it copies
large C-ordered arrays.

Calls release the interpreter's lock. Without the kernel, NumPy copies in tiles.
"""

from __future__ import annotations

import ctypes
import errno
import itertools
import math
import os
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from functools import cache, partial
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mpi_workers.matrix.layout import (
    Indices,
    LocalIndices,
    as_array,
    as_slice,
    block_length,
    clip,
    contiguous,
    evenly,
    positions,
    put,
    selector,
    spacing,
    taken,
)
from mpi_workers.matrix.neighbours import Bounds, joined

LIBRARY = Path(__file__).with_name("copy_kernel.so")
LEVELS = ("plain C", "AVX2", "AVX-512")
SWITCH = "ALCHEMIST_COPY_KERNEL"  # "0": NumPy copies
ITEMSIZES = (1, 2, 4, 8, 16)

Addresses = NDArray[np.uintp]


@cache
def kernel() -> Any:
    """The kernel's functions, or None."""
    if os.environ.get(SWITCH) == "0":
        return None
    try:
        found = ctypes.CDLL(str(LIBRARY))
        size, pointer = ctypes.c_ssize_t, ctypes.c_void_p
        for transposing in (found.alchemist_transpose, found.alchemist_transpose_guarded):
            transposing.argtypes = [
                *(pointer, size, pointer, size, size, ctypes.c_int, ctypes.c_int)
            ]
        found.alchemist_transpose.restype = None
        found.alchemist_transpose_guarded.restype = ctypes.c_int
        found.alchemist_copy_level.restype = ctypes.c_int
    except (OSError, AttributeError):
        return None
    return found


@cache
def level() -> int | None:
    """The best instructions of this processor, an index of `LEVELS`; None without the kernel."""
    library = kernel()
    return None if library is None else int(library.alchemist_copy_level())


def description() -> str:
    """How elements are copied here, for people."""
    best = level()
    return "NumPy" if best is None else f"compiled, {LEVELS[best]}"


def line_addresses(array: NDArray[Any], axis: int) -> Addresses:
    """The addresses of the rows (axis 0) or columns (axis 1) of a matrix."""
    start, stride = array.__array_interface__["data"][0], array.strides[axis]
    found: Addresses = (start + stride * np.arange(array.shape[axis])).astype(np.uintp)
    return found


def transpose(
    source: Addresses,
    target: Addresses,
    itemsize: int,
    *,
    stream: bool,
    guarded: bool = False,
) -> None:
    """Copy element j of source line i to element i of target line j.

    Parameters
    ----------
    source, target : ndarray of addresses
        Of lines with contiguous elements: as many in each line of one as the other has lines.
    itemsize : int
        Bytes of an element, one of `ITEMSIZES`.
    stream : bool
        Whether to write past the cache: for more than fits into it.
    guarded : bool
        The source is a mapped file.

    Raises
    ------
    OSError
        If a page of a mapped file cannot be read.
    """
    library = kernel()
    work = library.alchemist_transpose_guarded if guarded else library.alchemist_transpose
    failed = work(
        source.ctypes.data,
        len(source),
        target.ctypes.data,
        len(target),
        itemsize,
        level(),
        stream,
    )
    if failed:
        raise OSError(errno.EIO, "a page of the mapped file cannot be read")


UNTILED_BYTES = 1 << 16  # 64 KiB: stays in the cache without tiles
TILE_BYTES = 1 << 18  # 256 KiB
EXCHANGE_TILE_BYTES = 1 << 20  # 1 MiB, in copies between arrays and ranks
TILE_ROW_BYTES = 1 << 10  # of each row in a tile
CACHED_BYTES = 4 << 20  # 4 MiB: larger copies are written past the cache
LISTED = 1 << 10  # elements of a block: smaller ones are copied by lists of indices
KERNEL_LINES = 8  # rows and columns, at least: a tile of the compiled kernel
KERNEL_ROW_BYTES = 1 << 10  # 1 KiB: rows of this length are copied fast from any number of blocks
KERNEL_RUNS = 32  # runs of columns that are copied by the compiled kernel; more cost too much

Array = NDArray[Any]
Task = Callable[[], dict[int, int]]  # copies, and returns the number of elements of each rank


class ArrayBlock(NamedTuple):
    """A region of the matrix; any strides."""

    array: Array
    origin: tuple[int, int]  # global row and column of its first element

    @property
    def bounds(self) -> Bounds:
        (row, col), (m, n) = self.origin, self.array.shape
        return row, row + m, col, col + n


class RankPart(NamedTuple):
    """One rank's side of a copy: its indices and its block."""

    rank: int
    local_indices: LocalIndices
    local: Array  # Fortran-ordered, shape local_indices.shape


class Copied(NamedTuple):
    """Elements copied for a rank, and the time it took."""

    elements: int
    seconds: float


def copy(dst: Array, src: Array, *, stream: bool | None = None) -> None:
    """``dst[...] = src`` for matrices of any strides, in tiles if their orders differ.

    Parameters
    ----------
    stream : bool, optional
        Whether to write past the cache. Default: if `dst` does not fit into it.
    """
    m, n = dst.shape
    same_order = (abs(dst.strides[0]) < abs(dst.strides[1])) == (
        abs(src.strides[0]) < abs(src.strides[1])
    )
    if same_order or dst.nbytes <= UNTILED_BYTES:
        dst[...] = src
        return
    if transposed(dst, src, stream=dst.nbytes > CACHED_BYTES if stream is None else stream):
        return
    across = max(16, TILE_ROW_BYTES // dst.itemsize)
    down = max(16, TILE_BYTES // (across * dst.itemsize))
    for j in range(0, n, across):
        for i in range(0, m, down):
            dst[i : i + down, j : j + across] = src[i : i + down, j : j + across]


def transposed(dst: Array, src: Array, *, stream: bool, mapped: bool = False) -> bool:
    """Copy by the compiled kernel, if the orders differ and it can; returns whether it did.

    Raises
    ------
    OSError
        If `src` is a mapped file (`mapped`) that was truncated, or whose disk failed: elsewhere a
        SIGBUS, which ends the process.
    """
    axis = 0 if copied_by_kernel(src, dst.dtype) else 1  # of the lines of `src`
    if (
        min(dst.shape) < KERNEL_LINES
        or not copied_by_kernel(src if axis == 0 else src.T, dst.dtype)
        or dst.strides[axis] != dst.itemsize
    ):
        return False
    transpose(
        line_addresses(src, axis),
        line_addresses(dst, 1 - axis),
        dst.itemsize,
        stream=stream,
        guarded=mapped,
    )
    return True


def _tiles(
    m: int, n: int, itemsize: int, stride: int, narrow: bool
) -> Iterator[tuple[range, range]]:
    """Half-open tiles of an ``m x n`` region whose rows belong to ranks with `stride`."""
    if narrow:  # as tall as a rank's share, and wider if that is small
        row_bytes = min(TILE_ROW_BYTES, max(1, n) * itemsize)  # of a vector one element
        rows = min(max(1, m // stride), EXCHANGE_TILE_BYTES // row_bytes)
        across = max(16, min(EXCHANGE_TILE_BYTES // rows, TILE_ROW_BYTES << 2) // itemsize)
        down = rows * stride
    else:
        across = max(16, (TILE_ROW_BYTES << 2) // itemsize)
        down = max(16, EXCHANGE_TILE_BYTES // (max(1, min(n, across)) * itemsize))
    for j in range(0, n, across):
        for i in range(0, m, down):
            yield range(i, min(i + down, m)), range(j, min(j + across, n))


def exchange(
    blocks: Sequence[ArrayBlock],
    parts: Sequence[RankPart],
    *,
    into_parts: bool,
    executor: Executor | None = None,
    threads: int = 1,
    stream: bool | None = None,
) -> dict[int, Copied]:
    """Copy between arrays, which are regions of the matrix, and the parts of ranks.

    Parameters
    ----------
    blocks : sequence of ArrayBlock
        No two may overlap.
    parts : sequence of RankPart
        The ranks to serve. Each element of a block that a part holds is copied.
    into_parts : bool
        True: blocks into parts (send). False: parts into blocks (fetch).
    executor, threads
        Where to run the copy, and in how many pieces.
    stream : bool, optional
        Whether to write past the cache. Default: if the blocks do not fit into it.

    Returns
    -------
    dict of int to Copied
        By rank.

    Notes
    -----
    One copy of every element, no temporary. Many blocks that lie one below the other take as long
    as one, if the compiled kernel copies them.
    """
    ranks = [part.rank for part in parts]
    if stream is None:
        stream = sum(block.array.nbytes for block in blocks) > CACHED_BYTES
    # Ranks that hold whole rows are served one by one; others share cache lines.
    whole_rows = all(spacing(part.local_indices.cols) == 1 for part in parts)
    stacks, others = _stacks(blocks, parts)
    tasks: list[Task] = []
    uncompiled = [(block, parts) for block in others]
    for stack in stacks:
        compiled, unserved = _kernel_tasks(stack, parts, into_parts, stream, threads)
        tasks += compiled
        uncompiled += [(block, unserved) for block in stack.blocks if unserved]
    for block, its_parts in uncompiled:
        (m, n), itemsize = block.array.shape, block.array.itemsize
        by_share = []
        for served in [[part] for part in its_parts] if whole_rows else [its_parts]:
            stride = max(1, spacing(served[0].local_indices.rows)) if whole_rows else 1
            tiles = _tiles(m, n, itemsize, stride, whole_rows)
            by_share.append([
                partial(_copy_tile, block, served, rows, cols, into_parts) for rows, cols in tiles
            ])  # fmt: skip
        # A tile is in the cache when the next rank is served from it.
        tasks += [task for some in itertools.zip_longest(*by_share) for task in some if task]

    return _carried_out(tasks, ranks, executor, threads)


def _carried_out(
    tasks: Sequence[Task], ranks: Sequence[int], executor: Executor | None, threads: int
) -> dict[int, Copied]:
    """Run the copies on some threads; the elements and seconds of each rank."""

    def run(share: Sequence[Task]) -> dict[int, Copied]:
        elements, seconds = dict.fromkeys(ranks, 0), dict.fromkeys(ranks, 0.0)
        clock = time.perf_counter()
        for task in share:
            counts = task()
            now = time.perf_counter()
            each = (now - clock) / max(1, sum(counts.values()))
            for rank, count in counts.items():
                elements[rank] += count
                seconds[rank] += each * count
            clock = now
        return {rank: Copied(elements[rank], seconds[rank]) for rank in ranks}

    threads = max(1, min(threads, len(tasks)))
    if threads == 1 or executor is None:
        return run(tasks)
    bounds = [len(tasks) * k // threads for k in range(threads + 1)]
    shares = [tasks[a:b] for a, b in pairwise(bounds)]
    done = list(executor.map(run, shares))
    return {
        rank: Copied(sum(d[rank].elements for d in done), sum(d[rank].seconds for d in done))
        for rank in ranks
    }


PART_COLUMNS = 8  # of a tile between parts, at least, where a matrix has as many


def copy_between(
    sources: Sequence[RankPart],
    targets: Sequence[RankPart],
    bounds: Bounds,
    *,
    executor: Executor | None = None,
    threads: int = 1,
) -> dict[int, Copied]:
    """Copy a region from the parts of one matrix into those of another of the same shape.

    Parameters
    ----------
    sources, targets : sequence of RankPart
        Elements that no source or no target holds are left out. No two targets may overlap.
    bounds : (int, int, int, int)
        Half-open rows and columns of the region.
    executor, threads
        As of `exchange`.

    Returns
    -------
    dict of int to Copied
        By rank of a target.

    Notes
    -----
    One copy of every element, and no temporary but for layouts of blocks. All pairs of parts
    are served from one tile: a line of the cache belongs to several of them.
    """
    row0, row1, col0, col1 = bounds
    itemsize = max((part.local.itemsize for part in (*sources, *targets)), default=1)
    narrow = max(1, min(col1 - col0, PART_COLUMNS))
    down = max(1, min(row1 - row0, EXCHANGE_TILE_BYTES // (narrow * itemsize)))
    across = max(1, EXCHANGE_TILE_BYTES // (down * itemsize))
    tasks: list[Task] = [
        partial(
            _copy_between, sources, targets,
            (i, min(i + down, row1), j, min(j + across, col1)),
        )
        for j in range(col0, col1, across)
        for i in range(row0, row1, down)
    ]  # fmt: skip
    return _carried_out(tasks, [part.rank for part in targets], executor, threads)


def _copy_between(
    sources: Sequence[RankPart], targets: Sequence[RankPart], bounds: Bounds
) -> dict[int, int]:
    """Copy one tile; returns the number of elements of each target."""
    counts: Counter[int] = Counter()
    for target, source in itertools.product(targets, sources):
        rows, cols = (
            _shared(theirs, ours, first, stop)
            for theirs, ours, first, stop in zip(
                source.local_indices, target.local_indices, bounds[::2], bounds[1::2], strict=True
            )
        )
        if rows is None or cols is None:
            continue
        elements = taken(source.local, rows[0], cols[0])
        put(target.local, rows[1], cols[1], elements)
        counts[target.rank] += elements.size
    return counts


_Positions = slice | NDArray[np.int64]


def _shared(
    theirs: Indices, ours: Indices, first: int, stop: int
) -> tuple[_Positions, _Positions] | None:
    """The positions, in both local blocks, of the indices in an interval that both hold."""
    left, right = clip(theirs, first, stop), clip(ours, first, stop)
    if isinstance(left, range) and isinstance(right, range):
        both = _intersection(left, right)
        return (positions(theirs, both), positions(ours, both)) if both else None
    members = np.intersect1d(as_array(left), as_array(right), assume_unique=True)
    if not members.size:
        return None
    return evenly(_places(theirs, members)), evenly(_places(ours, members))


def _places(owned: Indices, members: NDArray[np.int64]) -> NDArray[np.int64]:
    if isinstance(owned, range):
        return (members - owned.start) // owned.step
    return owned.runs.positions(members)


def _intersection(a: range, b: range) -> range:
    """The members of two ascending ranges."""
    common = math.gcd(a.step, b.step)
    if not a or not b or (b.start - a.start) % common:
        return range(0)
    period = b.step // common
    k = (b.start - a.start) // common * pow(a.step // common, -1, period) % period
    start, step = a.start + k * a.step, a.step * period
    start += max(0, -(-(b.start - start) // step)) * step
    return range(start, max(start, min(a.stop, b.stop)), step)


def _copy_tile(
    block: ArrayBlock,
    parts: Sequence[RankPart],
    tile_rows: range,
    tile_cols: range,
    into_parts: bool,
) -> dict[int, int]:
    """Copy one tile for some ranks; returns the number of elements of each."""
    array, (row0, col0) = block
    counts = {}
    for part in parts:
        rows = clip(part.local_indices.rows, tile_rows.start + row0, tile_rows.stop + row0)
        cols = clip(part.local_indices.cols, tile_cols.start + col0, tile_cols.stop + col0)
        if not rows or not cols:
            continue
        counts[part.rank] = len(rows) * len(cols)
        owned = part.local_indices
        there = part.local[positions(owned.rows, rows), positions(owned.cols, cols)]
        if not (isinstance(rows, range) and isinstance(cols, range)):
            _copy_blocks(array, (row0, col0), rows, cols, there, into_parts)
            continue
        here = array[as_slice(rows, row0), as_slice(cols, col0)]
        if into_parts:
            there[...] = here
        else:
            here[...] = there
    return counts


def _copy_blocks(
    array: Array,
    origin: tuple[int, int],
    rows: Indices,
    cols: Indices,
    there: Array,
    into_parts: bool,
) -> None:
    """Copy elements that lie in blocks of the array: block by block, or by lists of indices."""
    if block_length(rows) * block_length(cols) < LISTED:
        down, across = selector(rows, origin[0]), selector(cols, origin[1])
        if into_parts:
            there[...] = taken(array, down, across)
        else:
            put(array, down, across, there)
        return
    for some, other in itertools.product(contiguous(rows), contiguous(cols)):
        here = array[as_slice(some, origin[0]), as_slice(other, origin[1])]
        inside = there[positions(rows, some), positions(cols, other)]
        if into_parts:
            inside[...] = here
        else:
            here[...] = inside


class _Stack(NamedTuple):
    """Blocks with the same columns, one below the other: the kernel copies their rows at once."""

    blocks: Sequence[ArrayBlock]
    rows: range  # of the matrix
    cols: range
    lines: Addresses  # of the rows

    @classmethod
    def of(cls, blocks: Sequence[ArrayBlock]) -> _Stack:
        (array, (row0, col0)), heights = blocks[0], [len(block.array) for block in blocks]
        lines = np.empty(sum(heights), np.uintp)
        offsets: dict[int, Addresses] = {}  # of the rows of a block, by its stride
        at = 0
        for (some, _), height in zip(blocks, heights, strict=True):
            stride = some.strides[0]
            if stride not in offsets:
                offsets[stride] = (stride * np.arange(max(heights))).astype(np.uintp)
            start = np.uintp(some.__array_interface__["data"][0])
            np.add(offsets[stride][:height], start, out=lines[at : at + height])
            at += height
        return cls(blocks, range(row0, row0 + at), range(col0, col0 + array.shape[1]), lines)


def copied_by_kernel(array: Array, dtype: np.dtype[Any]) -> bool:
    """Whether the compiled kernel can copy an array's rows to ranks: C-ordered, of their dtype."""
    return (
        array.dtype == dtype
        and array.itemsize in ITEMSIZES
        and array.strides[1] == array.itemsize
        and level() is not None
    )


def _stacks(
    blocks: Sequence[ArrayBlock], parts: Sequence[RankPart]
) -> tuple[list[_Stack], list[ArrayBlock]]:
    """The blocks that the compiled kernel copies, and those that are left to NumPy."""
    dtypes = {part.local.dtype for part in parts}
    dtype = dtypes.pop() if len(dtypes) == 1 else None
    rows, others = [], []
    for i, block in enumerate(blocks):
        if dtype is not None and copied_by_kernel(block.array, dtype):
            rows.append((block.bounds, [i]))
        else:
            others.append(block)
    stacks = []
    for (row0, row1, col0, col1), members in joined(rows, 0):
        some = [blocks[i] for i in members]
        m, n = (row1 - row0, col1 - col0)
        if min(m, n) >= KERNEL_LINES and m * n * some[0].array.itemsize > UNTILED_BYTES:
            stacks.append(_Stack.of(some))
        else:
            others += some
    return stacks, others


def _kernel_tasks(
    stack: _Stack, parts: Sequence[RankPart], into_parts: bool, stream: bool, threads: int
) -> tuple[list[Task], list[RankPart]]:
    """The compiled copies of some blocks, and the parts that are left to NumPy.

    The lines of an array are its rows, those of ranks their columns. Ranks with the same rows are
    served together: a row of the array is read once. Copies of a part are served apart.
    """
    row0, col0 = stack.rows.start, stack.cols.start
    m, n = len(stack.rows), len(stack.cols)
    itemsize = stack.blocks[0].array.itemsize
    by_rows: defaultdict[tuple[Indices, int], list[RankPart]] = defaultdict(list)
    copies: Counter[LocalIndices] = Counter()
    for part in parts:
        rows = clip(part.local_indices.rows, row0, row0 + m)
        by_rows[rows, copies[part.local_indices]].append(part)
        copies[part.local_indices] += 1
    pieces = -(-threads // max(1, len(by_rows)))
    tasks: list[Task] = []
    left: list[RankPart] = []
    for (rows, _), together in by_rows.items():
        columns = np.zeros(n, np.uintp)  # of the ranks, by column of the array; 0: not here
        owner = np.full(n, -1)
        for k, part in enumerate(together):
            cols = clip(part.local_indices.cols, col0, col0 + n)
            if rows and cols:
                local = part.local[
                    positions(part.local_indices.rows, rows),
                    positions(part.local_indices.cols, cols),
                ]
                columns[selector(cols, col0)] = line_addresses(local, 1)
                owner[selector(cols, col0)] = k
        runs = _runs(columns)
        if len(runs) > KERNEL_RUNS:
            left += together
            continue
        here = stack.lines[selector(rows, row0)]
        for first, last in runs:
            share = np.bincount(owner[first:last], minlength=len(together)).tolist()
            for k in range(pieces):
                start, stop = len(here) * k // pieces, len(here) * (k + 1) // pieces
                ours = here[start:stop] + np.uintp(first * itemsize)
                theirs = columns[first:last] + np.uintp(start * itemsize)
                counts = {p.rank: c * len(ours) for p, c in zip(together, share, strict=True)}
                lines = (ours, theirs) if into_parts else (theirs, ours)
                tasks.append(partial(_copy_lines, *lines, itemsize, stream, counts))
    return tasks, left


def _copy_lines(
    source: Addresses,
    target: Addresses,
    itemsize: int,
    stream: bool,
    counts: dict[int, int],
) -> dict[int, int]:
    transpose(source, target, itemsize, stream=stream)
    return counts


def _runs(addresses: Addresses) -> list[tuple[int, int]]:
    """Half-open runs of addresses that are not 0."""
    present = np.concatenate([[False], addresses != 0, [False]])
    cuts = np.flatnonzero(present[1:] != present[:-1]).tolist()
    return list(zip(cuts[::2], cuts[1::2], strict=True))


def default_threads() -> int:
    """Threads for copies: the cores this process may use, at most 8."""
    cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else ()
    return min(8, len(cores) or os.cpu_count() or 1)
