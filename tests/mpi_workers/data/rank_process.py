"""A rank without MPI, as a program: its storage, and its connections to the endpoint of its node.

``python -m tests.mpi_workers.data.rank_process address renewal``, orders as JSON lines.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import numpy as np

from mpi_workers.data.loans import RankMemory
from mpi_workers.failures import Failure
from mpi_workers.matrix import memory
from mpi_workers.matrix.layout import Distribution
from mpi_workers.matrix.memory import Pool
from mpi_workers.matrix.storage import Storage

TOKEN = "the gang's secret"
KEEP_BYTES = 1 << 26


class Rank:
    """Carries out the orders."""

    def __init__(self, address: str, renewal: int) -> None:
        memory.number_segments((renewal << 32) + 1)
        self.storage = Storage(0, Pool(KEEP_BYTES, shared=True))
        self._memory = RankMemory(self.storage, TOKEN, address, first=renewal << 32)

    def new(self, matrix: int, rows: int, value: float | None, alias: int | None = None) -> int:
        """A matrix of this value; without one, it waits for its elements. Its segment."""
        if alias is not None:
            part = self.storage.sealed(alias)
        else:
            distribution = Distribution("CIRC_CIRC", (rows, 10), (1, 1))
            part = self.storage.new(distribution, np.dtype("float64"))
            if value is not None:
                part.local[...] = value
        self.storage.put(matrix, part, sealed=value is not None)
        return part.block.segment.id

    def free(self, matrix: int) -> None:
        self.storage.free(matrix)

    def trim(self) -> int:
        return self.storage.pool.trim()

    def seal(self, matrix: int) -> None:
        self.storage.seal(matrix)

    def adopt(self, matrices: list[int]) -> list[int]:
        return self._memory.adopt(matrices)

    def values(self, matrix: int) -> list[float]:
        """The different elements of a matrix."""
        return np.unique(self.storage.sealed(matrix).local).tolist()

    def segment(self, matrix: int) -> list[Any]:
        segment = self.storage.entry(matrix).matrix.block.segment
        return [segment.id, segment.tainted]


def main(address: str, renewal: str) -> None:
    rank = Rank(address, int(renewal))
    for line in sys.stdin:
        name, arguments = json.loads(line)
        try:
            answer: Any = {"value": getattr(rank, name)(*arguments)}
        except Failure as failure:
            answer = {"failure": failure.to_map()}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
