"""The indices that a rank holds, as arrays."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from mpi_workers.matrix.layout import Grid, Shape, local_indices


def owned_indices(
    layout: str, shape: Shape, grid: Grid, rank: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Global indices of the rows and columns that `rank` holds, ascending."""
    rows, cols = local_indices(layout, shape, grid, rank)
    return np.array(rows, dtype=np.int64), np.array(cols, dtype=np.int64)
