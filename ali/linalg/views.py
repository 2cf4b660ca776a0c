"""The transpose of a matrix as a view in the mirrored layout, without communication."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import numpy as np

from ali.blocks import Array
from mpi_workers.matrix.dist_matrix import DistMatrix
from mpi_workers.matrix.layout import Distribution, mirrored

if TYPE_CHECKING:
    from mpi_workers.matrix.memory import MemoryBlock

OPERATIONS = ("N", "T", "C")


class _View:
    """In place of a `MemoryBlock`: an array that is a view of another matrix's block."""

    def __init__(self, array: Array) -> None:
        self._array = array

    def matrix(self, shape: tuple[int, int], dtype: np.dtype[Any]) -> Array:
        return self._array.reshape(shape) if not self._array.size else self._array


def operand(A: DistMatrix, operation: str) -> DistMatrix:
    """A ("N"), A^T ("T") or A^H ("C"), read-only; a routine must not return it.

    Notes
    -----
    "T" is a view whose local block is C-ordered. "C" of a complex matrix copies the local
    block once, since BLAS conjugates only together with a transposition.
    """
    if operation == "N":
        return A
    distribution = Distribution(mirrored(A.layout), (A.shape[1], A.shape[0]), A.grid)
    local = A.local.conj() if operation == "C" and A.dtype.kind == "c" else A.local
    return DistMatrix(distribution, A.rank, A.dtype, cast("MemoryBlock", _View(local.T)))
