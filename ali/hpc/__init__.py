"""What a machine gives to ranks: which MPI, over which network, how fast.

Behind ``alchemist doctor`` (`about`) and ``alchemist bench hpc`` (the others). Every routine
returns the same on all ranks; rates are as each rank has them while all of them work, as in HPCC's
"embarrassingly parallel" and ping-pong tests.
"""

from ali.hpc.identity import about
from ali.hpc.measures import allreduce, copy, matmul, ping_pong

__all__ = ["about", "allreduce", "copy", "matmul", "ping_pong"]
