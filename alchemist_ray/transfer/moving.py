"""Jobs on a node that move matrices between two incarnations of a gang.

Every node of the new incarnation moves a part of each matrix: it reads panels from the old ranks,
wherever they are, and writes them to the new ones. No data pass through the GroupManager.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from alchemist_ray.errors import ResourceError, TransferError, from_failure
from mpi_workers.data.description import DataEndpoints, TransferTarget
from mpi_workers.data.node_connections import NodeConnections
from mpi_workers.data.transfers import MatrixReader, MatrixWriter
from mpi_workers.failures import Failure
from mpi_workers.matrix.available_memory import available_bytes
from mpi_workers.matrix.dist_matrix import local_nbytes
from mpi_workers.matrix.layout import Shape
from mpi_workers.matrix.regions import Region
from mpi_workers.matrix.sizes import readable
from mpi_workers.wire.frames import WireError

PANEL_BYTES = 8 << 20  # 8 MiB are read, then written


@dataclass(frozen=True, slots=True)
class MemoryJob:
    """Checks that a node has the memory for its ranks' parts of some matrices."""

    ranks: range
    matrices: tuple[TransferTarget, ...]

    def run(self, refs: Sequence[Any]) -> None:
        """Raises `ResourceError`."""
        needed = sum(
            local_nbytes(matrix.distribution, rank, matrix.dtype)
            for matrix in self.matrices
            for rank in self.ranks
        )
        spare = available_bytes()
        if needed > spare:
            raise ResourceError(
                f"the matrices need {readable(needed)} more memory on a node that has "
                f"{readable(spare)} left: during a resize the old and the new ranks hold them. "
                "Free handles, or add nodes"
            )


@dataclass(frozen=True, slots=True)
class MoveJob:
    """Moves a part of each matrix.

    Attributes
    ----------
    source, target : DataEndpoints
        Of the two incarnations.
    matrices : tuple of (TransferTarget, TransferTarget)
        Each matrix on the old ranks and on the new ones.
    number, count : int
        This job moves every `count`-th panel, from panel `number` on.
    """

    source: DataEndpoints
    target: DataEndpoints
    matrices: tuple[tuple[TransferTarget, TransferTarget], ...]
    number: int
    count: int

    def run(self, refs: Sequence[Any]) -> None:
        """Raises `AlchemistError`."""
        old, new = NodeConnections(self.source), NodeConnections(self.target)
        turn = self.number
        try:
            for before, after in self.matrices:
                panels = list(panels_of(before.distribution.shape, before.dtype.itemsize))
                mine = panels[turn :: self.count]
                turn = (turn - len(panels)) % self.count  # small matrices are shared out, too
                if mine:
                    _move(old, new, before, after, mine)
        except Failure as failure:
            raise from_failure(failure) from None
        except (WireError, OSError) as error:
            raise TransferError(
                f"node {os.uname().nodename} could not move its part: {error}. The gang is "
                "unchanged: call als.resize again"
            ) from error
        finally:
            old.close()
            new.close()


def _move(
    old: NodeConnections,
    new: NodeConnections,
    before: TransferTarget,
    after: TransferTarget,
    panels: Sequence[Region],
) -> None:
    with MatrixReader(old, before) as reader, MatrixWriter(new, after) as writer:
        memory = np.empty(max(math.prod(panel.shape) for panel in panels), before.dtype)
        for panel in panels:
            array = memory[: math.prod(panel.shape)].reshape(panel.shape)
            reader.read_block(array, (panel.row0, panel.col0))
            writer.write_block(array, (panel.row0, panel.col0))


def panels_of(shape: Shape, itemsize: int) -> Iterator[Region]:
    """Cut a matrix into panels of about `PANEL_BYTES`: whole rows, unless these are longer."""
    m, n = shape
    width = max(1, min(n, PANEL_BYTES // itemsize))
    height = max(1, PANEL_BYTES // (itemsize * width))
    for i in range(0, m, height):
        for j in range(0, n, width):
            yield Region(i, min(i + height, m), j, min(j + width, n))
