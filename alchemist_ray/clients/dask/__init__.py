"""Dask: arrays and data frames become matrices, and matrices become lazy dask arrays.

`linalg` has drop-ins for `dask.array.linalg`. Needs ``pip install 'alchemist-on-ray[dask]'``.

Importing this imports `ray.util.dask`, which gives `dask.persist` a keyword that schedulers
other than Ray's ignore. Dask's configuration is not changed.
"""

from __future__ import annotations

try:
    import dask.array  # noqa: F401
    import ray.util.dask  # noqa: F401  (a missing one is reported here)
except ImportError as error:
    from alchemist_ray.errors import LibraryLoadError

    raise LibraryLoadError(
        f"dask arrays need dask on every node: pip install 'alchemist-on-ray[dask]' ({error})"
    ) from error

from alchemist_ray.clients.dask.chunks import inspect
from alchemist_ray.clients.dask.results import to_dask

__all__ = ["inspect", "to_dask"]
