"""Nodes with more ranks than cores: MPICH's waits there must let the other ranks run."""

from __future__ import annotations

import os
from collections.abc import MutableMapping

# MPICH's collectives through shared memory test a flag 1000 times between two tests of everything
# else, and do not sleep. Its collectives of messages sleep: 6 ranks on 2 cores took 79 s for the
# conformance tests of ScaLAPACK with the former, 17 s with the latter.
BY_MESSAGES = {
    f"MPIR_CVAR_{name}_POSIX_INTRA_ALGORITHM": "mpir"
    for name in ("ALLREDUCE", "BARRIER", "BCAST", "REDUCE")
}


def crowded(threads: int) -> bool:
    """Whether this machine has fewer cores than this number of busy threads."""
    return threads > len(os.sched_getaffinity(0))


def set_waits(crowded: bool, env: MutableMapping[str, str] = os.environ) -> None:
    """Set MPICH's variables for waits. Call it before MPI_Init.

    Parameters
    ----------
    crowded : bool
        Whether the ranks share cores.
    env : mapping
        Algorithms that are chosen already are kept.
    """
    env["MPIR_CVAR_ENABLE_HEAVY_YIELD"] = "1" if crowded else "0"  # yields sleep, or do not
    if crowded:
        for name, value in BY_MESSAGES.items():
            env.setdefault(name, value)
