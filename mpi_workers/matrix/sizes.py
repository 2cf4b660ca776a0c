"""Sizes in messages, options and quotas."""

from __future__ import annotations

import re

from mpi_workers.failures import Failure

SUFFIXES = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
SUFFIXES |= {"Ki": 1 << 10, "Mi": 1 << 20, "Gi": 1 << 30, "Ti": 1 << 40}


def parse_nbytes(text: str) -> int:
    """Convert ``8Gi`` or ``500M``, as Kubernetes writes quantities. Raises `ValueError`."""
    found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)(k|M|G|T|Ki|Mi|Gi|Ti)?", text)
    if not found:
        raise ValueError(f"{text!r} is not a size such as 8Gi (2^30 bytes each) or 500M (10^6)")
    return int(float(found[1]) * SUFFIXES[found[2] or ""])


def readable(nbytes: float) -> str:
    """A number of bytes for messages, in decimal units: ``"1.5 GB"``."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if nbytes < 1000 or unit == "TB":
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1000
    raise AssertionError("unreachable")


def check_room(nbytes: int, room: int | None) -> None:
    """Refuse `nbytes` of matrices where a quota leaves `room`; None: no limit.

    The dispatcher and the ranks check it alike.

    Raises
    ------
    Failure
        ResourceError.
    """
    if room is not None and nbytes > max(0, room):
        raise Failure(
            "ResourceError",
            f"{readable(nbytes)} more are asked for; the quota of this gang's user leaves "
            f"{readable(max(0, room))}: free handles, or end another gang",
        )
