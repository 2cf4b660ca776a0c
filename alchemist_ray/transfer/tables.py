"""Tables of this process that have Arrow's protocol: their columns are sent from where they lie."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from alchemist_ray.attached.connection import GangConnection
from alchemist_ray.attached.matrix_ref import ColumnName
from alchemist_ray.dtypes import check_range, chosen_dtype, open_table
from alchemist_ray.errors import ShapeError
from mpi_workers.columns.arrow_columns import gathered, named
from mpi_workers.columns.missing import Missing
from mpi_workers.data.description import NodeTimes, TransferTarget
from mpi_workers.data.transfers import MatrixWriter, Progress
from mpi_workers.matrix.copy_kernels import ArrayBlock
from mpi_workers.matrix.layout import MAX_AXES, Shape, stored_shape

PANEL_NBYTES = 16 << 20  # 16 MiB: parts of few rows are collected up to it


class TableSource:
    """A table or a column: polars', DuckDB's, pyarrow's, or of any package with the protocol."""

    def __init__(self, data: Any, wanted: Any, missing: Missing) -> None:
        self._table = open_table(data, missing)
        self._maker = type(data).__module__.partition(".")[0]
        self.array_shape = self._table.shape
        if len(self.array_shape) > MAX_AXES:
            raise ShapeError(
                f"tensors of {len(self.array_shape) - 1} axes cannot be sent: an array on ranks "
                f"has at most {MAX_AXES} with that of the rows"
            )
        self.shape: Shape = stored_shape(self.array_shape)
        self.dtype = chosen_dtype(self._table.dtype, wanted)
        categories = self._table.categories
        self.columns: Sequence[str] = [
            ColumnName(name, categories.get(j, ())) for j, name in enumerate(self._table.names)
        ]
        for column, parts in zip(self._table.columns, self._table.parts, strict=True):
            for part in parts:
                check_range(part, self.dtype, named(column.name))

    def provenance(self) -> dict[str, Any]:
        """Where the matrix comes from, for the gang's record."""
        return {"from": self._maker, "dtype": str(self.dtype), "shape": list(self.array_shape)}

    def kept(self) -> Any:
        """The elements: data that can be sent again, if they are kept."""
        return gathered(self._table, self.dtype)

    def send(
        self, connection: GangConnection, target: TransferTarget, progress: Progress | None
    ) -> dict[int, NodeTimes]:
        """Write every column into the ranks' memory."""
        with MatrixWriter(
            connection.nodes, target, progress, connection.options.buffer_bytes
        ) as writer:
            for blocks in self._blocks(writer):
                writer.write_blocks(blocks)
        return writer.times

    def _blocks(self, writer: MatrixWriter) -> Iterator[list[ArrayBlock]]:
        """Blocks to write together: parts where they lie; those of few rows as one panel."""
        held: list[ArrayBlock] = []
        row = rows = 0
        most = PANEL_NBYTES // max(1, self.shape[1] * self.dtype.itemsize)
        for parts in zip(*self._table.parts, strict=True):
            blocks, col = [], 0
            for part in parts:
                count = math.prod(part.shape[1:])
                blocks.append(ArrayBlock(part.reshape(len(part), count), (row, col)))
                col += count
            length = len(parts[0])
            if not length or not col:
                continue
            if held and rows + length > most:
                yield self._panel(held, rows)
                held, rows = [], 0
            if any(writer.is_small(block.array) for block in blocks) and length <= most:
                held += blocks
                rows += length
            else:
                if held:
                    yield self._panel(held, rows)
                    held, rows = [], 0
                yield blocks
            row += length
        if held:
            yield self._panel(held, rows)

    def _panel(self, blocks: Sequence[ArrayBlock], rows: int) -> list[ArrayBlock]:
        """Blocks below each other and side by side as one."""
        panel = np.empty((rows, self.shape[1]), self.dtype, "F")
        first = blocks[0].origin[0]
        for array, (row, col) in blocks:
            panel[row - first : row - first + len(array), col : col + array.shape[1]] = array
        return [ArrayBlock(panel, (first, 0))]
