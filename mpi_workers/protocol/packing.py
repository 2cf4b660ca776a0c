"""Several byte strings in one vector."""

from collections.abc import Sequence

ALIGNMENT = 64


def places(sizes: Sequence[int]) -> list[slice]:
    """Where parts of these bytes begin and end in one vector: each array in them is aligned."""
    found, at = [], 0
    for nbytes in sizes:
        found.append(slice(at, at + nbytes))
        at += -(-nbytes // ALIGNMENT) * ALIGNMENT
    return found
