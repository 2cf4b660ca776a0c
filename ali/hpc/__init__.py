"""The MPI and the network of the ranks, and their speed: the measures of HPCC and HPCG.

``alchemist doctor`` calls `about`, ``alchemist bench hpc`` the other routines. Every routine
returns the same on all ranks, validates its result as HPCC does, and fails if the result is wrong.
Rates of lists are those of each rank while all ranks work, as in HPCC's "embarrassingly parallel"
tests; a single rate is that of all ranks together.
"""

from ali.hpc.conjugate_gradient import hpcg
from ali.hpc.fourier import fft
from ali.hpc.identity import about
from ali.hpc.kernels import dgemm, stream
from ali.hpc.messages import allreduce, ping_pong, ring
from ali.hpc.random_access import random_access
from ali.hpc.solver import hpl
from ali.hpc.suite import suite
from ali.hpc.transpose import ptrans

__all__ = [
    "about",
    "allreduce",
    "dgemm",
    "fft",
    "hpcg",
    "hpl",
    "ping_pong",
    "ptrans",
    "random_access",
    "ring",
    "stream",
    "suite",
]
