"""Benchmarks: ratios against peers, measured in one run."""

import os

import mpi4py

# Kernels of another processor, which would slow NumPy down; read when NumPy is loaded.
for name in ("OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE"):
    os.environ.pop(name, None)

# Ranks call MPI_Init themselves. Any other process would leave a file in /dev/shm.
mpi4py.rc.initialize = False
