"""Counts and durations of fuzzers, property tests, soak and chaos: short, or long on demand.

``make test`` runs the short versions. ``make test-long`` sets ``ALCHEMIST_TEST_LONG=1``.
"""

from __future__ import annotations

import os

LONG = os.environ.get("ALCHEMIST_TEST_LONG", "") not in ("", "0")


def scaled(short: int, long: int) -> int:
    """Return ``long`` under ``make test-long``, else ``short``."""
    return long if LONG else short
