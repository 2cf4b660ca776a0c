"""Slurm's lists of nodes: ``nid[001-003,007],login1``."""

from __future__ import annotations

import re
from collections.abc import Iterator

ITEM = re.compile(r"(?:[^,\[\]]|\[[^\]]*\])+")
RANGES = re.compile(r"\[([^\]]*)\]")


def expand(text: str) -> list[str]:
    """Return the names in a list, in order. Raises `ValueError` if it is malformed."""
    if text.count("[") != text.count("]"):
        raise ValueError(f"{text!r} is not a list of nodes: a bracket is not closed")
    return [name for item in ITEM.findall(text) for name in _names(item)]


def _names(item: str) -> Iterator[str]:
    found = RANGES.search(item)
    if found is None:
        yield item
        return
    head, tail = item[: found.start()], item[found.end() :]
    for part in found[1].split(","):
        first, _, last = part.partition("-")
        if not first.isdigit() or (last and not last.isdigit()):
            raise ValueError(f"{item!r} is not a list of nodes: {part!r} is not a range")
        for number in range(int(first), int(last or first) + 1):
            yield from _names(head + str(number).zfill(len(first)) + tail)
