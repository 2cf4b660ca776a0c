"""Numbers with nouns, and long lists, in messages."""

from collections.abc import Sequence


def counted(number: float, noun: str) -> str:
    """Format ``1 node``, ``2 nodes``."""
    return f"{number:g} {noun}" if number == 1 else f"{number:g} {noun}s"


def listed(words: Sequence[str], most: int, separator: str = ", ") -> str:
    """Format ``a, b and 3 more``: at most `most` words are shown."""
    rest = f" and {len(words) - most} more" if len(words) > most else ""
    return separator.join(words[:most]) + rest
