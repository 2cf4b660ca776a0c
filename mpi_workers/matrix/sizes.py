"""Sizes in messages."""

from __future__ import annotations


def readable(nbytes: float) -> str:
    """A number of bytes for messages, in decimal units: ``"1.5 GB"``."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if nbytes < 1000 or unit == "TB":
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1000
    raise AssertionError("unreachable")
