"""Vectors, rows and columns: the same elements with another number of dimensions."""

from __future__ import annotations

from collections.abc import Sequence

from ali.interface import Context
from ali.linalg import products
from mpi_workers.matrix.dist_matrix import DistMatrix
from mpi_workers.matrix.layout import stored_shape


def with_shape(ctx: Context, A: DistMatrix, shape: Sequence[int]) -> DistMatrix:
    """A row, column or single element in a shape with other axes of length 1.

    A row that becomes a column is copied locally in the mirrored layout; the rest shares A's
    memory, so A must not be an argument of the routine.
    """
    if A.shape != stored_shape(shape):
        A = products.transpose(ctx, A)
    return A.with_ndim(len(shape))
