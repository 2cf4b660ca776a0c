"""The Alchemist-Library Interface: what the author of a library imports."""

from ali.interface import Context, routine
from ali.run import context
from mpi_workers.matrix.dist_matrix import DistMatrix

__all__ = ["Context", "DistMatrix", "context", "routine"]
