"""MPICH's waits where ranks share cores."""

from __future__ import annotations

import os

from mpi_workers.local import local_gang
from mpi_workers.node.processes import crowded, set_waits

CORES = len(os.sched_getaffinity(0))
BARRIER = "MPIR_CVAR_BARRIER_POSIX_INTRA_ALGORITHM"


def test_ranks_share_cores_when_there_are_more_of_them() -> None:
    assert not crowded(CORES)
    assert crowded(CORES + 1)


def test_only_crowded_ranks_get_other_algorithms_and_a_sites_own_are_kept() -> None:
    alone: dict[str, str] = {}
    set_waits(False, alone)
    assert alone == {"MPIR_CVAR_ENABLE_HEAVY_YIELD": "0"}
    site = {BARRIER: "release_gather"}
    set_waits(True, site)
    assert site[BARRIER] == "release_gather"
    assert site["MPIR_CVAR_BCAST_POSIX_INTRA_ALGORITHM"] == "mpir"
    assert site["MPIR_CVAR_ENABLE_HEAVY_YIELD"] == "1"


def test_collectives_of_crowded_ranks_use_little_of_the_cores() -> None:
    """Ranks that wait in MPI for one that computes: they may not take its core."""
    used = local_gang.run("tests.mpi_workers.node.ranks_crowding:while_one_computes", CORES + 2)
    assert max(used) < 0.4, used
