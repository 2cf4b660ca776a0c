"""A function that test_fabric.py runs on the ranks."""

from __future__ import annotations

import os
from typing import Any

import numpy as np

from mpi_workers.rank.gang_view import GangView
from tests.support.traces import listening_ports


def listeners(gang: GangView) -> dict[str, Any]:
    """The TCP and UDP ports on which ranks listen after they have exchanged messages."""
    found = np.empty(2)
    gang.comm.Allreduce(np.full(2, 0.5), found)
    return {
        "listeners": gang.comm.allgather(listening_ports(os.getpid())),
        "sum": found.tolist(),
        "transports": os.environ.get("UCX_TLS"),
    }
