"""The Alchemist-Library Interface: the names that authors of libraries import."""

from ali.interface import Context, routine
from ali.run import context
from mpi_workers.matrix.dist_matrix import DistMatrix

__all__ = ["Context", "DistMatrix", "context", "routine"]
