"""Memory for boxes of a matrix on their way between a file and the ranks."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray


class Buffers:
    """Memory that is reused: touching fresh memory costs more than the copy."""

    def __init__(self) -> None:
        self._held: dict[str, NDArray[np.uint8]] = {}

    def take(self, what: str, shape: tuple[int, int], dtype: np.dtype[Any]) -> NDArray[Any]:
        """A C-ordered array, valid until the same name is taken again."""
        nbytes = shape[0] * shape[1] * dtype.itemsize
        held = self._held.get(what)
        if held is None or held.nbytes < nbytes:
            held = self._held[what] = np.empty(nbytes, np.uint8)
        return held[:nbytes].view(dtype).reshape(shape)
