"""Finds ScaLAPACK on this node and loads it.

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
from dataclasses import dataclass
from pathlib import Path

from mpi4py import MPI

from ali.loader import known_processor, load_together, provide_mpich
from ali.mpi_family import foreign_mpi, our_mpi, second_mpi
from ali.mpi_files import mapped_files, mpi_file
from ali.scalapack.native import Native
from mpi_workers.failures import Failure

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


@dataclass(frozen=True, slots=True)
class Candidate:
    """Files that may be ScaLAPACK: the last one is the library, the others are its parts."""

    files: tuple[Path, ...]

    @property
    def path(self) -> Path:
        return self.files[-1]


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
            reasons.append(f"{candidate.path}: {error}")
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
    return [Candidate(paths)]


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
    yield from (Candidate((path,)) for path in _matching(folder, pattern))


def _with_parts(scalapack: Path) -> Candidate:
    """MKL with its parts, which its files do not declare."""
    parts = (_matching(scalapack.parent, f"{part}*") for part in MKL_PARTS)
    return Candidate((*(found[0] for found in parts if found), scalapack))


def _open(candidate: Candidate) -> Native:
    """Load it. Raises `OSError` with the reason if it cannot be used."""
    path = os.path.realpath(candidate.path)
    loaded = _Loaded.native
    if loaded is not None:
        if loaded.path == path:
            return loaded
        raise OSError(
            f"these ranks have already loaded {loaded.path}, and a process cannot load two "
            "ScaLAPACK libraries: request new workers"
        )
    for file in candidate.files:
        if needed := foreign_mpi(file):
            raise OSError(f"it needs {needed}, but these ranks run on {our_mpi()}")
    provide_mpich()
    with known_processor():
        if len(candidate.files) > 1:
            handle = load_together([mpi_file(), *map(str, candidate.files)])
        else:
            handle = ctypes.CDLL(str(candidate.path))
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
