"""Copies between C-ordered arrays and Fortran-ordered blocks, in cache-sized tiles.

A copy that changes the order reads along one axis and writes along the other. Without tiles it
misses the cache at every element. If ranks hold every k-th column, one pass per rank would read
each cache line k times; one pass for all ranks reads it once. The sizes were chosen with
benchmarks/transfer.py on a machine with 2 MiB of L2.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor
from itertools import pairwise
from typing import Any, NamedTuple

from numpy.typing import NDArray

from mpi_workers.matrix.layout import LocalIndices, as_slice, clip, positions

UNTILED_BYTES = 1 << 16  # 64 KiB: stays in the cache without tiles
TILE_BYTES = 1 << 18  # 256 KiB
EXCHANGE_TILE_BYTES = 1 << 20  # 1 MiB, in copies between arrays and ranks
TILE_ROW_BYTES = 1 << 10  # of each row in a tile

Array = NDArray[Any]


class ArrayBlock(NamedTuple):
    """A region of the matrix; any strides."""

    array: Array
    origin: tuple[int, int]  # global row and column of its first element


class RankPart(NamedTuple):
    """One rank's side of a copy: its indices and its block."""

    rank: int
    local_indices: LocalIndices
    local: Array  # Fortran-ordered, shape local_indices.shape


class Copied(NamedTuple):
    """Elements copied for a rank, and the time it took."""

    elements: int
    seconds: float


def copy(dst: Array, src: Array) -> None:
    """``dst[...] = src`` for matrices of any strides, in tiles if their orders differ."""
    m, n = dst.shape
    same_order = (abs(dst.strides[0]) < abs(dst.strides[1])) == (
        abs(src.strides[0]) < abs(src.strides[1])
    )
    if same_order or dst.nbytes <= UNTILED_BYTES:
        dst[...] = src
        return
    across = max(16, TILE_ROW_BYTES // dst.itemsize)
    down = max(16, TILE_BYTES // (across * dst.itemsize))
    for j in range(0, n, across):
        for i in range(0, m, down):
            dst[i : i + down, j : j + across] = src[i : i + down, j : j + across]


def _tiles(
    m: int, n: int, itemsize: int, stride: int, narrow: bool
) -> Iterator[tuple[range, range]]:
    """Half-open tiles of an ``m x n`` region whose rows belong to ranks with `stride`."""
    if narrow:  # as tall as a rank's share, and wider if that is small
        rows = min(max(1, m // stride), EXCHANGE_TILE_BYTES // TILE_ROW_BYTES)
        across = max(16, min(EXCHANGE_TILE_BYTES // rows, TILE_ROW_BYTES << 2) // itemsize)
        down = rows * stride
    else:
        across = max(16, (TILE_ROW_BYTES << 2) // itemsize)
        down = max(16, EXCHANGE_TILE_BYTES // (across * itemsize))
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

    Returns
    -------
    dict of int to Copied
        By rank.

    Notes
    -----
    One copy of every element, no temporary.
    """
    ranks = [part.rank for part in parts]
    # Ranks that hold whole rows are served one by one; others share cache lines.
    whole_rows = all(part.local_indices.cols.step == 1 for part in parts)
    jobs: list[tuple[ArrayBlock, Sequence[RankPart], range, range]] = []
    for block in blocks:
        (m, n), itemsize = block.array.shape, block.array.itemsize
        if not whole_rows:
            jobs += [(block, parts, r, c) for r, c in _tiles(m, n, itemsize, 1, False)]
            continue
        for part in parts:
            stride = max(1, part.local_indices.rows.step)
            jobs += [(block, (part,), r, c) for r, c in _tiles(m, n, itemsize, stride, True)]

    def run(
        share: Sequence[tuple[ArrayBlock, Sequence[RankPart], range, range]],
    ) -> dict[int, Copied]:
        elements, seconds = dict.fromkeys(ranks, 0), dict.fromkeys(ranks, 0.0)
        clock = time.perf_counter()
        for block, served, tile_rows, tile_cols in share:
            for part in served:
                elements[part.rank] += _copy_tile(block, part, tile_rows, tile_cols, into_parts)
                now = time.perf_counter()
                seconds[part.rank] += now - clock
                clock = now
        return {rank: Copied(elements[rank], seconds[rank]) for rank in ranks}

    threads = max(1, min(threads, len(jobs)))
    if threads == 1 or executor is None:
        return run(jobs)
    bounds = [len(jobs) * k // threads for k in range(threads + 1)]
    shares = [jobs[a:b] for a, b in pairwise(bounds)]
    done = list(executor.map(run, shares))
    return {
        rank: Copied(sum(d[rank].elements for d in done), sum(d[rank].seconds for d in done))
        for rank in ranks
    }


def _copy_tile(
    block: ArrayBlock, part: RankPart, tile_rows: range, tile_cols: range, into_parts: bool
) -> int:
    """Copy one tile for one rank; returns the number of elements."""
    array, (row0, col0) = block
    rows = clip(part.local_indices.rows, tile_rows.start + row0, tile_rows.stop + row0)
    cols = clip(part.local_indices.cols, tile_cols.start + col0, tile_cols.stop + col0)
    if not rows or not cols:
        return 0
    here = array[as_slice(rows, row0), as_slice(cols, col0)]
    there = part.local[
        positions(part.local_indices.rows, rows), positions(part.local_indices.cols, cols)
    ]
    if into_parts:
        there[...] = here
    else:
        here[...] = there
    return here.size


def default_threads() -> int:
    """Threads for copies: the cores this process may use, at most 8."""
    return min(8, len(os.sched_getaffinity(0)))
