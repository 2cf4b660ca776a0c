"""Layouts for tests: Elemental's 14, and some of the many layouts of blocks."""

from __future__ import annotations

from hypothesis import strategies as st

from mpi_workers.matrix.layout import LAYOUTS, Form

SOME_LAYOUTS = (*LAYOUTS, "BLOCK", "BLOCK_CYCLIC:2", "BLOCK_CYCLIC:3", "MR_MC:2", "VC_STAR:BLOCK")


def every_layout() -> st.SearchStrategy[str]:
    """Elemental's 14, and layouts of blocks of all sizes."""
    names = [name for name in LAYOUTS if set(name.split("_")) & {"MC", "MR", "VC", "VR"}]
    sizes = st.none() | st.integers(2, 30)
    blocks = st.builds(
        lambda name, size: Form(*name.split("_"), size).layout, st.sampled_from(names), sizes
    )
    return st.sampled_from(LAYOUTS) | blocks
