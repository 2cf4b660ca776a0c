"""``python -m mpi_workers fork-server FD | rank CONFIG | ...``: see `entry_points`."""

from __future__ import annotations

import contextlib
import importlib
import sys

import mpi4py

from mpi_workers.failures import Failure
from mpi_workers.waits import mpi_layer

if __name__ == "__main__":
    with contextlib.suppress(Failure):  # the ranks say so
        mpi_layer.loaded()  # before MPI, which a rank takes its calls from
    mpi4py.rc.initialize = False  # a rank calls MPI_Init, after the fork
    importlib.import_module("mpi_workers.entry_points").main(sys.argv[1:])
