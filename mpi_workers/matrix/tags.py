"""MPI tags of this project's messages, which share the communicator with those of routines."""

from __future__ import annotations

PAIRWISE = 11  # redistribution
TALL_QR = 12
COLLECTIVE = 13
PIVOTS = 15
PRODUCT = 16
