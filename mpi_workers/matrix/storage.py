"""The parts of matrices that a rank keeps between commands, by id.

They are in the rank's table, too (`table`), from which the next process of this rank has them.
"""

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
from mpi_workers.matrix.layout import ArrayShape, Distribution, stored_shape
from mpi_workers.matrix.memory import UNCHECKED_BYTES, MemoryBlock, Pool
from mpi_workers.matrix.sizes import readable
from mpi_workers.matrix.table import MatrixTable, Row


class Entry:
    """A matrix, the number of its elements that have arrived, and the last loan among these."""

    __slots__ = ("counted", "ident", "matrix", "received", "sealed")

    def __init__(
        self, ident: int, matrix: DistMatrix, *, sealed: bool, received: int = 0, counted: int = 0
    ) -> None:
        self.ident = ident
        self.matrix = matrix
        self.received = received
        self.counted = counted
        self.sealed = sealed

    @property
    def row(self) -> Row:
        """Its row in the table."""
        matrix, block = self.matrix, self.matrix.block
        about = {
            "segment": block.segment.id, "nbytes": block.nbytes, "layout": matrix.layout,
            "shape": list(matrix.array_shape), "grid": list(matrix.grid),
            "dtype": matrix.dtype.str,
        }  # fmt: skip
        tainted = block.segment.tainted
        return Row(self.ident, about, self.sealed, tainted, self.received, self.counted)


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

    Attributes
    ----------
    table : MatrixTable or None
        Outlives this process.
    """

    def __init__(self, rank: int, pool: Pool, allocations: NodeAllocations | None = None) -> None:
        self.rank = rank
        self.pool = pool
        self.allocations = allocations
        self.table: MatrixTable | None = None
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
        self._put(Entry(matrix_id, matrix, sealed=sealed))

    def _put(self, entry: Entry) -> None:
        entry.matrix.block.steady = entry.sealed
        with self._lock:
            if self.table is not None:
                self.table.put(entry.row)
            self._entries[entry.ident] = entry

    def adopt(self, row: Row, block: MemoryBlock) -> None:
        """Keep a matrix of the process of this rank before this one."""
        about = row.about
        shape, grid = tuple(about["shape"]), tuple(about["grid"])
        distribution = Distribution(about["layout"], stored_shape(shape), grid)
        matrix = DistMatrix(distribution, self.rank, np.dtype(about["dtype"]), block, shape)
        block.segment.tainted |= row.tainted
        self._put(
            Entry(row.ident, matrix, sealed=row.sealed, received=row.received, counted=row.counted)
        )

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

    def count(self, entry: Entry, elements: int, loan: int) -> None:
        """Add `elements` to those that have arrived, once for each loan."""
        with self._lock:
            if entry.counted == loan:
                return  # by the process before this one, which ended before it could say so
            entry.received, entry.counted = entry.received + elements, loan
            if self.table is not None and self._entries.get(entry.ident) is entry:
                self.table.count(entry.ident, entry.received, loan)

    def taint(self, entry: Entry) -> None:
        """Never use the memory of a matrix again: a lost process may still write into it."""
        segment = entry.matrix.block.segment
        segment.tainted = True
        with self._lock:
            if self.table is not None:
                for ident, other in self._entries.items():
                    if other.matrix.block.segment is segment:
                        self.table.mark(ident, tainted=True)

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
            if self.table is not None:
                self.table.mark(matrix_id, sealed=True)
        entry.matrix.block.steady = True

    def free_from(self, first: int) -> None:
        """Forget the matrices with this id and later ones."""
        with self._lock:
            for matrix_id in [ident for ident in self._entries if ident >= first]:
                self._forget(matrix_id)

    def free(self, matrix_id: int) -> None:
        """Forget a matrix; its memory is recycled when no reader uses it any more."""
        with self._lock:
            self._forget(matrix_id)

    def _forget(self, matrix_id: int) -> None:
        if self.table is not None:
            self.table.remove(matrix_id)  # before its memory can be used again
        self._entries.pop(matrix_id, None)
