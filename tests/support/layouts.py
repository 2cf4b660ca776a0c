"""Layouts for tests: Elemental's 14, some of the many of blocks; the indices that a rank holds."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

from mpi_workers.matrix.layout import LAYOUTS, Form, Grid, Shape, local_indices

SOME_LAYOUTS = (*LAYOUTS, "BLOCK", "BLOCK_CYCLIC:2", "BLOCK_CYCLIC:3", "MR_MC:2", "VC_STAR:BLOCK")


def every_layout() -> st.SearchStrategy[str]:
    """Elemental's 14, and layouts of blocks of all sizes."""
    names = [name for name in LAYOUTS if set(name.split("_")) & {"MC", "MR", "VC", "VR"}]
    sizes = st.none() | st.integers(2, 30)
    blocks = st.builds(
        lambda name, size: Form(*name.split("_"), size).layout, st.sampled_from(names), sizes
    )
    return st.sampled_from(LAYOUTS) | blocks


def owned_indices(
    layout: str, shape: Shape, grid: Grid, rank: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Global indices of the rows and columns that `rank` holds, ascending."""
    rows, cols = local_indices(layout, shape, grid, rank)
    return np.array(rows, dtype=np.int64), np.array(cols, dtype=np.int64)
