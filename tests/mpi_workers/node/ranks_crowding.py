"""Functions that test_crowding.py runs on the ranks."""

from __future__ import annotations

import time

import numpy as np
from mpi4py import MPI

from mpi_workers.rank.gang_view import GangView

ROUNDS = 20
COMPUTED_S = 0.02


def while_one_computes(gang: GangView) -> list[float]:
    """CPU time in collectives, relative to all time: of the world, and of the gang's own."""
    shares = []
    buffer = np.zeros(1)
    for comm in (MPI.COMM_WORLD, gang.comm):
        for _ in range(ROUNDS):  # MPICH changes the algorithm after some calls
            comm.Allreduce(MPI.IN_PLACE, buffer)
        begun, cpu = time.monotonic(), time.process_time()
        for _ in range(ROUNDS):
            if gang.rank == 0:
                time.sleep(COMPUTED_S)
            comm.Allreduce(MPI.IN_PLACE, buffer)
        share = (time.process_time() - cpu) / (time.monotonic() - begun)
        shares.append(MPI.COMM_WORLD.allreduce(share, MPI.MAX))
    return shares
