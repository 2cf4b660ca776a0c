"""A program whose last rank has the fault that its argument names, for `causes`.

It imports little: each rank of it is another Python.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from typing import Any


def fault(how: str, comm: Any) -> None:
    """Have the fault, in Python."""
    match how:
        case "SIGSEGV":
            ctypes.string_at(8)
        case "SIGKILL":
            os.kill(os.getpid(), signal.SIGKILL)
        case "exit(3)":
            os._exit(3)
        case "exit(0)":
            os._exit(0)
        case "MPI_Abort":
            comm.Abort(7)
        case "OOM":
            spent = []
            while True:
                spent.append(b"x" * (1 << 24))
        case "deadlock":
            comm.recv(tag=9)
        case "error":
            raise ValueError("the first cause")


if __name__ == "__main__":
    from mpi4py import MPI

    if sys.argv[1] and MPI.COMM_WORLD.rank == MPI.COMM_WORLD.size - 1:
        fault(sys.argv[1], MPI.COMM_WORLD)
    assert MPI.COMM_WORLD.allreduce(1.0) == MPI.COMM_WORLD.size
