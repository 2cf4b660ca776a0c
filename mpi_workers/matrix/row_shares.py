"""Rows of a matrix in any order, and the elements of them that some ranks hold together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mpi_workers.failures import Failure
from mpi_workers.matrix.copy_kernels import RankPart
from mpi_workers.matrix.layout import Distribution
from mpi_workers.matrix.node_shares import products
from mpi_workers.matrix.runs import Runs

Indices = NDArray[np.int64]
Array = NDArray[Any]


class RowGroup(NamedTuple):
    """Some of the rows, and the columns that the ranks hold of them."""

    rows: Indices  # global
    positions: Indices  # among the rows of the share
    cols: Indices

    @property
    def size(self) -> int:
        return len(self.rows) * len(self.cols)


def row_groups(
    distribution: Distribution, ranks: Sequence[int], rows: Indices
) -> Iterator[RowGroup]:
    """The elements of some rows that the ranks hold, without overlap."""
    n = distribution.shape[1]
    for row_runs, col_runs in products(distribution, ranks):
        positions = np.flatnonzero(row_runs.holds(rows))
        if len(positions):
            every = np.arange(n)
            yield RowGroup(rows[positions], positions, every[col_runs.holds(every)])


def taken(block: Array, group: RowGroup) -> Array:
    """A group's elements of a block that holds the rows of the share."""
    rows = block[group.positions]
    return rows if len(group.cols) == rows.shape[1] else rows[:, group.cols]


def place(
    elements: Array, group: RowGroup, parts: Sequence[RankPart], distribution: Distribution
) -> Iterator[tuple[int, int]]:
    """Copy a group's elements into the local blocks of ranks; how many went into each."""
    for rank, _, local in parts:
        both = distribution.runs(rank)
        if both is None or not local.size:
            continue
        down, here_rows = _of_rank(group.rows, both[0])
        across, here_cols = _of_rank(group.cols, both[1])
        if len(down) and len(across):
            local[np.ix_(down, across)] = elements[np.ix_(here_rows, here_cols)]
            yield rank, len(down) * len(across)


def _of_rank(indices: Indices, its: Runs) -> tuple[Indices, Indices]:
    """Positions in a rank's block of those indices that it holds, and their places in `indices`."""
    here = np.flatnonzero(its.holds(indices))
    return its.positions(indices[here]), here


def checked_rows(value: object, shape: tuple[int, int]) -> Indices:
    """Row numbers from a frame's map. Raises `Failure` (ShapeError) if they are not ascending."""
    if isinstance(value, bytes) and value and len(value) % 8 == 0:
        rows = np.frombuffer(value, "<i8").astype(np.int64)
        if rows[0] >= 0 and rows[-1] < shape[0] and (np.diff(rows) > 0).all():
            return rows
    words = f"'rows' must be ascending numbers of rows of a {shape[0]} x {shape[1]} matrix"
    raise Failure("ShapeError", words)
