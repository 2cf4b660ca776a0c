"""Numbers with nouns in messages."""


def counted(number: float, noun: str) -> str:
    """Format ``1 node``, ``2 nodes``."""
    return f"{number:g} {noun}" if number == 1 else f"{number:g} {noun}s"
