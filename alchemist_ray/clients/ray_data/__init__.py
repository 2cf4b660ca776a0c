"""Ray Data: a Dataset's blocks become a matrix, and a matrix becomes a Dataset.

A row of the matrix is a row of the Dataset: its columns in the order of the schema, the elements
of a tensor in C order. Needs ``pip install 'alchemist-on-ray[data]'``.
"""

from __future__ import annotations

try:
    import ray.data  # noqa: F401  (a missing one is reported here)
except ImportError as error:
    from alchemist_ray.errors import LibraryLoadError

    raise LibraryLoadError(
        f"Datasets need Ray Data on every node: pip install 'alchemist-on-ray[data]' ({error})"
    ) from error

from alchemist_ray.clients.ray_data.blocks import inspect
from alchemist_ray.clients.ray_data.results import to_dataset

__all__ = ["inspect", "to_dataset"]
