"""Names of `scipy.sparse.linalg`, on a gang: change one import.

::

    from alchemist_ray.sparse import linalg  # was: from scipy.sparse import linalg

Parameters are SciPy's. A is a handle of a sparse matrix, or one of SciPy, which is sent to the only
session of this process; b is a handle or an array. Vectors and matrices in results are handles
(``np.asarray(x)`` fetches one), few numbers NumPy arrays. Differences: the preconditioner ``M``
is the name of one of PETSc (``M="gamg"``); a method that does not converge raises `LinAlgError`,
so ``info`` is 0; ``x0``, ``callback`` and functions as operators are refused. The libraries `petsc`
and `slepc` compute; without them `cg` and `svds` use the library `sparse`.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from alchemist_ray.arrays.sparse import SparseHandle, as_csr
from alchemist_ray.attached.libraries import shipped
from alchemist_ray.attached.registry import gang_of
from alchemist_ray.clients.default_session import current_session
from alchemist_ray.errors import BadArgumentError, LibraryNotFoundError
from alchemist_ray.transfer.sending import send

__all__ = [
    "bicgstab", "cg", "eigs", "eigsh", "gmres", "lsqr", "minres", "norm", "spsolve", "svds",
]  # fmt: skip

TOL = 1e-10  # of eigenvalues, for SciPy's 0: "as precise as possible"


def cg(
    A: Any, b: Any, x0: Any = None, *, rtol: float = 1e-5, atol: float = 0.0,
    maxiter: int | None = None, M: str | None = None, callback: Any = None,
) -> tuple[Any, int]:  # fmt: skip
    """``x, 0`` of A x = b by conjugate gradients; A is positive definite."""
    _refuse("cg", x0=x0, callback=callback, atol=atol)
    A = _sent(A)
    if M is None and _library(A, "petsc", needed=False) is None:
        found = A.conjugate_gradient(b, tol=rtol, max_iterations=maxiter or 0)
        return found.X, 0
    return _solved("cg", A, b, rtol, maxiter, M)


def gmres(
    A: Any, b: Any, x0: Any = None, *, rtol: float = 1e-5, atol: float = 0.0,
    restart: int | None = None, maxiter: int | None = None, M: str | None = None,
    callback: Any = None,
) -> tuple[Any, int]:  # fmt: skip
    """``x, 0`` of A x = b by GMRES; `maxiter` counts iterations, not restarts."""
    _refuse("gmres", x0=x0, callback=callback, atol=atol)
    options = {} if restart is None else {"ksp_gmres_restart": restart}
    return _solved("gmres", _sent(A), b, rtol, maxiter, M, options)


def bicgstab(
    A: Any, b: Any, x0: Any = None, *, rtol: float = 1e-5, atol: float = 0.0,
    maxiter: int | None = None, M: str | None = None, callback: Any = None,
) -> tuple[Any, int]:  # fmt: skip
    """``x, 0`` of A x = b by BiCGSTAB."""
    _refuse("bicgstab", x0=x0, callback=callback, atol=atol)
    return _solved("bcgs", _sent(A), b, rtol, maxiter, M)


def minres(
    A: Any, b: Any, x0: Any = None, *, rtol: float = 1e-5, maxiter: int | None = None,
    M: str | None = None, callback: Any = None,
) -> tuple[Any, int]:  # fmt: skip
    """``x, 0`` of A x = b by MINRES; A is symmetric, a preconditioner must be positive definite."""
    _refuse("minres", x0=x0, callback=callback)
    return _solved("minres", _sent(A), b, rtol, maxiter, M or "none")


def spsolve(A: Any, b: Any) -> Any:
    """x of A x = b, by a direct method.

    PETSc from the index has no parallel one: each rank factors all of A.
    """
    return _solved("preonly", _sent(A), b, 1e-8, None, "redundant")[0]


def lsqr(
    A: Any, b: Any, *, atol: float = 1e-6, iter_lim: int | None = None
) -> tuple[Any, int, int, float]:
    """``x, istop, itn, r1norm``, the first four of SciPy's results; istop is 2."""
    A = _sent(A)
    right = A._dense(b)
    found = _library(A, "petsc").lstsq(A, right, tol=atol, max_iterations=iter_lim or 0)
    return found.X, 2, found.iterations, found.residual * float(np.linalg.norm(right))


def eigsh(
    A: Any, k: int = 6, M: Any = None, sigma: float | None = None, which: str = "LM",
    v0: Any = None, ncv: int | None = None, maxiter: int | None = None, tol: float = 0,
    return_eigenvectors: bool = True,
) -> Any:  # fmt: skip
    """``w, v`` of a Hermitian A, ascending, also of ``A v = w M v``."""
    return _eigen("eigsh", A, k, M, sigma, which, v0, ncv, maxiter, tol, return_eigenvectors)


def eigs(
    A: Any, k: int = 6, M: Any = None, sigma: float | None = None, which: str = "LM",
    v0: Any = None, ncv: int | None = None, maxiter: int | None = None, tol: float = 0,
    return_eigenvectors: bool = True,
) -> Any:  # fmt: skip
    """``w, v`` of a square A, also of ``A v = w M v``."""
    return _eigen("eigs", A, k, M, sigma, which, v0, ncv, maxiter, tol, return_eigenvectors)


def svds(
    A: Any, k: int = 6, ncv: int | None = None, tol: float = 0, which: str = "LM",
    v0: Any = None, maxiter: int | None = None, return_singular_vectors: bool = True,
) -> Any:  # fmt: skip
    """``u, s, vh``, s descending: A is approximately ``u @ diag(s) @ vh``."""
    _refuse("svds", v0=v0, ncv=ncv)
    A = _sent(A)
    library = _library(A, "slepc", needed=which == "SM")
    if library is None:
        S, U, V = A.truncated_svd(k, tol=tol, max_iterations=maxiter or 0)
    else:
        found = library.svds(A, k, which, tol=tol or TOL, max_iterations=maxiter or 0)
        S, U, V = found.S, found.U, found.V
    s = np.asarray(S)
    return (U, s, V.T.conj()) if return_singular_vectors else s


def norm(x: Any, ord: Any = None) -> float:
    """The Frobenius norm."""
    _refuse("norm", ord=None if ord in (None, "fro") else ord)
    return _sent(x).norm()


def _eigen(
    routine: str, A: Any, k: int, M: Any, sigma: Any, which: str, v0: Any, ncv: Any, maxiter: Any,
    tol: float, vectors: bool,
) -> Any:  # fmt: skip
    _refuse(routine, v0=v0, ncv=ncv)
    A = _sent(A)
    found = _library(A, "slepc").routine(routine)(
        A, k, which, sigma, None if M is None else A._sparse(M), tol or TOL, maxiter or 0
    )
    values = np.asarray(found.W)
    return (values, found.V) if vectors else values


def _solved(
    method: str, A: SparseHandle, b: Any, rtol: float, maxiter: int | None, M: str | None,
    options: Any = (),
) -> tuple[Any, int]:  # fmt: skip
    if not isinstance(M, str | None):
        raise BadArgumentError(
            f"M={M!r}: the name of a preconditioner of PETSc, such as 'gamg', 'bjacobi', 'jacobi'"
        )
    found = _library(A, "petsc").solve(
        A, A._dense(b), method, M or "bjacobi", rtol, maxiter or 0, options
    )
    return found.X, 0


def _sent(A: Any) -> SparseHandle:
    if isinstance(A, SparseHandle):
        return A
    sent: SparseHandle = send(current_session().connection, as_csr(A))
    return sent


def _library(A: SparseHandle, name: str, *, needed: bool = True) -> Any:
    """A library on the gang of A; None if it is not installed there and not needed."""
    try:
        return shipped(gang_of(A.matrix_ref), name)
    except LibraryNotFoundError:
        if needed:
            raise
        return None


def _refuse(routine: str, **given: Any) -> None:
    """Refuse parameters of SciPy that have no counterpart here."""
    for name, value in given.items():
        if value is not None and not (name == "atol" and value == 0):
            raise BadArgumentError(
                f"{routine}: {name}= is not supported on ranks: leave it out, or call the library "
                "itself, with options= of PETSc (als.load_library('petsc'))"
            )
