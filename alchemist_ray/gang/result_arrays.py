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
from mpi_workers.matrix.memory import Pool

POOLED_NBYTES = 1 << 20  # 1 MiB: smaller results come from the ordinary allocator
KEPT_NBYTES = 1 << 30  # 1 GiB, or an eighth of the machine's memory

_pool = Pool(
    min(KEPT_NBYTES, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 8), shared=False
)


def result_array(shape: tuple[int, int], dtype: np.dtype[Any]) -> NDArray[Any]:
    """An uninitialised C-ordered array. Raises `ResourceError` if the memory is not there."""
    nbytes = shape[0] * shape[1] * dtype.itemsize
    if nbytes < POOLED_NBYTES:
        return np.empty(shape, dtype)
    try:
        return _pool.take(nbytes).array().view(dtype).reshape(shape)
    except Failure as failure:
        raise from_failure(failure) from None
