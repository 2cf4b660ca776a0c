"""SLEPc's eigenvalues and singular values of sparse matrices, found at run time as PETSc is.

Each result comes with its relative residual, computed from it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from ali.arrays.exchanges import IN_BLOCKS
from ali.blocks import block, require, require_choice
from ali.interface import Context, routine
from ali.petsc import native
from mpi_workers.failures import Failure
from mpi_workers.matrix.dist_matrix import DistMatrix
from mpi_workers.matrix.sparse_matrix import SparseMatrix

Pair = tuple[complex, Any, float]  # an eigenvalue, this rank's part of the vector, the residual
Eigen = tuple[DistMatrix, DistMatrix, list[float]]  # values, vectors, residuals
COPY_TOL = 1e-6  # a value that is better by less, relative, is a copy of the last one
LOST, ROUNDED = 1e3, 1e-6  # residuals above so many tol, and above rounding, are no solution's
FEW = "A has fewer singular values that are not 0: a smaller k, or {'svd_type': 'trlanczos'}"
REASONS = {  # of errors, by SLEPc's words
    "inner product is not well defined": "M is not positive definite",
    "Negative eigenvalue computed": FEW,
    "Illegal value of m": FEW,
}

PURE = True  # no routine has other effects than its results

__all__ = ["eigs", "eigsh", "svds"]

WHICH = {  # SciPy's names, and SLEPc's
    "LM": "LARGEST_MAGNITUDE", "SM": "SMALLEST_MAGNITUDE", "LA": "LARGEST_REAL",
    "SA": "SMALLEST_REAL", "LR": "LARGEST_REAL", "SR": "SMALLEST_REAL",
    "LI": "LARGEST_IMAGINARY", "SI": "SMALLEST_IMAGINARY",
}  # fmt: skip


def load(state: dict[str, Any], path: str | None) -> None:
    """Load PETSc and SLEPc on this rank. Raises `Failure` (LibraryNotFoundError)."""
    native.slepc()


@dataclass(frozen=True, slots=True)
class Problem:
    """An eigenvalue problem, as `eigsh` (`hermitian`) or `eigs` got it."""

    name: str
    hermitian: bool
    A: SparseMatrix
    k: int
    which: str
    sigma: float | None
    M: SparseMatrix | None
    tol: float
    max_iterations: int
    options: list[str] | None

    def check(self) -> None:
        """Raises `Failure` for arguments that do not fit each other, or PETSc."""
        name, M, (m, n) = self.name, self.M, self.A.shape
        finite = self.sigma is None or bool(np.isfinite(self.sigma))
        _require_limits(name, self.tol, self.max_iterations)
        require(finite, "BadArgumentError", f"{name}: sigma={self.sigma}")
        require(m == n, "ShapeError", f"{name}: A is {m} x {n}; it must be square")
        require(M is None or M.shape == (m, n), "ShapeError", f"{name}: M must have the shape of A")
        require(
            1 <= self.k <= n, "BadArgumentError", f"{name}: k={self.k} of a matrix of order {n}"
        )
        ends = ("LA", "SA") if self.hermitian else ("LR", "SR", "LI", "SI")
        require_choice(name, "which", self.which, ("LM", "SM", *ends))
        native.require_scalars(name, A=self.A, M=M)

    @property
    def factored(self) -> str:
        """The matrix that PETSc factors, for messages."""
        if self.sigma is None:
            return "a matrix M"
        return f"A - sigma M (sigma={self.sigma}: another one may do)"

    def distance(self, w: complex) -> float:
        """Small for the eigenvalues of a Hermitian matrix that are asked for."""
        if self.sigma is not None:
            return abs(w - self.sigma)
        return {"LM": -abs(w), "SM": abs(w), "LA": -w.real, "SA": w.real}[self.which]


@routine("W", "V", "residuals", vectors=("W",))
def eigsh(
    ctx: Context,
    A: SparseMatrix,
    k: int = 6,
    which: str = "LM",
    sigma: float | None = None,
    M: SparseMatrix | None = None,
    tol: float = 1e-8,
    max_iterations: int = 0,
    options: list[str] | None = None,
) -> tuple[DistMatrix, DistMatrix, list[float]]:
    """Eigenvalues and vectors of a Hermitian A, or of ``A v = w M v``.

    With all copies of multiple eigenvalues: one more is looked for beside those found.

    Parameters
    ----------
    A : sparse matrix, shape (n, n)
        Hermitian, which is seen by the residuals alone.
    k : int
        How many, from 1 to n.
    which : {"LM", "SM", "LA", "SA"}
        As in SciPy: of largest or smallest magnitude or value. With `sigma` it is not used.
    sigma : float, optional
        Those closest to it, by shift and invert. Without a parallel direct solver in PETSc each
        rank factors ``A - sigma M``: `options` can choose another (``{"st_pc_type": "lu"}``).
    M : sparse matrix, optional
        Positive definite.
    tol : float
        Of the residual.
    max_iterations : int
        0 is SLEPc's default.
    options
        As in `petsc.solve`: ``{"eps_type": "lobpcg"}``.

    Returns
    -------
    W : vector, shape (k,), ascending
    V : matrix, shape (n, k), VC_STAR:BLOCK
    residuals : list of float
        ``|A v - w M v| / |w v|`` of each.

    Raises
    ------
    ShapeError, DtypeError, BadArgumentError
        As `petsc.solve`.
    LinAlgError
        If fewer than k converge, or their residuals are large: A is not Hermitian, or factors for
        `sigma` or `M` have lost the digits.
    """
    problem = Problem(
        "eigsh", True, A, k, which, sigma, M, tol, max_iterations, options
    )  # fmt: skip
    with native.Objects() as own:
        return _eigen(ctx, own, problem)


@routine("W", "V", "residuals", vectors=("W",))
def eigs(
    ctx: Context,
    A: SparseMatrix,
    k: int = 6,
    which: str = "LM",
    sigma: float | None = None,
    M: SparseMatrix | None = None,
    tol: float = 1e-8,
    max_iterations: int = 0,
    options: list[str] | None = None,
) -> tuple[DistMatrix, DistMatrix, list[float]]:
    """Eigenvalues and vectors of a square A, or of ``A v = w M v``; both are complex.

    Of a multiple eigenvalue copies may be missing: a Krylov space has one of them.

    Parameters
    ----------
    A, k, sigma, M, tol, max_iterations, options
        As in `eigsh`.
    which : {"LM", "SM", "LR", "SR", "LI", "SI"}
        As in SciPy.

    Returns
    -------
    W : vector, shape (k,), in the order of `which`
    V : matrix, shape (n, k), VC_STAR:BLOCK
    residuals : list of float

    Raises
    ------
    ShapeError, DtypeError, BadArgumentError, LinAlgError
        As `eigsh`.
    """
    problem = Problem(
        "eigs", False, A, k, which, sigma, M, tol, max_iterations, options
    )  # fmt: skip
    with native.Objects() as own:
        return _eigen(ctx, own, problem)


def _eigen(ctx: Context, own: native.Objects, problem: Problem) -> Eigen:
    """Steps: check, configure, solve, check the residuals, and give the results in order."""
    problem.check()
    eps = _configured(ctx, own, problem)
    pairs = _pairs(ctx, own, eps, problem)
    sizes = [matrix and matrix.norm() for matrix in eps.getOperators()]
    worst = max(r * abs(w) / (sizes[0] + abs(w) * (sizes[1] or 1.0)) for w, _, r in pairs)
    require(
        worst <= max(LOST * problem.tol, ROUNDED),
        "LinAlgError",
        f"{problem.name}: the vectors found have residuals of {worst:.1e}, relative to the "
        + "matrices: "
        + "A is not Hermitian, or " * problem.hermitian
        + f"{problem.factored} was factored without pivoting, which lost the digits",
    )
    values = np.array([w for w, *_ in pairs])
    order = np.argsort(values) if problem.hermitian else np.arange(problem.k)
    V = ctx.empty((problem.A.shape[0], problem.k), pairs[0][1].dtype, IN_BLOCKS)
    for j, i in enumerate(order):
        block(V)[:, j] = pairs[i][1]
    return ctx.new_replicated(values[order][:, None]), V, [pairs[i][2] for i in order]


def _configured(ctx: Context, own: native.Objects, problem: Problem) -> Any:
    """SLEPc's solver for a problem, without the options of its caller."""
    S = native.slepc()
    name, M, k = problem.name, problem.M, problem.k
    eps = own(S.EPS().create(ctx.comm))
    eps.setOperators(
        own(native.mat(ctx, problem.A)), None if M is None else own(native.mat(ctx, M))
    )
    kind = ("G" if M else "") + ("HEP" if problem.hermitian else "NHEP")
    eps.setProblemType(getattr(S.EPS.ProblemType, kind))
    eps.setDimensions(k)
    eps.setTolerances(problem.tol, problem.max_iterations or None)
    if problem.sigma is None:
        eps.setWhichEigenpairs(getattr(S.EPS.Which, WHICH[problem.which]))
    else:
        eps.setWhichEigenpairs(S.EPS.Which.TARGET_MAGNITUDE)
        eps.setTarget(problem.sigma)
        eps.getST().setType("sinvert")
    if problem.sigma is not None or M is not None:  # systems are solved: by a factor, on each rank
        ksp = eps.getST().getKSP()
        ksp.setType("preonly")
        ksp.getPC().setType("redundant" if ctx.size > 1 else "lu")
    eps.setMonitor(lambda _, number, found, *__: _watch(ctx, name, number, found, k))
    return eps


def _pairs(ctx: Context, own: native.Objects, eps: Any, problem: Problem) -> list[Pair]:
    """Solve; the pairs that were asked for, in SLEPc's order."""
    n = problem.A.shape[0]
    rows = len(block(ctx.empty((n, 1), problem.A.dtype, IN_BLOCKS)))
    real, imaginary = (
        own(native.petsc().Vec().createMPI((rows, n), comm=ctx.comm)) for _ in range(2)
    )

    def found(i: int) -> Pair:
        value = eps.getEigenpair(i, real, imaginary)
        vector = real.getArray().copy()
        residual = float(eps.computeError(i, native.slepc().EPS.ErrorType.RELATIVE))
        if problem.hermitian:
            return value.real, vector, residual
        if vector.dtype.kind != "c":
            vector = vector + 1j * imaginary.getArray()
        return value, vector, residual

    name = problem.name
    configured = native.configured(name, eps, problem.options)
    with _explained(name, problem.factored), configured, native.as_itself(eps):
        eps.solve()
        _require_found(name, eps, eps.getConverged(), problem.k)
        pairs = [found(i) for i in range(problem.k)]
        if problem.hermitian:
            _add_copies(own, eps, pairs, found, problem.distance)
    return pairs


def _add_copies(
    own: native.Objects, eps: Any, pairs: list[Pair], found: Callable[[int], Pair],
    distance: Callable[[complex], float],
) -> None:  # fmt: skip
    """Replace pairs by better ones that the solver has missed.

    A Krylov space has one vector of each eigenvalue, and copies come by rounding alone, after
    others. So solve again, orthogonal to all known vectors, until nothing better is found.
    """
    A, _ = eps.getOperators()
    known: list[Any] = []
    news = list(pairs)
    while len(known) + len(news) < A.getSize()[0]:
        for _, vector, _ in news:
            known.append(own(A.createVecRight()))
            known[-1].setArray(vector)
        eps.setDeflationSpace(known)
        eps.setDimensions(1)
        eps.solve()
        pairs.sort(key=lambda pair: distance(pair[0]))
        worst = pairs[-1][0]
        if not eps.getConverged():
            return
        better = found(0)
        if not distance(better[0]) < distance(worst) - COPY_TOL * abs(worst):
            return
        pairs[-1] = better
        news = [better]


@routine("S", "U", "V", "residuals", vectors=("S",))
def svds(
    ctx: Context,
    A: SparseMatrix,
    k: int = 6,
    which: str = "LM",
    tol: float = 1e-8,
    max_iterations: int = 0,
    options: list[str] | None = None,
) -> tuple[DistMatrix, DistMatrix, DistMatrix, list[float]]:
    """Singular values and vectors: A is approximately U diag(S) V^H.

    Of a multiple singular value copies may be missing: a Krylov space has one of them.

    Parameters
    ----------
    A : sparse matrix, shape (m, n)
    k : int
        How many, from 1 to min(m, n).
    which : {"LM", "SM"}
        The largest or the smallest.
    tol, max_iterations, options
        As in `eigsh`: ``{"svd_type": "trlanczos"}``.

    Returns
    -------
    S : vector, shape (k,), descending
    U, V : matrix, shapes (m, k) and (n, k), VC_STAR:BLOCK
    residuals : list of float
        Relative, of each.

    Raises
    ------
    DtypeError, BadArgumentError, LinAlgError
        As `eigsh`.
    """
    m, n = A.shape
    _require_limits("svds", tol, max_iterations)
    require(1 <= k <= min(m, n), "BadArgumentError", f"svds: k={k} of a {m} x {n} matrix")
    require_choice("svds", "which", which, ("LM", "SM"))
    native.require_scalars("svds", A=A)
    with native.Objects() as own:
        return _svds(ctx, own, A, k, which, tol, max_iterations, options)


def _svds(
    ctx: Context, own: native.Objects, A: SparseMatrix, k: int, which: str, tol: float,
    max_iterations: int, options: list[str] | None,
) -> tuple[DistMatrix, DistMatrix, DistMatrix, list[float]]:  # fmt: skip
    L = native.slepc()
    m, n = A.shape
    svd = own(L.SVD().create(ctx.comm))
    svd.setOperator(own(native.mat(ctx, A)))
    svd.setDimensions(k)
    svd.setTolerances(tol, max_iterations or None)
    svd.setWhichSingularTriplets(L.SVD.Which.LARGEST if which == "LM" else L.SVD.Which.SMALLEST)
    svd.setMonitor(lambda _, number, found, *__: _watch(ctx, "svds", number, found, k))
    with _explained("svds"), native.configured("svds", svd, options), native.as_itself(svd):
        svd.solve()
    _require_found("svds", svd, svd.getConverged(), k)
    U, V = (ctx.zeros((length, k), A.dtype, IN_BLOCKS) for length in (m, n))
    left, right = ([own(v) for v in native.vectors(ctx, X)] for X in (U, V))
    both = list(zip(left, right, strict=True))
    order = range(k) if which == "LM" else range(k - 1, -1, -1)
    values = [svd.getSingularTriplet(i, *both[j]) for j, i in enumerate(order)]
    residuals = [float(svd.computeError(i, L.SVD.ErrorType.RELATIVE)) for i in order]
    return ctx.new_replicated(np.array(values)[:, None]), U, V, residuals


@contextlib.contextmanager
def _explained(name: str, factored: str = "A") -> Iterator[None]:
    """Errors of SLEPc that come from the matrices say so; `factored` is what PETSc factors."""
    with native.singular(name, factored):
        try:
            yield
        except native.petsc().Error as error:
            for words, why in REASONS.items():
                if words in str(error):
                    raise Failure("LinAlgError", f"{name}: {why}: {error}") from None
            raise


def _require_limits(name: str, tol: float, max_iterations: int) -> None:
    require(0 < tol < 1, "BadArgumentError", f"{name}: tol={tol}: it must be between 0 and 1")
    require(max_iterations >= 0, "BadArgumentError", f"{name}: max_iterations={max_iterations} < 0")


def _watch(ctx: Context, name: str, number: int, found: int, k: int) -> None:
    ctx.comm.barrier()  # raises `Interrupted`; an iteration takes long
    ctx.progress(min(1.0, found / k), f"{name}, iteration {number}: {found} of {k} converged")


def _require_found(name: str, solver: Any, found: int, k: int) -> None:
    require(
        found >= k,
        "LinAlgError",
        f"{name}: {found} of {k} have converged ({native.reason(solver)}): allow more iterations, "
        "or choose a larger tol",
    )
