"""The matrices that a rank keeps between commands, by id."""

from __future__ import annotations

import reprlib
import threading
from typing import Any

import numpy as np

from mpi_workers.failures import Failure
from mpi_workers.matrix.dist_matrix import DistMatrix
from mpi_workers.matrix.layout import Distribution
from mpi_workers.matrix.memory import Pool, available_bytes, readable


class Entry:
    """A matrix and how much of it has arrived."""

    __slots__ = ("matrix", "received", "sealed")

    def __init__(self, matrix: DistMatrix, *, sealed: bool) -> None:
        self.matrix = matrix
        self.received = 0
        self.sealed = sealed


class Storage:
    """Allocates, keeps and frees this rank's parts. Used by the rank's loop and its server.

    Parameters
    ----------
    rank : int
        This rank.
    pool : Pool
        Where blocks come from.
    """

    def __init__(self, rank: int, pool: Pool) -> None:
        self.rank = rank
        self.pool = pool
        self._lock = threading.Lock()
        self._entries: dict[int, Entry] = {}

    def new(self, distribution: Distribution, dtype: np.dtype[Any]) -> DistMatrix:
        """Memory for this rank's part of a matrix; its elements are not set.

        Raises
        ------
        Failure
            ResourceError, if this node has not enough memory.
        """
        nbytes = distribution.local_indices(self.rank).size * dtype.itemsize
        # What is small, or lies warm in the pool, is there: no need to ask the system.
        asked = nbytes > 1 << 20 and not self.pool.has_warm(nbytes)
        spare = available_bytes() if asked else nbytes
        if nbytes > spare + self.pool.idle_bytes():
            m, n = distribution.shape
            raise Failure(
                "ResourceError",
                f"rank {self.rank} needs {readable(nbytes)} for its part of a {m} x {n} {dtype} "
                f"matrix in {distribution.layout}, and its node has {readable(spare)} left: "
                "free handles, or ask for workers on more nodes",
            )
        if nbytes > spare:
            self.pool.trim()
        return DistMatrix(distribution, self.rank, dtype, self.pool.take(nbytes))

    def put(self, matrix_id: int, matrix: DistMatrix, *, sealed: bool) -> None:
        with self._lock:
            self._entries[matrix_id] = Entry(matrix, sealed=sealed)

    def entry(self, matrix_id: object) -> Entry:
        """The entry of that id. Raises `Failure` (MatrixNotFoundError)."""
        with self._lock:
            found = self._entries.get(matrix_id) if type(matrix_id) is int else None
        if found is None:
            raise Failure(
                "MatrixNotFoundError", f"rank {self.rank} holds no matrix {reprlib.repr(matrix_id)}"
            )
        return found

    def sealed(self, matrix_id: object) -> DistMatrix:
        """A matrix that is whole. Raises `Failure` (not found, incomplete)."""
        entry = self.entry(matrix_id)
        if not entry.sealed:
            raise Failure(
                "IncompleteMatrixError",
                f"matrix {matrix_id} is still being sent: its elements are not all there",
            )
        return entry.matrix

    def count(self, entry: Entry, elements: int) -> None:
        """Note that `elements` more have arrived."""
        with self._lock:
            entry.received += elements

    def seal(self, matrix_id: int) -> None:
        """Declare a matrix whole. Raises `Failure` if elements are missing or came twice."""
        entry = self.entry(matrix_id)
        wanted = entry.matrix.local.size
        with self._lock:
            if not entry.sealed and entry.received != wanted:
                raise Failure(
                    "IncompleteMatrixError",
                    f"rank {self.rank} got {entry.received} of the {wanted} elements of "
                    f"matrix {matrix_id}",
                )
            entry.sealed = True

    def free(self, matrix_id: int) -> None:
        """Forget a matrix; its memory is recycled once no reader looks at it any more."""
        with self._lock:
            self._entries.pop(matrix_id, None)
