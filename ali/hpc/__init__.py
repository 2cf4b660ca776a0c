"""The MPI and the network of the ranks, and their speed.

``alchemist doctor`` calls `about`, ``alchemist bench hpc`` the other routines. Every routine
returns the same on all ranks, validates its result as HPCC does, and fails if the result is wrong.
Rates of lists are those of each rank while all ranks work, as in HPCC's "embarrassingly parallel"
tests. The other kernels of HPCC and HPCG are in `benchmarks/papers/hpcc.py`.
"""

from ali.hpc.identity import about
from ali.hpc.measures import allreduce, dgemm, ping_pong, ring, stream, suite

__all__ = ["about", "allreduce", "dgemm", "ping_pong", "ring", "stream", "suite"]
