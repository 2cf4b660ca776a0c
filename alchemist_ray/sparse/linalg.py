"""Names of `scipy.sparse.linalg`, on a gang: change one import.

::

    from alchemist_ray.sparse import linalg  # was: from scipy.sparse import linalg

Parameters are SciPy's. A is a handle of a sparse matrix, or one of SciPy, which is sent to the only
session of this process; b is a handle or an array; of shape (n, 1) it is a vector, as in SciPy.
Vectors and matrices in results are handles (``np.asarray(x)`` fetches one), few numbers NumPy
arrays. Differences: the preconditioner ``M`` is the name of one of PETSc (``M="gamg"``); a method
that does not converge raises `LinAlgError`, so ``info`` is 0; eigenvalues are in double precision;
``x0``, ``callback`` and functions as operators are refused. The libraries `petsc` and `slepc`
compute, in double precision. `spsolve` uses the library `sparse`, as do `cg` and `svds` without
them, and for complex numbers.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from alchemist_ray.arrays.sparse import SparseHandle, as_csr, is_sparse
from alchemist_ray.attached.connection import GangConnection
from alchemist_ray.attached.libraries import shipped
from alchemist_ray.attached.registry import gang_of
from alchemist_ray.clients.default_session import current_session
from alchemist_ray.errors import BadArgumentError, LibraryNotFoundError, LinAlgError
from alchemist_ray.transfer.sending import send

__all__ = [
    "bicgstab", "cg", "eigs", "eigsh", "gmres", "lsqr", "minres", "norm", "spsolve", "svds",
]  # fmt: skip

# PETSc tests a norm that its preconditioner has changed, unless it is asked for that of b - A x.
TRUE_NORM: dict[str, dict[str, Any]] = {
    "cg": {"ksp_norm_type": "unpreconditioned"},
    "gmres": {"ksp_pc_side": "right"},
    "bcgs": {"ksp_pc_side": "right"},
}
ATTEMPTS = 3  # with smaller tolerances, where rounding errors make the true residual larger
TOL = 1e-10  # of eigenvalues, for SciPy's 0: "as precise as possible"


def cg(
    A: Any, b: Any, x0: Any = None, *, rtol: float = 1e-5, atol: float = 0.0,
    maxiter: int | None = None, M: str | None = None, callback: Any = None,
) -> tuple[Any, int]:  # fmt: skip
    """``x, 0`` of A x = b by conjugate gradients; A is positive definite."""
    _refuse("cg", x0=x0, callback=callback, atol=atol)
    A, b = _system(A, b)
    if M is None and not _computes("petsc", A):
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
    return _solved("gmres", *_system(A, b), rtol, maxiter, M, options)


def bicgstab(
    A: Any, b: Any, x0: Any = None, *, rtol: float = 1e-5, atol: float = 0.0,
    maxiter: int | None = None, M: str | None = None, callback: Any = None,
) -> tuple[Any, int]:  # fmt: skip
    """``x, 0`` of A x = b by BiCGSTAB."""
    _refuse("bicgstab", x0=x0, callback=callback, atol=atol)
    return _solved("bcgs", *_system(A, b), rtol, maxiter, M)


def minres(
    A: Any, b: Any, x0: Any = None, *, rtol: float = 1e-5, maxiter: int | None = None,
    M: str | None = None, callback: Any = None,
) -> tuple[Any, int]:  # fmt: skip
    """``x, 0`` of A x = b by MINRES; A is symmetric, a preconditioner must be positive definite."""
    _refuse("minres", x0=x0, callback=callback)
    return _solved("minres", *_system(A, b), rtol, maxiter, "none" if M is None else M)


def spsolve(A: Any, b: Any) -> Any:
    """x of A x = b by SuperLU, as in SciPy: rank 0 factors all of A. A singular A is an error."""
    A, b = _system(A, b)
    return A._call("solve", b)


def lsqr(
    A: Any, b: Any, *, atol: float = 1e-6, iter_lim: int | None = None
) -> tuple[Any, int, int, float]:
    """``x, istop, itn, r1norm``, the first four of SciPy's results; istop is 2."""
    A, b = _system(A, b)
    found = _library(A, "petsc").lstsq(
        _double(A), _double(b), tol=atol, max_iterations=iter_lim or 0
    )
    norm = found.residual * float(np.linalg.norm(b))
    return _as(found.X, A.dtype), 2, found.iterations, norm


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
    if which == "LM" and not _computes("slepc", A):
        S, U, V = A.truncated_svd(k, tol=tol, max_iterations=maxiter or 0)
    else:
        found = _library(A, "slepc").svds(
            _double(A), k, which, tol=tol or TOL, max_iterations=maxiter or 0
        )
        S, U, V = found.S, found.U, found.V
    s = np.asarray(S)
    return (U, s, V.T.conj()) if return_singular_vectors else s


def norm(x: Any, ord: Any = None) -> float:
    """The Frobenius norm."""
    if ord not in (None, "fro"):
        raise BadArgumentError(
            f"norm: ord={ord!r}: a sparse matrix on ranks has the Frobenius norm only"
        )
    return _sent(x, "x").norm()


def _eigen(
    routine: str, A: Any, k: int, M: Any, sigma: Any, which: str, v0: Any, ncv: Any, maxiter: Any,
    tol: float, vectors: bool,
) -> Any:  # fmt: skip
    _refuse(routine, v0=v0, ncv=ncv)
    A = _sent(A)
    M = None if M is None else _double(_sent(M, "M", A._gang))
    found = _library(A, "slepc").routine(routine)(
        _double(A), k, which, sigma, M, tol or TOL, maxiter or 0
    )
    values = np.asarray(found.W)
    return (values, found.V) if vectors else values


def _solved(
    method: str, A: SparseHandle, b: Any, rtol: float, maxiter: int | None, M: str | None,
    options: Any = (),
) -> tuple[Any, int]:  # fmt: skip
    """The solution of a `_system`, in its dtype."""
    if not isinstance(M, str | None):
        raise BadArgumentError(
            f"M={M!r}: the name of a preconditioner of PETSc, such as 'gamg', 'bjacobi', 'jacobi'"
        )
    petsc = _library(A, "petsc")
    x = _double(b)
    tol = rtol
    residual = np.inf
    for _ in range(ATTEMPTS):
        given = {**TRUE_NORM.get(method, {}), **dict(options)}
        found = petsc.solve(_double(A), x, method, M or "bjacobi", tol, maxiter or 0, given)
        if method not in TRUE_NORM or found.residual <= rtol:
            return _as(found.X, A.dtype), 0
        residual = found.residual
        tol *= 0.5 * rtol / residual
    raise LinAlgError(
        f"{method}: |b - A x| is {residual:.1e} |b|, and rtol={rtol:.1e}: rounding errors prevent "
        "less, so give a larger rtol or another M"
    )


def _sent(A: Any, name: str = "A", gang: GangConnection | None = None) -> SparseHandle:
    if isinstance(A, SparseHandle):
        return A
    if not is_sparse(A):
        raise BadArgumentError(
            f"{name} is a {type(A).__name__}: it must be a sparse matrix of SciPy, or a handle of "
            "one; scipy.sparse.csr_array(x) makes one of an array, and functions cannot be sent"
        )
    gang = gang or current_session("send A to one of them first").connection
    sent: SparseHandle = send(gang, as_csr(A))
    return sent


def _system(A: Any, b: Any) -> tuple[SparseHandle, Any]:
    """A matrix and a right-hand side on its gang, in the shape and dtype that SciPy gives them."""
    A = _sent(A)
    b = A._dense(b)
    b = b.reshape(-1) if b.ndim == 2 and b.shape[1] == 1 else b
    kinds = (x.dtype if x.dtype.char in "fdFD" else np.dtype(np.float64) for x in (A, b))
    kind = np.result_type(*kinds)
    return _as(A, kind), _as(b, kind)


def _as(x: Any, dtype: Any) -> Any:
    return x if x.dtype == dtype else x.astype(dtype)


def _double(x: Any) -> Any:
    """A handle with the numbers that PETSc computes with."""
    return _as(x, np.complex128 if x.dtype.kind == "c" else np.float64)


def _computes(name: str, A: SparseHandle) -> bool:
    """Whether a library is installed and computes with A; most builds have real numbers only."""
    if A.dtype.kind == "c":
        return False
    try:
        _library(A, name)
    except LibraryNotFoundError:
        return False
    return True


def _library(A: SparseHandle, name: str) -> Any:
    """A library on the gang of A. Raises `LibraryNotFoundError`."""
    return shipped(gang_of(A.matrix_ref), name)


def _refuse(routine: str, **given: Any) -> None:
    """Refuse parameters of SciPy that have no counterpart here."""
    for name, value in given.items():
        if value is not None and not (name == "atol" and value == 0):
            raise BadArgumentError(
                f"{routine}: {name}= is not supported on ranks: leave it out, or call the library "
                "itself, with options= of PETSc (als.load_library('petsc'))"
            )
