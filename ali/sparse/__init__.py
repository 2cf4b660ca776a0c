"""Sparse matrices: products, combinations of elements, rows, sums, solvers.

The rows of a `SparseMatrix` are in contiguous blocks over the ranks, each rank's as a SciPy matrix.
Vectors and dense matrices that match its rows are in VC_STAR:BLOCK: those in another layout are
redistributed once.

"Error" and "Peak memory" of docstrings are those of `ali.linalg`, measured for 2000 x 60 (errors)
and 100000 x 120 elements (memory), a fifth of which are not zero.
"""

from ali.interface import collect_routines

PURE = True  # no routine has other effects than its results; rows that are kept only save time

__all__ = collect_routines(__name__)
