"""The compiled copy kernel (`copy_kernel.c`), where it was built: transposing copies of lines.

Calls release the interpreter's lock. Without the kernel, NumPy copies in tiles.
"""

from __future__ import annotations

import ctypes
import errno
import os
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

LIBRARY = Path(__file__).with_name("copy_kernel.so")
LEVELS = ("plain C", "AVX2", "AVX-512")
SWITCH = "ALCHEMIST_COPY_KERNEL"  # "0": NumPy copies
ITEMSIZES = (1, 2, 4, 8, 16)

Addresses = NDArray[np.uintp]


@cache
def kernel() -> Any:
    """The kernel's functions, or None."""
    if os.environ.get(SWITCH) == "0":
        return None
    try:
        found = ctypes.CDLL(str(LIBRARY))
        size, pointer = ctypes.c_ssize_t, ctypes.c_void_p
        for transposing in (found.alchemist_transpose, found.alchemist_transpose_guarded):
            transposing.argtypes = [
                *(pointer, size, pointer, size, size, ctypes.c_int, ctypes.c_int)
            ]
        found.alchemist_transpose.restype = None
        found.alchemist_transpose_guarded.restype = ctypes.c_int
        found.alchemist_copy_level.restype = ctypes.c_int
    except (OSError, AttributeError):
        return None
    return found


@cache
def level() -> int | None:
    """The best instructions of this processor, an index of `LEVELS`; None without the kernel."""
    library = kernel()
    return None if library is None else int(library.alchemist_copy_level())


def description() -> str:
    """How elements are copied here, for people."""
    best = level()
    return "NumPy" if best is None else f"compiled, {LEVELS[best]}"


def lines(array: NDArray[Any], axis: int) -> Addresses:
    """The addresses of the rows (axis 0) or columns (axis 1) of a matrix."""
    start, stride = array.__array_interface__["data"][0], array.strides[axis]
    found: Addresses = (start + stride * np.arange(array.shape[axis])).astype(np.uintp)
    return found


def transpose(
    source: Addresses,
    target: Addresses,
    itemsize: int,
    *,
    stream: bool,
    best: int | None = None,
    guarded: bool = False,
) -> None:
    """Copy element j of source line i to element i of target line j.

    Parameters
    ----------
    source, target : ndarray of addresses
        Of lines with contiguous elements: as many in each line of one as the other has lines.
    itemsize : int
        Bytes of an element, one of `ITEMSIZES`.
    stream : bool
        Whether to write past the cache: for more than fits into it.
    best : int, optional
        Use no instructions over this level. Default: `level`.
    guarded : bool
        The source is a mapped file.

    Raises
    ------
    OSError
        If a page of a mapped file cannot be read.
    """
    library = kernel()
    work = library.alchemist_transpose_guarded if guarded else library.alchemist_transpose
    failed = work(
        source.ctypes.data,
        len(source),
        target.ctypes.data,
        len(target),
        itemsize,
        level() if best is None else best,
        stream,
    )
    if failed:
        raise OSError(errno.EIO, "a page of the mapped file cannot be read")
