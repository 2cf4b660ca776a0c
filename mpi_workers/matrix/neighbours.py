"""Neighbouring blocks of a matrix, joined: one large block moves faster than many small ones."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

Bounds = tuple[int, int, int, int]  # rows [0]:[1] and columns [2]:[3] of the matrix
Joined = tuple[Bounds, list[int]]  # a rectangle, and the numbers of the blocks that fill it


def joined(blocks: Iterable[Joined], axis: int, most: float = math.inf) -> list[Joined]:
    """Join blocks one of which begins where the other ends, between the same two sides.

    Parameters
    ----------
    blocks : iterable of (bounds, numbers)
        The lists of numbers are extended in place.
    axis : int
        0: blocks one below the other. 1: side by side.
    most : float
        Elements of a joined block, at most.

    Returns
    -------
    list of (bounds, numbers)
        All blocks, also those that are joined to no other; numbers in order.
    """
    if axis == 0:  # columns first: the sides that joined blocks share
        blocks = [((c0, c1, r0, r1), numbers) for (r0, r1, c0, c1), numbers in blocks]
    found: list[list[Any]] = []
    last: list[Any] = [None] * 5  # of the last rectangle; a list, which grows
    for (low, high, start, stop), numbers in sorted(blocks):
        if (
            start == last[3]
            and low == last[0]
            and high == last[1]
            and (high - low) * (stop - last[2]) <= most
        ):
            last[3] = stop
            last[4] += numbers
        else:
            last = [low, high, start, stop, numbers]
            found.append(last)
    if axis == 0:
        return [((r0, r1, c0, c1), numbers) for c0, c1, r0, r1, numbers in found]
    return [((r0, r1, c0, c1), numbers) for r0, r1, c0, c1, numbers in found]
