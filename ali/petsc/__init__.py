"""PETSc's solvers of sparse linear systems, found at run time.

``solve(A, B, method, preconditioner, options=...)``, ``lstsq``, and ``prepare``, which keeps a
solver on the ranks for many right-hand sides. Matrices have the scalars of the PETSc that is
installed; `about` says which it is. The library `slepc` has eigenvalues and singular values.
"""

from __future__ import annotations

from ali.interface import Context, routine
from ali.petsc import native
from ali.petsc.solvers import (
    lstsq,
    prepare,
    solve,
    solve_dense,
    solve_operator,
    solve_prepared,
)

load = native.load

__all__ = ["about", "lstsq", "prepare", "solve", "solve_dense", "solve_operator", "solve_prepared"]

PURE = True  # no routine has other effects than its results; a solver is made again with its matrix


@routine("library")
def about(ctx: Context) -> str:
    """The PETSc of this gang: version, scalars, indices, file."""
    return native.describe()
