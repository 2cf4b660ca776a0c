"""Rows in any order: a `MatrixWriter` that places each by its number."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from mpi_workers.data.rank_connections import Array, RankConnection, attribute_errors
from mpi_workers.data.transfers import MatrixWriter
from mpi_workers.failures import Failure
from mpi_workers.matrix.layout import LocalIndices, Shape, as_slice
from mpi_workers.matrix.regions import Region


class RowWriter(MatrixWriter):
    """Sends whole rows, in any order, into a matrix that is not sealed yet."""

    @property
    def shape(self) -> Shape:
        """Shape of the whole matrix."""
        return self._target.distribution.shape

    def write_rows(self, block: Array, rows: NDArray[np.int64]) -> None:
        """Send rows of the matrix.

        Parameters
        ----------
        block : ndarray, shape (k, n)
            As for `write_block`, with n the columns of the matrix.
        rows : ndarray of int64, shape (k,)
            The global number of each; ascending, without repetition.

        Raises
        ------
        Failure
            TransferError naming the rank; ShapeError for a row outside the matrix.

        Notes
        -----
        Same node: one copy of every element. Other node: one frame for each run of consecutive
        rows in a rank's part.
        """
        m, n = self._target.distribution.shape
        if not len(rows):
            return
        if block.shape != (len(rows), n) or rows[0] < 0 or rows[-1] >= m:
            raise Failure(
                "ShapeError",
                f"rows {rows[0]} to {rows[-1]} of {block.shape[1]} elements do not fit into a "
                f"{m} x {n} matrix",
            )
        if rows[-1] - rows[0] == len(rows) - 1:
            self.write_block(block, (int(rows[0]), 0))
            return
        for connection, local_indices in self._far:
            share = _positions_of_rank(rows, local_indices)
            if len(share):
                self._start(self._put_runs, connection, local_indices, rows, share, block)
        for part in self._near:
            self._ranks.connection(part.rank).check()
            share = _positions_of_rank(rows, part.local_indices)
            if len(share):
                local = (
                    rows[share] - part.local_indices.rows.start
                ) // part.local_indices.rows.step
                part.local[local] = block[share, as_slice(part.local_indices.cols, 0)]
                self._written[part.rank] = self._written.get(part.rank, 0) + len(share) * len(
                    part.local_indices.cols
                )
                self.times[part.rank].nbytes += len(share) * part.local[0].nbytes
        self._join()

    def _put_runs(
        self,
        connection: RankConnection,
        local_indices: LocalIndices,
        rows: Array,
        share: Array,
        block: Array,
    ) -> None:
        for first, last in _runs(
            (rows[share] - local_indices.rows.start) // local_indices.rows.step
        ):
            whole = Region(int(rows[share[first]]), int(rows[share[last - 1]]) + 1, 0, 0)
            region = whole._replace(col1=self._target.distribution.shape[1])
            cut = block[share[first:last], as_slice(local_indices.cols, 0)]
            times = attribute_errors(connection, partial(connection.put, self._target, region, cut))
            self.times[connection.rank].add(times)


def _positions_of_rank(rows: Array, local_indices: LocalIndices) -> NDArray[np.int64]:
    """Positions in `rows` of those that a rank holds."""
    if not local_indices.size:
        return np.empty(0, np.int64)
    mine = rows >= local_indices.rows.start
    if local_indices.rows.step > 1:
        mine &= (rows - local_indices.rows.start) % local_indices.rows.step == 0
    return np.flatnonzero(mine)


def _runs(numbers: Array) -> Iterator[tuple[int, int]]:
    """Half-open runs of consecutive numbers among ascending ones."""
    cuts = [0, *(np.flatnonzero(np.diff(numbers) != 1) + 1).tolist(), len(numbers)]
    yield from pairwise(cuts)
