"""Linear systems and least squares by PETSc's Krylov methods (KSP) and preconditioners (PC)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from ali import registry
from ali.arrays.exchanges import IN_BLOCKS
from ali.blocks import require
from ali.interface import Context, routine
from ali.petsc import native
from ali.sparse.products import require_rows
from mpi_workers.matrix.dist_matrix import DistMatrix
from mpi_workers.matrix.sparse_matrix import SparseMatrix

NO_SOLUTION = 0.1  # a relative residual, whatever the method says of its own
Solution = tuple[DistMatrix, int, float, str]


@dataclass(frozen=True, slots=True)
class Problem:
    """A system to solve, as a routine called `name` got it; see `solve`."""

    name: str
    A: native.Operator
    method: str
    preconditioner: str
    tol: float
    max_iterations: int
    options: list[str] | None

    def check(self) -> None:
        """Raises `Failure` for limits and scalars that PETSc does not take."""
        name, tol, count = self.name, self.tol, self.max_iterations
        most = int(np.iinfo(native.petsc().IntType).max)
        require(0 < tol < 1, "BadArgumentError", f"{name}: tol={tol}: it must be between 0 and 1")
        words = f"{name}: max_iterations={count}: it must be between 0 and {most}"
        require(0 <= count <= most, "BadArgumentError", words)
        native.require_scalars(name, A=self.A)


class Solver:
    """A Krylov solver of PETSc for one problem, set up.

    Its objects are given to `own`, as of `native.Objects`.
    """

    def __init__(self, ctx: Context, own: native.Objects, problem: Problem) -> None:
        problem.check()
        self.problem = problem
        self.comm = ctx.comm
        self.what = f"{problem.method} with {problem.preconditioner}"
        self.A = own(native.mat(ctx, problem.A))
        self.ksp = own(native.petsc().KSP().create(self.comm))
        self.ksp.setOperators(self.A)
        with native.bad_arguments(problem.name):
            self.ksp.setType(problem.method)
            self.ksp.getPC().setType(problem.preconditioner)
        self.ksp.setTolerances(rtol=problem.tol, max_it=problem.max_iterations or None)
        configured = native.configured(problem.name, self.ksp, problem.options)
        with configured, native.as_itself(self.ksp):
            self.ksp.setUp()
            self.ksp.setUpOnBlocks()

    def solve(self, ctx: Context, B: DistMatrix) -> Solution:
        """X, iterations, the largest relative residual of a column, and the reason."""
        name, A = self.problem.name, self.problem.A
        require_rows(f"{name}: B", B, A.shape[0])
        native.require_scalars(name, B=B)
        right = ctx.to_layout(B, IN_BLOCKS)
        X = ctx.zeros((A.shape[1], B.shape[1]), A.dtype, IN_BLOCKS)
        count, worst, why = 0, 0.0, ""
        for b, x in zip(native.vectors(ctx, right), native.vectors(ctx, X), strict=True):
            with native.Objects() as own:
                now, residual, why = self._column(ctx, own(b), own(x))
            count, worst = max(count, now), max(worst, residual)
        return X.with_ndim(B.ndim), count, worst, why

    def _column(self, ctx: Context, b: Any, x: Any) -> tuple[int, float, str]:
        problem = self.problem
        length = b.norm() or 1.0
        finite = bool(np.isfinite(length))
        require(finite, "LinAlgError", f"{problem.name}: B contains NaN or infinity")

        def monitor(_: Any, number: int, norm: float) -> None:
            native.watch(ctx, self.what, problem.tol, number, norm / length)

        self.ksp.setMonitor(monitor)
        with native.as_itself(self.ksp, problem.A):
            self.ksp.solve(b, x)
        self.ksp.monitorCancel()
        count = self.ksp.getIterationNumber()
        why = native.reason(self.ksp)
        with native.Objects() as own:
            rest = own(b.duplicate())
            self.A.mult(x, rest)
            rest.axpy(-1, b)
            residual = rest.norm() / length
        # A breakdown can be called convergence where A is singular.
        solved = problem.method == "lsqr" or residual < NO_SOLUTION
        if problem.method == "preonly" and isinstance(problem.A, SparseMatrix):
            # Nothing is measured.
            size = self.A.norm() * x.norm() / length
            solved = residual <= problem.tol * (1 + size)
        require(
            self.ksp.getConvergedReason() > 0 and solved,
            "LinAlgError",
            f"{problem.name}: {self.what} has not converged: {why}, after {count} iterations, "
            f"with a relative residual of {residual:.1e}",
        )
        return count, residual, why


def _solved(ctx: Context, B: DistMatrix, problem: Problem) -> Solution:
    with native.singular(problem.name), native.Objects() as own:
        return Solver(ctx, own, problem).solve(ctx, B)


@routine("X", "iterations", "residual", "reason")
def solve(
    ctx: Context,
    A: SparseMatrix,
    B: DistMatrix,
    method: str = "gmres",
    preconditioner: str = "bjacobi",
    tol: float = 1e-8,
    max_iterations: int = 0,
    options: list[str] | None = None,
) -> Solution:
    """Solve A X = B.

    Parameters
    ----------
    A : sparse matrix, shape (n, n)
        Of the scalars of this PETSc (`about`), mostly float64.
    B : matrix, shape (n, r) or (n,)
        Each column is solved for on its own, with one preconditioner.
    method : str
        PETSc's KSP type: "cg", "gmres", "bcgs", "minres", "preonly", ...
    preconditioner : str
        PETSc's PC type: "gamg", "bjacobi", "asm", "ilu", "jacobi", "none"; "redundant" with the
        method "preonly" solves directly, on each rank. Others, such as "hypre", need a PETSc that
        has them.
    tol : float
        Relative residual, as the method measures it. Of "preonly", which measures nothing, the
        largest backward error ``|B - A X| / (|A| |X| + |B|)``.
    max_iterations : int
        0 is PETSc's 10,000.
    options : list of str, or dict
        Further options of PETSc, for this call: ``{"pc_gamg_threshold": 0.02}``.

    Returns
    -------
    X : matrix, shape (n, r) or (n,), VC_STAR:BLOCK
    iterations : int
    residual : float
        The largest ``|B - A X| / |B|`` of a column, computed from X.
    reason : str
        Why the iteration has ended, in PETSc's words: ``rtol``.

    Raises
    ------
    ShapeError
        If A is not square, or B does not have n rows.
    DtypeError
        If the scalars are not those of this PETSc.
    BadArgumentError
        For a method, preconditioner or option that PETSc does not know.
    LinAlgError
        If it does not converge; with the reason.
    RoutineError
        For other errors of PETSc, with its stack.
    """
    _require_square("solve", A)
    problem = Problem("solve", A, method, preconditioner, tol, max_iterations, options)
    return _solved(ctx, B, problem)


@routine("X", "iterations", "residual", "reason")
def solve_dense(
    ctx: Context,
    A: DistMatrix,
    B: DistMatrix,
    method: str = "gmres",
    preconditioner: str = "jacobi",
    tol: float = 1e-8,
    max_iterations: int = 0,
    options: list[str] | None = None,
) -> Solution:
    """Solve A X = B for a dense A.

    Parameters
    ----------
    A : matrix, shape (n, n)
    B, method, preconditioner, tol, max_iterations, options
        As in `solve`. Not every preconditioner takes a dense matrix.

    Returns
    -------
    X, iterations, residual, reason
        As of `solve`.

    Raises
    ------
    ShapeError, DtypeError, BadArgumentError, LinAlgError, RoutineError
        As `solve`.
    """
    _require_square("solve_dense", A)
    problem = Problem("solve_dense", A, method, preconditioner, tol, max_iterations, options)
    return _solved(ctx, B, problem)


@routine("X", "iterations", "residual", "reason")
def solve_operator(
    ctx: Context,
    B: DistMatrix,
    library: str,
    routine: str,
    path: str | None = None,
    method: str = "gmres",
    tol: float = 1e-8,
    max_iterations: int = 0,
    options: list[str] | None = None,
) -> Solution:
    """Solve A X = B, where a routine of another library multiplies by A. No preconditioner.

    Parameters
    ----------
    B : matrix, shape (n, r) or (n,)
    library, routine : str
        Called as ``Y = routine(X)`` with a vector of n elements in VC_STAR:BLOCK; a state of that
        library is another one than that of a session's `load_library`.
    path : str, optional
        As in `load_library`.
    method, tol, max_iterations, options
        As in `solve`.

    Returns
    -------
    X, iterations, residual, reason
        As of `solve`.

    Raises
    ------
    ShapeError, DtypeError, BadArgumentError, LinAlgError, RoutineError
        As `solve`.
    LibraryNotFoundError, NoSuchRoutineError
        Of the library; also its errors.
    """
    key = f"{library}: {path}"
    if key not in ctx.state:
        ctx.state[key] = registry.load(library, path)
    loaded = ctx.state[key]
    n = B.shape[0]
    known = loaded.signatures.get(routine)  # without it the call says so
    name = next((p.name for p in known.parameters), "") if known else ""

    def times(X: DistMatrix) -> DistMatrix:
        Y: DistMatrix
        (Y,) = loaded.call(ctx.gang, routine, {name: X})
        return Y

    A = native.Shell(ctx, (n, n), times)
    problem = Problem("solve_operator", A, method, "none", tol, max_iterations, options)
    return _solved(ctx, B, problem)


@routine("X", "iterations", "residual")
def lstsq(
    ctx: Context,
    A: SparseMatrix,
    B: DistMatrix,
    tol: float = 1e-8,
    max_iterations: int = 0,
    options: list[str] | None = None,
) -> tuple[DistMatrix, int, float]:
    """X with the least ``|B - A X|``, by LSQR.

    Parameters
    ----------
    A : sparse matrix, shape (m, n)
    B : matrix, shape (m, r) or (m,)
    tol, max_iterations, options
        As in `solve`.

    Returns
    -------
    X : matrix, shape (n, r) or (n,), VC_STAR:BLOCK
    iterations : int
    residual : float
        The largest ``|B - A X| / |B|`` of a column.

    Raises
    ------
    ShapeError, DtypeError, BadArgumentError, LinAlgError, RoutineError
        As `solve`.
    """
    problem = Problem("lstsq", A, "lsqr", "none", tol, max_iterations, options)
    return _solved(ctx, B, problem)[:3]


# Solvers that stay, by the memory of the matrix that stands for them.
_prepared: WeakKeyDictionary[object, Solver] = WeakKeyDictionary()


@routine("solver")
def prepare(
    ctx: Context,
    A: SparseMatrix,
    method: str = "gmres",
    preconditioner: str = "bjacobi",
    tol: float = 1e-8,
    max_iterations: int = 0,
    options: list[str] | None = None,
) -> DistMatrix:
    """A solver with its preconditioner, for `solve_prepared`.

    Parameters
    ----------
    A, method, preconditioner, tol, max_iterations, options
        As in `solve`.

    Returns
    -------
    solver : matrix
        Of one number, which stands for it: the solver is freed with this matrix.
    """
    _require_square("prepare", A)
    made = ctx.zeros((1,), np.int8, "STAR_STAR")
    problem = Problem("solve_prepared", A, method, preconditioner, tol, max_iterations, options)
    _prepared[made.block] = _kept(ctx, problem)
    return made


def _kept(ctx: Context, problem: Problem) -> Solver:
    """A solver whose objects stay: petsc4py leaves them to `native.mat` when it is dropped."""
    with native.singular("prepare"), native.Objects() as own:
        solver = Solver(ctx, own, problem)
        own.release()
    return solver


@routine("X", "iterations", "residual", "reason")
def solve_prepared(ctx: Context, solver: DistMatrix, B: DistMatrix) -> Solution:
    """Solve A X = B with a solver of `prepare`.

    Parameters
    ----------
    solver : matrix
    B : matrix, shape (n, r) or (n,)

    Returns
    -------
    X, iterations, residual, reason
        As of `solve`.

    Raises
    ------
    BadArgumentError
        If it is no solver of these ranks: one does not outlive a resize or a restored checkpoint.

    Notes
    -----
    After a call that failed the solver is set up again: its messages may never complete.
    """
    found = _prepared.get(solver.block)
    there = all(ctx.comm.allgather(found is not None))
    require(
        there, "BadArgumentError", "solve_prepared: this is no solver of these ranks: prepare it"
    )
    assert found is not None
    if found.comm != ctx.comm:
        found = _prepared[solver.block] = _kept(ctx, found.problem)
    return found.solve(ctx, B)


def _require_square(name: str, A: native.Operator) -> None:
    m, n = A.shape
    require(m == n, "ShapeError", f"{name}: A is {m} x {n}; it must be square")
