"""ScaLAPACK: finds and loads it, its BLACS grid for a gang's communicator, and its functions.

Checks come before a call: ScaLAPACK would print an error, or end the process.

Every argument is passed by reference; the length of a CHARACTER follows hidden after all other
arguments. Integers have 32 bits (LP64). The interpreter lock is released during a call, which
cannot be interrupted.

scalapack4py, the ctypes wrapper on the package index (1.0, MIT, maintained), is not used: its BLACS
grids span MPI_COMM_WORLD in row-major order, but ours must be column-major, and a failed call may
require another one; it has no gelqf and no orglq; it checks with assertions, needs all its
functions at once, and leaves finding and preloading the library, work space and hidden lengths to
its caller. Only its table of argument types would remain, and passing by reference needs none.

Candidates are tried in this order; if a file is named (1, 2), no other is tried:

1. the path given to ``load_library("scalapack", path)``,
2. the environment's ``SCALAPACK_LIB``,
3. Cray LibSci: ``libsci_*_mpi.so`` below ``CRAY_LIBSCI_PREFIX_DIR``,
4. the ``mkl`` wheel, or any MKL, in this Python's own ``lib`` folder,
5. ``libscalapack-mpich.so.*``, then ``libscalapack.so.*``, on ``LD_LIBRARY_PATH``, in this
   Python's ``lib`` folder and in the system's library folders.

A library that the user has set up thus comes before the system's, and an optimised one next to
this Python before it too. A path, or ``SCALAPACK_LIB``, may be several files separated by colons:
the parts of a library, loaded together.

A library that needs another MPI than the ranks' is refused (see `ali.mpi_family`).
"""

from __future__ import annotations

import ctypes
import os
import re
import sys
import sysconfig
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

from ali.blocks import by_reference
from ali.interface import Context
from ali.loader import (
    known_processor,
    load_together,
    mapped_files,
    mpi_file,
    provide_mpich,
    symbol_file,
)
from ali.mpi_family import foreign_mpi, our_mpi, second_mpi
from ali.native.grids import Grid, kept
from mpi_workers.failures import Failure

LETTERS = {"float32": "s", "float64": "d", "complex64": "c", "complex128": "z"}
INT_MAX = 2**31 - 1

FUNCTIONS = (
    "p?gemm", "p?gesv", "p?potrf", "p?getrf", "p?geqrf", "p?orgqr", "p?gelqf", "p?orglq",
    "p?gels", "p?syevd", "p?gesvd", "p?gebrd", "p?ormqr", "p?ormlq", "p?lange", "p?getrs",
    "p?gemr2d",
)  # fmt: skip
BLACS = (
    "Csys2blacs_handle", "Cfree_blacs_system_handle", "Cblacs_gridinit", "Cblacs_gridinfo",
    "Cblacs_gridexit",
)  # fmt: skip

# Functions by which a tuned BLAS is known: OpenBLAS, BLIS, MKL, ATLAS, FlexiBLAS, Arm's.
TUNED = (
    "openblas_get_config", "bli_info_get_version_str", "MKL_Get_Version_String", "ATL_buildinfo",
    "flexiblas_get_version", "armplversion_",
)  # fmt: skip


def symbol(name: str, dtype: np.dtype[Any]) -> str:
    """The name of ``"p?gemm"`` for a dtype: ``"pdgemm_"``."""
    if dtype.kind == "c":  # unitary and Hermitian instead of orthogonal and symmetric
        name = name.replace("p?or", "p?un").replace("p?sy", "p?he")
    return name.replace("?", LETTERS[dtype.name]) + "_"


def symbols() -> list[str]:
    """The functions that a library must have."""
    return [symbol(name, np.dtype(d)) for name in FUNCTIONS for d in LETTERS] + list(BLACS)


class Native:
    """A ScaLAPACK that is loaded in this process.

    Attributes
    ----------
    path : str
        Its file.
    passed_over : list of str
        Candidates that could not be used, with the reasons.
    """

    def __init__(self, handle: ctypes.CDLL, path: str) -> None:
        self._handle = handle
        self.path = path
        self.passed_over: list[str] = []

    def missing(self) -> list[str]:
        """Required functions that it does not have."""
        return [name for name in symbols() if not hasattr(self._handle, name)]

    def openblas_core(self) -> str:
        """The processor for which its OpenBLAS has chosen kernels; empty for another BLAS."""
        try:
            function = self._handle.openblas_get_corename
        except AttributeError:
            return ""
        function.restype = ctypes.c_char_p
        return f" (OpenBLAS for {function().decode()})"

    def reference_blas(self) -> str | None:
        """The file of its BLAS, if that is the reference BLAS, which has no tuned kernels."""
        path = symbol_file(self._handle, "dgemm_")
        if path is None or not re.match(r"lib(ref)?blas\.so", Path(path).name):
            return None
        blas = ctypes.CDLL(path, mode=os.RTLD_NOLOAD | os.RTLD_NOW)
        return None if any(hasattr(blas, name) for name in TUNED) else path

    def blacs(self, name: str, *arguments: Any) -> int:
        """Call a function of the BLACS' C interface."""
        return int(getattr(self._handle, name)(*arguments))

    def call(self, name: str, dtype: np.dtype[Any], *arguments: Any) -> None:
        """Call a subroutine of ScaLAPACK, e.g. ``"p?gemm"``, for a dtype.

        Integers and strings are passed by reference; arrays by their first element; a
        `ctypes.c_int` receives an output value.
        """
        function = getattr(self._handle, symbol(name, dtype))
        function.restype = None
        function(*by_reference(arguments))

    def norm(self, dtype: np.dtype[Any], *arguments: Any) -> float:
        """Call ``p?lange``, the only function that returns a value."""
        function = getattr(self._handle, symbol("p?lange", dtype))
        single = dtype.name in ("float32", "complex64")
        function.restype = ctypes.c_float if single else ctypes.c_double
        return float(function(*by_reference(arguments)))


def real(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """The dtype of absolute values."""
    return np.zeros(0, dtype).real.dtype


def scalar(value: complex, dtype: np.dtype[Any]) -> NDArray[Any]:
    """A factor such as alpha, as an array to be passed."""
    return np.full(1, value, dtype)


VARIABLE = "SCALAPACK_LIB"
HOW_TO_GET_ONE = (
    "To install one: `apt-get install libscalapack-mpich2.2` (Debian, Ubuntu), `pip install mkl`, "
    "`module load cray-libsci` on a Cray, or name a file: "
    f'load_library("scalapack", "/path/to/lib.so"), or {VARIABLE} in the environment of the '
    "node's Ray processes. It must be built for MPICH's ABI and 32-bit integers (LP64)"
)
SYSTEM_FOLDERS = ("/usr/lib64/mpich/lib", "/usr/lib64", "/usr/lib", "/usr/local/lib")
MKL_SCALAPACK = "libmkl_scalapack_lp64.so"
# The sequential one of its threading layers: ranks fill the cores.
MKL_PARTS = (
    "libmkl_core.so",
    "libmkl_sequential.so",
    "libmkl_intel_lp64.so",
    "libmkl_blacs_intelmpi_lp64.so",
)


REFERENCE = (
    "{} is the reference BLAS, which has no tuned kernels: install a better one with `apt-get "
    "install libopenblas0-pthread` (Debian, Ubuntu) on every node"
)


class _Loaded:
    """The library of this process: symbols of a second one would mix with the first's."""

    native: Native | None = None


# Files that may be ScaLAPACK: the last one is the library, the others are its parts.
Candidate = tuple[Path, ...]


def load(path: str | None = None) -> Native:
    """ScaLAPACK, loaded into this process.

    Raises
    ------
    Failure
        LibraryNotFoundError if none is found, LibraryLoadError if no candidate can be used. Both
        name the places searched, the loader's message, and how to install one.
    """
    named, source = path or os.environ.get(VARIABLE) or None, "given" if path else VARIABLE
    if _Loaded.native is not None and not named:
        return _Loaded.native  # the user's choice, for routines of linalg
    candidates = _named(named, source) if named else list(dict.fromkeys(search()))
    if not candidates:
        raise Failure(
            "LibraryNotFoundError",
            f"there is no ScaLAPACK on node {os.uname().nodename}. Searched for {_places()}. "
            + HOW_TO_GET_ONE,
        )
    reasons = []
    for candidate in candidates:
        try:
            native = _open(candidate)
        except OSError as error:
            reasons.append(f"{candidate[-1]}: {error}")
        else:
            native.passed_over = reasons
            return native
    raise Failure(
        "LibraryLoadError",
        f"no usable ScaLAPACK on node {os.uname().nodename}. "
        + "; ".join(reasons)
        + f". {HOW_TO_GET_ONE}",
    )


def _named(files: str, source: str) -> list[Candidate]:
    paths = tuple(Path(file) for file in files.split(os.pathsep))
    for path in paths:
        if not path.is_file():
            raise Failure(
                "LibraryNotFoundError",
                f"scalapack: there is no file {path} ({source}) on node {os.uname().nodename}. "
                + HOW_TO_GET_ONE,
            )
    if len(paths) == 1 and paths[0].name.startswith(MKL_SCALAPACK):
        return [_with_parts(paths[0])]
    return [paths]


def search() -> Iterator[Candidate]:
    """The candidates on this node, best first."""
    if sci := os.environ.get("CRAY_LIBSCI_PREFIX_DIR"):
        yield from _single(Path(sci) / "lib", "libsci_*_mpi.so*")
    for path in _matching(_own_folder(), f"{MKL_SCALAPACK}*"):
        yield _with_parts(path)
    for pattern in ("libscalapack-mpich.so*", "libscalapack.so*"):
        for folder in _folders():
            yield from _single(folder, pattern)


def _own_folder() -> Path:
    return Path(sys.prefix) / "lib"


def _folders() -> list[Path]:
    given = os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep)
    multiarch = sysconfig.get_config_var("MULTIARCH")
    own = [_own_folder(), *([Path("/usr/lib") / multiarch] if multiarch else [])]
    return [*(Path(folder) for folder in given if folder), *own, *map(Path, SYSTEM_FOLDERS)]


def _places() -> str:
    sci = os.environ.get("CRAY_LIBSCI_PREFIX_DIR", "CRAY_LIBSCI_PREFIX_DIR, which is not set")
    return (
        f"{VARIABLE} (not set), Cray LibSci ({sci}), MKL ({_own_folder()}/{MKL_SCALAPACK}*), and "
        f"libscalapack-mpich.so* or libscalapack.so* in {', '.join(map(str, _folders()))}"
    )


def _matching(folder: Path, pattern: str) -> list[Path]:
    """Files that match, the newest version first, without other names of the same file."""
    files: dict[str, Path] = {}
    for path in sorted(folder.glob(pattern), key=_version, reverse=True):
        files.setdefault(os.path.realpath(path), path)
    return list(files.values())


def _version(path: Path) -> tuple[list[int], int]:
    return [int(part) for part in re.findall(r"\d+", path.name)], -len(path.name)


def _single(folder: Path, pattern: str) -> Iterator[Candidate]:
    yield from ((path,) for path in _matching(folder, pattern))


def _with_parts(scalapack: Path) -> Candidate:
    """MKL with its parts, which its files do not declare."""
    parts = (_matching(scalapack.parent, f"{part}*") for part in MKL_PARTS)
    return *(found[0] for found in parts if found), scalapack


def _open(candidate: Candidate) -> Native:
    """Load it. Raises `OSError` with the reason if it cannot be used."""
    path = os.path.realpath(candidate[-1])
    loaded = _Loaded.native
    if loaded is not None:
        if loaded.path == path:
            return loaded
        raise OSError(
            f"these ranks have already loaded {loaded.path}, and a process cannot load two "
            "ScaLAPACK libraries: request new workers"
        )
    for file in candidate:
        if needed := foreign_mpi(file):
            raise OSError(f"it needs {needed}, but these ranks run on {our_mpi()}")
    provide_mpich()
    with known_processor():
        if len(candidate) > 1:
            handle = load_together([mpi_file(), *map(str, candidate)])
        else:
            handle = ctypes.CDLL(str(candidate[-1]))
    if other := second_mpi():
        raise OSError(
            f"it has loaded a second MPI, {other}, but these ranks run on {our_mpi()}: request new "
            "workers"
        )
    native = Native(handle, path)
    if missing := native.missing():
        raise OSError(
            f"it lacks {len(missing)} required functions, such as {missing[0]}: is it ScaLAPACK "
            "with the BLACS?"
        )
    _Loaded.native = native
    if (blas := native.reference_blas()) and MPI.COMM_WORLD.rank == 0:
        warnings.warn(f"scalapack: {REFERENCE.format(blas)}", RuntimeWarning, stacklevel=2)
    return native


def describe(native: Native) -> str:
    """The loaded library, its BLAS, and the candidates that could not be used."""
    blas = [
        path
        for path in mapped_files()
        if re.search(r"blas|blis|libmkl_(core|avx|def)|libsci", Path(path).name)
        and "site-packages" not in path  # NumPy's and SciPy's own
        and path != native.path
    ]
    told = [
        f"ScaLAPACK: {native.path}",
        f"BLAS: {', '.join(blas) or 'its own'}{native.openblas_core()}",
        f"MPI: {our_mpi()}",
        *(f"not usable: {reason}" for reason in native.passed_over),
    ]
    if blas_file := native.reference_blas():
        told.insert(2, f"warning: {REFERENCE.format(blas_file)}")
    return "\n".join(told)


class BlacsGrid(Grid):
    """A BLACS context of the gang's own (column-major) grid, on a communicator of its own.

    Created by all ranks together.

    Attributes
    ----------
    context : int
        The context number in descriptors.
    height, width, row, col : int
        The grid, and this rank's place on it.
    """

    def __init__(self, ctx: Context, native: Native) -> None:
        super().__init__(ctx)
        self._native = native
        self.comm = ctx.comm.Dup()
        self.height, self.width = ctx.grid
        self.row, self.col = ctx.rank % self.height, ctx.rank // self.height
        as_c = ctypes.c_int if MPI._sizeof(MPI.Comm) == 4 else ctypes.c_void_p
        self._handle = native.blacs("Csys2blacs_handle", as_c(self.comm.handle))
        context = ctypes.c_int(self._handle)
        native.blacs("Cblacs_gridinit", ctypes.byref(context), b"C", self.height, self.width)
        self.context = context.value
        found = [ctypes.c_int(-1) for _ in range(4)]
        native.blacs("Cblacs_gridinfo", self.context, *map(ctypes.byref, found))
        if [value.value for value in found] != [self.height, self.width, self.row, self.col]:
            raise RuntimeError(
                f"BLACS placed rank {ctx.rank} of a {self.height} x {self.width} grid elsewhere: "
                f"{[value.value for value in found]}; {native.path} uses another MPI than mpi4py"
            )

    def close(self) -> None:
        self._native.blacs("Cblacs_gridexit", self.context)
        self._native.blacs("Cfree_blacs_system_handle", self._handle)
        self.comm.Free()


def grid_of(ctx: Context) -> BlacsGrid:
    """The grid of the gang (see `kept`)."""
    return kept(ctx, lambda: BlacsGrid(ctx, ctx.state["native"]), "scalapack: BLACS")


def close(state: dict[str, Any]) -> None:
    """Release the grid, if there is one."""
    grid: BlacsGrid | None = state.pop("grid", None)
    if grid is not None:
        grid.close()
