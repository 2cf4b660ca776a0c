"""Fetches in Ray workers, which unmap the ranks' memory when they have not used it for a second.

A fetch maps the ranks' memory, and the next fetch reuses the mapping. But Ray's workers outlive
gangs, and a mapping keeps its pages allocated, even those of a gang that has ended.
"""

from __future__ import annotations

from typing import Any

from numpy.typing import NDArray

from alchemist_ray.gang.matrix_ref import MatrixRef
from alchemist_ray.gang.registry import gang_of
from alchemist_ray.transfer import fetching

IDLE_S = 1.0


def fetch(handle: MatrixRef, rows: slice | None = None, cols: slice | None = None) -> NDArray[Any]:
    """Fetch a part of a matrix. Only the gang's owner keeps its memory mapped for longer."""
    connection = gang_of(handle)
    if not connection.owner:
        connection.nodes.idle_s = IDLE_S
    return fetching.fetch(connection, handle, rows, cols)
