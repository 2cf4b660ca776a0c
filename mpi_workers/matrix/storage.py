"""The parts of matrices that a rank keeps between commands, by id."""

from __future__ import annotations

import contextlib
import os
import reprlib
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np

from mpi_workers.failures import Failure
from mpi_workers.matrix.available_memory import NodeAllocations, available_bytes
from mpi_workers.matrix.dist_matrix import DistMatrix
from mpi_workers.matrix.layout import ArrayShape, Distribution
from mpi_workers.matrix.memory import UNCHECKED_BYTES, Pool
from mpi_workers.matrix.sizes import readable


class Entry:
    """A matrix and the number of its elements that have arrived."""

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
        Provides the memory.
    allocations : NodeAllocations, optional
        Shared by the ranks of the node. None: this is the only one.
    """

    def __init__(self, rank: int, pool: Pool, allocations: NodeAllocations | None = None) -> None:
        self.rank = rank
        self.pool = pool
        self.allocations = allocations
        self._lock = threading.Lock()
        self._entries: dict[int, Entry] = {}

    def new(
        self, distribution: Distribution, dtype: np.dtype[Any], shape: ArrayShape | None = None
    ) -> DistMatrix:
        """Memory for this rank's part of a matrix, with undefined elements.

        Raises
        ------
        Failure
            ResourceError, if this node does not have enough memory.
        """
        nbytes = distribution.local_indices(self.rank).size * int(dtype.itemsize)
        if nbytes <= UNCHECKED_BYTES or self.pool.has_warm(nbytes):
            return DistMatrix(distribution, self.rank, dtype, self.pool.take(nbytes), shape)
        with self._admit(nbytes) as spare:
            if spare is not None:
                m, n = distribution.shape
                raise Failure(
                    "ResourceError",
                    f"rank {self.rank} needs {readable(nbytes)} for its part of a {m} x {n} "
                    f"{dtype} matrix in {distribution.layout}, and node {os.uname().nodename} has "
                    f"{readable(spare)} left: free handles, request workers on more nodes, or "
                    "choose a layout without copies",
                )
            return DistMatrix(distribution, self.rank, dtype, self.pool.take(nbytes), shape)

    @contextlib.contextmanager
    def _admit(self, nbytes: int) -> Iterator[int | None]:
        """None if there is room for an allocation, else the bytes that are available."""
        if self.allocations is not None:
            with self.allocations.admit(nbytes, lambda: self.pool.trim() > 0) as spare:
                yield spare
            return
        while nbytes > (available := available_bytes()):
            if not self.pool.trim():
                yield available
                return
        yield None

    def put(self, matrix_id: int, matrix: DistMatrix, *, sealed: bool) -> None:
        matrix.block.steady = sealed
        with self._lock:
            self._entries[matrix_id] = Entry(matrix, sealed=sealed)

    def entry(self, matrix_id: object) -> Entry:
        """The entry of that id. Raises `Failure` (MatrixNotFoundError)."""
        with self._lock:
            found = self._entries.get(matrix_id) if type(matrix_id) is int else None
        if found is None:
            raise Failure(
                "MatrixNotFoundError",
                f"rank {self.rank} holds no matrix {reprlib.repr(matrix_id)}: it was freed, or "
                "never existed",
            )
        return found

    def sealed(self, matrix_id: object) -> DistMatrix:
        """A complete matrix. Raises `Failure` (not found, incomplete)."""
        entry = self.entry(matrix_id)
        if not entry.sealed:
            raise Failure(
                "IncompleteMatrixError",
                f"matrix {matrix_id} is still being sent: elements are missing",
            )
        return entry.matrix

    def count(self, entry: Entry, elements: int) -> None:
        """Add `elements` to those that have arrived."""
        with self._lock:
            entry.received += elements

    def seal(self, matrix_id: int) -> None:
        """Mark a matrix as complete. Raises `Failure` if elements are missing or came twice."""
        entry = self.entry(matrix_id)
        wanted = entry.matrix.stored.size
        with self._lock:
            if not entry.sealed and entry.received != wanted:
                raise Failure(
                    "IncompleteMatrixError",
                    f"rank {self.rank} got {entry.received} of the {wanted} elements of "
                    f"matrix {matrix_id}",
                )
            entry.sealed = True
        entry.matrix.block.steady = True

    def free_from(self, first: int) -> None:
        """Forget the matrices with this id and later ones."""
        with self._lock:
            for matrix_id in [ident for ident in self._entries if ident >= first]:
                del self._entries[matrix_id]

    def free(self, matrix_id: int) -> None:
        """Forget a matrix; its memory is recycled when no reader uses it any more."""
        with self._lock:
            self._entries.pop(matrix_id, None)
