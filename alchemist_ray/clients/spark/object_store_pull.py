"""Fetches a matrix in batches of rows or blocks. Runs in Spark's Python workers (see `arrow.py`).

Spark may repeat these tasks: reading twice does no harm.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pyarrow as pa

from alchemist_ray.clients.spark.arrow import matrix, vectors
from mpi_workers.data.description import DataEndpoints, TransferTarget
from mpi_workers.data.node_connections import NodeConnections
from mpi_workers.data.transfers import MatrixReader

PIECE = 16 << 20  # 16 MiB: fetched at once

Batches = Iterator[Any]


def _rows(
    endpoints: DataEndpoints, target: TransferTarget, batches: Batches, order: Any
) -> Iterator[tuple[int, Any]]:
    """Fetch the rows whose numbers come in batches: (first number, rows) for each piece."""
    n = target.distribution.shape[1]
    most = max(1, PIECE // (n * target.dtype.itemsize))
    nodes = NodeConnections(endpoints, threads=1)
    try:
        with MatrixReader(nodes, target) as reader:
            for batch in batches:
                numbers = batch.column(0).to_numpy(zero_copy_only=False)
                for start in range(0, len(numbers), most):
                    first = int(numbers[start])
                    rows = np.empty((len(numbers[start : start + most]), n), target.dtype, order)
                    reader.read_block(rows, (first, 0))
                    yield first, rows
    finally:
        nodes.close()


def columns(endpoints: DataEndpoints, target: TransferTarget) -> Callable[[Batches], Batches]:
    """Yield the matrix with one column per matrix column."""
    names = [f"c{j}" for j in range(target.distribution.shape[1])]

    def run(batches: Batches) -> Batches:
        for _, rows in _rows(endpoints, target, batches, "F"):
            yield pa.RecordBatch.from_arrays([pa.array(column) for column in rows.T], names)

    return run


def numbered(endpoints: DataEndpoints, target: TransferTarget) -> Callable[[Batches], Batches]:
    """Yield the number of each row, and the row as a vector."""

    def run(batches: Batches) -> Batches:
        for first, rows in _rows(endpoints, target, batches, "C"):
            numbers = pa.array(np.arange(first, first + len(rows)))
            yield pa.RecordBatch.from_arrays([numbers, vectors(rows)], ["index", "vector"])

    return run


def entries(endpoints: DataEndpoints, target: TransferTarget) -> Callable[[Batches], Batches]:
    """Yield the nonzero elements with row and column."""

    def run(batches: Batches) -> Batches:
        for first, rows in _rows(endpoints, target, batches, "C"):
            i, j = np.nonzero(rows)
            found = [i + first, j, rows[i, j].astype(np.float64)]
            yield pa.RecordBatch.from_arrays(
                [pa.array(part) for part in found], ["i", "j", "value"]
            )

    return run


def blocks(
    endpoints: DataEndpoints, target: TransferTarget, down: int, across: int
) -> Callable[[Batches], Batches]:
    """Yield the blocks whose numbers come, counted row by row."""
    (m, n) = target.distribution.shape
    width = -(-n // across)

    def run(batches: Batches) -> Batches:
        nodes = NodeConnections(endpoints, threads=1)
        try:
            with MatrixReader(nodes, target) as reader:
                for batch in batches:
                    for number in batch.column(0).to_pylist():
                        i, j = divmod(number, width)
                        shape = min(down, m - i * down), min(across, n - j * across)
                        block = np.empty(shape, target.dtype)
                        reader.read_block(block, (i * down, j * across))
                        where = [pa.array([i]), pa.array([j])]
                        pair = pa.StructArray.from_arrays(where, ["_1", "_2"])
                        yield pa.RecordBatch.from_arrays([pair, matrix(block)], ["_1", "_2"])
        finally:
            nodes.close()

    return run
