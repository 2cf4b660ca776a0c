"""NumPy arrays for results: large ones reuse memory that is already mapped.

First touch of fresh memory costs ten times a copy into warm memory.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np
from numpy.typing import NDArray

from alchemist_ray.errors import from_failure
from mpi_workers.failures import Failure

try:
    from mpi_workers.matrix.memory import Pool

    HAS_POOL = True
except ImportError:  # it needs Linux: NumPy allocates
    HAS_POOL = False

POOLED_NBYTES = 1 << 20  # 1 MiB: smaller results come from the ordinary allocator
KEPT_NBYTES = 1 << 30  # 1 GiB, or an eighth of the machine's memory


def _new_pool() -> Pool | None:
    if not HAS_POOL:
        return None
    memory_nbytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return Pool(min(KEPT_NBYTES, memory_nbytes // 8), shared=False)


_pool = _new_pool()


def result_array(shape: tuple[int, int], dtype: np.dtype[Any]) -> NDArray[Any]:
    """An uninitialised C-ordered array. Raises `ResourceError` if the memory is not there."""
    nbytes = shape[0] * shape[1] * dtype.itemsize
    if _pool is None or nbytes < POOLED_NBYTES:
        return np.empty(shape, dtype)
    try:
        return _pool.take(nbytes).array().view(dtype).reshape(shape)
    except Failure as failure:
        raise from_failure(failure) from None
