"""The file in which rank 0 leaves the result of a user's function: a pickle and its buffers.

    number of parts u64 | bytes of each part u64 ... | the parts

The first part is the pickle, the others are its out-of-band buffers.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

SIZE = struct.Struct("!Q")


def write(path: Path, pickled: memoryview, buffers: Sequence[memoryview]) -> None:
    """Write a pickle and its buffers to a new file of mode 600."""
    parts = [pickled, *buffers]
    with open(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "wb") as file:
        file.write(SIZE.pack(len(parts)))
        for part in parts:
            file.write(SIZE.pack(part.nbytes))
        for part in parts:
            file.write(part)


def read(path: Path) -> list[NDArray[np.uint8]]:
    """The parts, as views of the mapped file. Raises `FileNotFoundError`."""
    content = np.memmap(path, np.uint8, mode="r")
    count = int(content[: SIZE.size].view(">u8")[0])
    first = SIZE.size * (1 + count)
    sizes = content[SIZE.size : first].view(">u8").astype(np.int64)
    ends = (first + np.cumsum(sizes)).tolist()
    starts = [first, *ends[:-1]]
    return [np.asarray(content[start:end]) for start, end in zip(starts, ends, strict=True)]
