"""A record: the results of a step of one copy, in the layout of `ali.simulator.spec.Spec`."""

from __future__ import annotations

from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]


class Record:
    """Views of one row of a table of records.

    Parameters
    ----------
    table : ndarray
        Structured, with the layout of a spec.
    row : int

    Attributes
    ----------
    scores : ndarray of float64
        The scores, and last 1.0 if the episode has ended.
    """

    def __init__(self, table: Array, row: int) -> None:
        names = table.dtype.names or ()
        self.scores: Array = table["scores"][row]
        self._parts: list[tuple[Array, slice]] = []
        begin = 0
        for name in names[1:]:
            part = table[name][row]
            self._parts.append((part, slice(begin, begin + len(part))))
            begin += len(part)

    def observe(self, numbers: Array | None) -> bool:
        """Write an observation; whether each integer of it is one, and in the range of its dtype.

        Numbers beyond the range of a floating-point dtype become infinite.
        """
        fits = True
        if numbers is None:
            return fits
        for part, where in self._parts:
            found = numbers[where]
            np.copyto(part, found, casting="unsafe")
            if part.dtype.kind in "iu" and part.dtype != found.dtype:
                fits = fits and bool((part == found).all())
        return fits
