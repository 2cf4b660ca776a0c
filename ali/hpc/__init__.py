"""The MPI and the network of the ranks, and their speed.

``alchemist doctor`` calls `about`, ``alchemist bench hpc`` the other routines. Every routine
returns the same on all ranks. Rates are those of each rank while all ranks work, as in HPCC's
"embarrassingly parallel" and ping-pong tests.
"""

from ali.hpc.identity import about
from ali.hpc.measures import allreduce, copy, matmul, ping_pong

__all__ = ["about", "allreduce", "copy", "matmul", "ping_pong"]
