"""SparseMatrix: one rank's rows of a sparse matrix."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpi_workers.matrix.dist_matrix import DistMatrix
from mpi_workers.matrix.sparse_rows import SparseRows, of_layout


class SparseMatrix:
    """One rank's rows of a sparse matrix whose rows are in contiguous blocks over the gang.

    Each rank has ``ceil(m / size)`` rows, the last ones fewer or none: those that it has of a dense
    matrix in ``VC_STAR:BLOCK``. Do not change it in place: make a new one (`Context.new_sparse`).

    Attributes
    ----------
    shape : (int, int)
        Of the whole matrix.
    dtype : numpy.dtype
    nnz : int
        Stored elements on all ranks.
    rows : range
        This rank's rows, as global numbers.
    local : scipy.sparse.csr_array, shape (len(rows), n)
        This rank's rows, with global columns, without a copy.
    packed : DistMatrix
        The bytes behind it, as the gang keeps them.
    """

    def __init__(self, packed: DistMatrix) -> None:
        form = of_layout(packed.layout)
        if form is None:
            raise ValueError(f"{packed!r} is not a sparse matrix")
        self.packed = packed
        self.form: SparseRows = form
        self.shape = form.shape
        self.dtype = form.dtype
        self.nnz = form.nnz
        self.rows = form.rows(packed.rank)

    def arrays(self, part: int) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
        """Starts of rows, columns and elements of a part that this rank holds, without a copy."""
        raw = self.packed.stored.reshape(-1)
        first = self.packed.rows[0]
        kinds = (self.form.index, self.form.index, self.dtype)
        starts, columns, elements = (
            # SciPy copies views of arrays that are much larger.
            np.frombuffer(raw[at.start - first : at.stop - first].data, kind)
            for at, kind in zip(self.form.sections(part), kinds, strict=True)
        )
        return starts, columns, elements

    def fault(self) -> str:
        """The fault in the starts and columns of this rank; empty if they are right."""
        n = self.shape[1]
        for part in self.form.parts(self.packed.rank, self.packed.distribution.size):
            starts, columns, _ = self.arrays(part)
            if starts[0] != 0 or starts[-1] != len(columns) or (np.diff(starts) < 0).any():
                return "the starts of its rows do not ascend from 0 to the number of elements"
            # Negative ones are large as unsigned integers: one pass instead of two.
            if len(columns) and columns.view(f"u{columns.itemsize}").max() >= n:
                return f"columns {columns.min()} to {columns.max()} of a matrix with {n} columns"
        return ""

    @cached_property
    def local(self) -> Any:
        from scipy.sparse import csr_array  # noqa: PLC0415  (ranks without it have no such matrix)

        starts, columns, elements = self.arrays(self.packed.rank)
        return csr_array((elements, columns, starts), shape=(len(self.rows), self.shape[1]))

    def __repr__(self) -> str:
        m, n = self.shape
        return (
            f"<SparseMatrix {m} x {n} {self.dtype}, {self.nnz} elements, rank {self.packed.rank}: "
            f"rows {self.rows.start} to {self.rows.stop}>"
        )
