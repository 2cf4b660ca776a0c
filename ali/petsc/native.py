"""Finds PETSc, and passes it matrices and options.

petsc4py and PETSc come from the index (``pip install 'alchemist-on-ray[petsc]'``), or a site's
PETSc has them: petsc4py below ``$PETSC_DIR/$PETSC_ARCH/lib``.
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ali.arrays.exchanges import IN_BLOCKS
from ali.blocks import Array, block, require
from ali.interface import Context
from ali.mpi_family import refuse_second_mpi
from ali.sparse.elements import without_duplicates
from mpi_workers.failures import Failure, Interrupted
from mpi_workers.matrix.dist_matrix import DistMatrix
from mpi_workers.matrix.sparse_matrix import SparseMatrix

ADVICE = (
    "pip install 'alchemist-on-ray[petsc]' on every node (20 minutes: it is compiled; `make petsc` "
    "has the settings), or set PETSC_DIR (and PETSC_ARCH) to a PETSc that was configured with "
    "--with-petsc4py and the gang's MPI"
)
CHECK_EVERY = 4  # iterations: then ranks look whether the call was cancelled
_numbers = itertools.count(1)
Times = Callable[[DistMatrix], DistMatrix]


def load(state: dict[str, Any], path: str | None) -> None:
    """Load PETSc on this rank. Raises `Failure` (LibraryNotFoundError) where it is not found."""
    _module("petsc4py")


def _module(package: str) -> Any:
    """``petsc4py.PETSc`` or ``slepc4py.SLEPc``, initialised."""
    name = {"petsc4py": "PETSc", "slepc4py": "SLEPc"}[package]
    if f"{package}.{name}" in sys.modules:
        return sys.modules[f"{package}.{name}"]
    if site := os.environ.get("PETSC_DIR"):
        where = Path(site, os.environ.get("PETSC_ARCH", ""), "lib")
        if (where / package).is_dir():
            sys.path.insert(0, str(where))
    try:
        # A crash must end the rank, whose output tells where: not PETSc's handler.
        importlib.import_module(package).init(["alchemist", "-no_signal_handler"])
        found = importlib.import_module(f"{package}.{name}")
    except ImportError as error:
        raise Failure(
            "LibraryNotFoundError",
            f"{name} is not installed on node {os.uname().nodename} ({error}): {ADVICE}",
        ) from None
    refuse_second_mpi(package.removesuffix("4py"), Path(found.__file__ or package))
    return found


def petsc() -> Any:
    """The module ``petsc4py.PETSc``."""
    return _module("petsc4py")


def slepc() -> Any:
    """The module ``slepc4py.SLEPc``. Raises `Failure` (LibraryNotFoundError)."""
    petsc()
    return _module("slepc4py")


def describe() -> str:
    """PETSc's version, scalars, indices and file."""
    P = petsc()
    version = ".".join(map(str, P.Sys.getVersion()))
    scalars, integers = np.dtype(P.ScalarType).name, np.dtype(P.IntType).name
    return f"PETSc {version}, scalars {scalars}, indices {integers}, {P.__file__}"


def require_scalars(name: str, **matrices: SparseMatrix | DistMatrix | Shell | None) -> None:
    """Refuse matrices of another dtype than the scalars of this PETSc."""
    scalars = np.dtype(petsc().ScalarType)
    for letter, matrix in matrices.items():
        if matrix is None or matrix.dtype == scalars:
            continue
        remedy = f"{letter}.astype({scalars.name!r})"
        if matrix.dtype.kind == "c" != scalars.kind:
            remedy = "complex numbers need one that was configured with --with-scalar-type=complex"
        raise Failure(
            "DtypeError",
            f"{name}: {letter} is of {matrix.dtype}, and this build of PETSc has scalars of "
            f"{scalars} ({describe()}): {remedy}",
        )


class Objects:
    """PETSc's objects of one call, which are given to it: they are destroyed at its end.

    Those that Python drops stay until `garbage_cleanup`; so do these after an error that is no
    `Failure`, which all ranks raise: other ranks may not come here.
    """

    def __init__(self) -> None:
        self._made: list[Any] = []

    def __call__(self, new: Any) -> Any:
        self._made.append(new)
        return new

    def release(self) -> None:
        """Leave them to Python."""
        self._made.clear()

    def __enter__(self) -> Objects:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None or issubclass(kind, Failure):
            for each in reversed(self._made):
                each.destroy()


class Shell:
    """A routine as a matrix: it gets a vector in VC_STAR:BLOCK, and returns A times it."""

    def __init__(self, ctx: Context, shape: tuple[int, int], times: Times) -> None:
        self.ctx, self.shape, self.times = ctx, shape, times
        self.dtype = np.dtype(petsc().ScalarType)
        self.error: BaseException | None = None  # PETSc's own does not tell it

    def mult(self, _: Any, x: Any, y: Any) -> None:
        """PETSc's name."""
        try:
            self._mult(x, y)
        except BaseException as error:
            self.error = error
            raise

    def _mult(self, x: Any, y: Any) -> None:
        X = self.ctx.empty((self.shape[1],), self.dtype, IN_BLOCKS)
        block(X)[:, 0] = x.getArray(readonly=True)
        found = self.ctx.to_layout(self.times(X), IN_BLOCKS)
        require(
            found.shape[0] == self.shape[0] and found.shape[1] == 1,
            "ShapeError",
            f"the operator has returned {found.shape[0]} x {found.shape[1]} elements for a vector "
            f"of {self.shape[0]}",
        )
        y.setArray(block(found)[:, 0])


Operator = SparseMatrix | DistMatrix | Shell


def mat(ctx: Context, A: Operator) -> Any:
    """PETSc's matrix; it copies the elements. Destroys those that Python has dropped."""
    P = petsc()
    P.garbage_cleanup(ctx.comm)
    m, n = A.shape
    size = (len(_own(ctx, m)), m), (len(_own(ctx, n)), n)
    if isinstance(A, Shell):
        return P.Mat().createPython(size, A, comm=ctx.comm)
    if isinstance(A, DistMatrix):
        rows = np.asfortranarray(block(ctx.to_layout(A, IN_BLOCKS)))
        _require_finite(ctx, rows)
        return P.Mat().createDense(size, array=rows, comm=ctx.comm)
    integers = np.dtype(P.IntType)
    require(
        max(*A.shape, *A.form.counts) <= np.iinfo(integers).max,
        "DtypeError",
        f"a matrix of {A.shape[0]} x {A.shape[1]} with {A.nnz} elements needs a PETSc with 64-bit "
        f"indices (--with-64-bit-indices), and this one has {integers} ({describe()})",
    )
    _require_finite(ctx, A.local.data)
    local = without_duplicates(A)  # for PETSc an element at the same place replaces the first
    starts, columns = (x.astype(integers, copy=False) for x in (local.indptr, local.indices))
    csr = starts, columns, local.data
    return P.Mat().createAIJ(size, csr=csr, comm=ctx.comm)


def _require_finite(ctx: Context, elements: Array) -> None:
    finite = all(ctx.comm.allgather(bool(np.isfinite(elements).all())))
    require(finite, "LinAlgError", "the matrix contains NaN or infinity")


def _own(ctx: Context, length: int) -> range:
    """This rank's rows of a vector in VC_STAR:BLOCK."""
    height = max(1, -(-length // ctx.size))
    return range(*(min(length, height * k) for k in (ctx.rank, ctx.rank + 1)))


def vectors(ctx: Context, X: DistMatrix) -> list[Any]:
    """PETSc's vectors on the columns of a matrix in VC_STAR:BLOCK, without a copy."""
    assert X.layout == IN_BLOCKS
    own = block(X)
    size = (len(own), X.shape[0])
    return [
        petsc().Vec().createWithArray(own[:, j], size=size, comm=ctx.comm)
        for j in range(X.shape[1])
    ]


@contextlib.contextmanager
def configured(name: str, solver: Any, options: Sequence[str] | None) -> Iterator[None]:
    """Set options of this solver alone, as ``name=value``; one that is not used is refused.

    Errors of PETSc inside the block that come from a value are those of PETSc.
    """
    P = petsc()
    prefix = f"call{next(_numbers)}_"
    known = P.Options(prefix)
    keys = []
    for option in options or ():
        key, _, value = option.lstrip("-").partition("=")
        known.setValue(key, value or None)
        keys.append(key)
    solver.setOptionsPrefix(prefix)
    try:
        with bad_arguments(name):
            solver.setFromOptions()
        yield
        unused = [key for key in keys if not known.used(key)]
        require(
            not unused,
            "BadArgumentError",
            f"{name}: PETSc has not used the option {', '.join(unused)}: this solver and "
            "preconditioner have none of that name",
        )
    finally:
        for key in keys:
            known.delValue(key)


@contextlib.contextmanager
def bad_arguments(name: str) -> Iterator[None]:
    """Errors of PETSc in the block are those of arguments: names that it does not know."""
    try:
        yield
    except petsc().Error as error:
        last = str(error).strip().splitlines()[-1]
        raise Failure("BadArgumentError", f"{name}: {last}") from None


def watch(ctx: Context, what: str, tol: float, number: int, norm: float) -> None:
    """For monitors of iterations: show the residual, and end the call if it was cancelled.

    All ranks look at the same iterations: a rank that left alone would make the others wait.
    """
    if number % CHECK_EVERY == 0:
        ctx.comm.barrier()  # raises `Interrupted`
    share = float(np.log(norm) / np.log(tol)) if 0 < norm < 1 and 0 < tol < 1 else 0.0
    ctx.progress(min(1.0, max(0.0, share)), f"{what}, iteration {number}: residual {norm:.1e}")


@contextlib.contextmanager
def as_itself(solver: Any, operator: Operator | None = None) -> Iterator[None]:
    """An `Interrupted` of a monitor, errors of an operator and of PETSc are raised as themselves.

    The first may come back as an error of PETSc, the second of slepc4py as a SystemError. The
    solver stays then: to destroy one that PETSc has left in the middle can crash (multigrid).
    """
    try:
        yield
    except (petsc().Error, SystemError) as error:
        solver.incRef()
        if isinstance(operator, Shell) and operator.error is not None:
            raise operator.error from None
        causes: list[BaseException] = [error]
        while (cause := causes[-1].__cause__ or causes[-1].__context__) is not None:
            causes.append(cause)
        for kind in (Interrupted, petsc().Error):
            for found in causes:
                if isinstance(found, kind):
                    raise found from None
        raise
    except BaseException:
        solver.incRef()
        raise


@contextlib.contextmanager
def singular(name: str, what: str = "A") -> Iterator[None]:
    """Errors of PETSc from zeros on a diagonal say that a matrix is singular for the method."""
    try:
        yield
    except petsc().Error as error:
        if any(words in str(error).lower() for words in ("zero pivot", "missing diagonal",
                                                         "all diagonal locations")):  # fmt: skip
            raise Failure(
                "LinAlgError",
                f"{name}: {what} is singular, or has a zero on its diagonal, which this method "
                f"cannot use: {error}",
            ) from None
        raise


def reason(solver: Any) -> str:
    """Why a solver has ended, in words."""
    words = {
        value: name for name, value in vars(type(solver).ConvergedReason).items()
        if not name.startswith("_")
    }  # fmt: skip
    name: str = words.get(solver.getConvergedReason(), str(solver.getConvergedReason()))
    return name.removeprefix("CONVERGED_").removeprefix("DIVERGED_").lower().replace("_", " ")
