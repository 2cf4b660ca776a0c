"""Rows in any order: a `MatrixWriter` that places each by its number."""

from __future__ import annotations

from functools import partial

import numpy as np
from numpy.typing import NDArray

from mpi_workers.data.node_connection import Array, NodeConnection, attribute_errors
from mpi_workers.data.transfers import MatrixWriter
from mpi_workers.failures import Failure
from mpi_workers.matrix.layout import Shape
from mpi_workers.matrix.runs import selector, taken

FRAME_BYTES = 8 << 20  # 8 MiB of rows in one frame: the node receives it before it places them


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
            TransferError naming the node; ShapeError for a row outside the matrix.

        Notes
        -----
        Same node: one copy of every element. Other node: one more on each side.
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
        for connection, ranks in self._far:
            self._start(self._put_rows, connection, ranks, rows, block)
        for connection, ranks in self._near:
            self._map(connection, ranks, populate=False)
            connection.check()
            for rank in ranks:
                self._copy_rows(rank, rows, block)
        self._join()

    def _copy_rows(self, rank: int, rows: Array, block: Array) -> None:
        connection, part = self._mapped[rank]
        its = self._target.distribution.runs(rank)
        share = np.flatnonzero(its[0].holds(rows)) if its is not None else rows[:0]
        if its is not None and len(share):
            local = its[0].positions(rows[share])
            cols = selector(part.local_indices.cols)
            part.local[local] = taken(block, share, cols)
            elements = len(share) * len(part.local_indices.cols)
            self._written[rank] = self._written.get(rank, 0) + elements
            self.times[connection.node].nbytes += elements * self._target.dtype.itemsize

    def _put_rows(
        self, connection: NodeConnection, ranks: list[int], rows: Array, block: Array
    ) -> None:
        most = max(1, FRAME_BYTES // (block.shape[1] * self._target.dtype.itemsize))
        for start in range(0, len(rows), most):
            some = slice(start, start + most)
            sending = partial(connection.put_rows, self._target, ranks, rows[some], block[some])
            times = attribute_errors(connection, sending)
            with self._adding:
                self.times[connection.node].add(times)
