"""Blocks in the object store, sent from the nodes that hold them, not through this process."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import numpy as np
import ray

from alchemist_ray.dtypes import chosen_dtype
from alchemist_ray.errors import IncompleteMatrixError, ShapeError
from alchemist_ray.gang.connection import GangConnection
from alchemist_ray.transfer.node_jobs import (
    ArrayDecoder,
    Origin,
    SourceBlock,
)
from alchemist_ray.transfer.object_location import inspect_objects
from alchemist_ray.transfer.scheduling import BlockSender
from mpi_workers.data.description import NodeTimes, TransferTarget
from mpi_workers.data.transfers import Progress
from mpi_workers.matrix.layout import Shape

_READER = ArrayDecoder()


class ObjectStoreSource:
    """A matrix that lies in pieces in the object store."""

    columns: Sequence[str] = ()

    def __init__(
        self,
        refs: Sequence[ray.ObjectRef],
        sources: Sequence[Any],
        origins: Sequence[Origin],
        shapes: Sequence[Shape],
        dtype: np.dtype[Any],
    ) -> None:
        self._refs = refs
        self._sources = sources  # of the blocks
        self._origins = origins
        self._shapes = shapes
        self.dtype = dtype
        self.shape: Shape = (
            max(r + m for (r, _), (m, _) in zip(origins, shapes, strict=True)),
            max(c + n for (_, c), (_, n) in zip(origins, shapes, strict=True)),
        )
        check_tiling(self.shape, origins, shapes)

    @classmethod
    def inspect(cls, blocks: Sequence[Any], wanted: Any) -> ObjectStoreSource:
        """Find the blocks, look at them where they are, and check that they make a matrix."""
        refs, origins = _checked(blocks)
        found = inspect_objects(refs, [_label(i) for i in range(len(refs))], _READER)
        shapes: list[Shape] = [(rows, cols) for (rows, cols, _), _ in found]
        for i, shape in enumerate(shapes):
            if 0 in shape:
                raise ShapeError(f"{_label(i)} has shape {shape}: it must not be empty")
        dtype = np.result_type(*{np.dtype(dtype) for (_, _, dtype), _ in found})
        sources = [source for _, source in found]
        return cls(refs, sources, origins, shapes, chosen_dtype(dtype, wanted))

    def provenance(self) -> dict[str, Any]:
        return {
            "from": "object store",
            "blocks": [
                [ref.hex(), *origin] for ref, origin in zip(self._refs, self._origins, strict=True)
            ],
        }

    def kept(self) -> Any:
        """The blocks: data that can be sent again."""
        return [(ref, *origin) for ref, origin in zip(self._refs, self._origins, strict=True)]

    def send(
        self, connection: GangConnection, target: TransferTarget, progress: Progress | None
    ) -> dict[int, NodeTimes]:
        """Every block from the node that holds it."""
        sources, self._sources = self._sources, ()  # open blocks are released as they are sent
        with BlockSender(connection, target, _READER, progress) as sender:
            for i, source in enumerate(sources):
                sender.add(SourceBlock(source, self._origins[i], self._shapes[i], _label(i)))
        return sender.times


def _label(i: int) -> str:
    return f"block {i}"


def _checked(blocks: Sequence[Any]) -> tuple[list[ray.ObjectRef], list[Origin]]:
    refs, origins = [], []
    for i, block in enumerate(blocks):
        try:
            ref, row0, col0 = block
            origin = (operator.index(row0), operator.index(col0))
        except (TypeError, ValueError):
            ref, origin = None, (0, 0)
        if not isinstance(ref, ray.ObjectRef) or min(origin) < 0:
            raise ShapeError(f"block {i} is {block!r}, not (ObjectRef, row >= 0, column >= 0)")
        refs.append(ref)
        origins.append(origin)
    return refs, origins


def check_tiling(shape: Shape, origins: Sequence[Origin], shapes: Sequence[Shape]) -> None:
    """Whether blocks cover a matrix exactly once. Raises `IncompleteMatrixError`.

    Sweeps over bands of rows in which the same blocks lie: in each, the blocks'
    columns must follow each other without gap or overlap.
    """
    ends = {r + m for (r, _), (m, _) in zip(origins, shapes, strict=True)}
    cuts = sorted(ends | {r for r, _ in origins})
    if cuts[0] != 0:
        raise _gap(0, cuts[0], 0, shape[1])
    index = {row: k for k, row in enumerate(cuts)}
    bands: list[list[tuple[int, int, int]]] = [[] for _ in cuts[:-1]]
    for i, ((r, c), (m, n)) in enumerate(zip(origins, shapes, strict=True)):
        for k in range(index[r], index[r + m]):
            bands[k].append((c, c + n, i))
    for k, band in enumerate(bands):
        column = 0
        previous = None
        for start, stop, i in sorted(band):
            if start > column:
                raise _gap(cuts[k], cuts[k + 1], column, start)
            if start < column:
                raise IncompleteMatrixError(
                    f"blocks {previous} and {i} overlap in row {cuts[k]}, column {start}: send "
                    "each element once"
                )
            column, previous = stop, i
        if column != shape[1]:
            raise _gap(cuts[k], cuts[k + 1], column, shape[1])


def _gap(row0: int, row1: int, col0: int, col1: int) -> IncompleteMatrixError:
    return IncompleteMatrixError(
        f"rows {row0} to {row1}, columns {col0} to {col1} are in no block: send blocks that cover "
        "the matrix, with zeros where there are no data"
    )


def inspect(data: Any, dtype: Any, connection: GangConnection) -> ObjectStoreSource:
    """A source for a list of (ObjectRef, first row, first column)."""
    return ObjectStoreSource.inspect(data, dtype)
