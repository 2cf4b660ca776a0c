"""The MPI of this process, and detection of a library that would load another one.

An MPI_Comm differs between Open MPI and MPICH, and a second copy of either is not initialised: a
library would compute wrong results. A library that needs another MPI than the ranks', directly or
through other libraries, is refused before it is loaded (`foreign_mpi`). One that loads another
MPI by itself is refused afterwards (`second_mpi`).
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from mpi4py import MPI

from ali.loader import MPI_NAME, OPEN_MPI_VERSIONS, chains, mapped_files
from mpi_workers.failures import Failure

MPICH_NAMES = re.compile(r"libmpi(ch)?(fort|cxx|f|f90)?")  # its ABI, and other languages' bindings
OPEN_MPI_PARTS = re.compile(r"(libopen-(pal|rte)|libmca_common_\w+)\.so.*")
# Files that are an MPI, or the core of one; not the bindings of other languages.
MPI_CORE = re.compile(r"(libmpi|libmpich|libmpi_(gnu|intel|cray|amd|nvidia)_\w+|libopen-pal)\.so.*")


def foreign_mpi(file: Path) -> str | None:
    """The other MPI that a file needs, and through which libraries; None if it needs no other.

    Another family, or a build of MPICH with its own name (Cray's libmpi_gnu_123.so.12) that is
    not loaded: it would be a second MPI in this process, and not initialised.
    """
    here = [Path(mapped).name for mapped in mapped_files()]
    for *path, name in chains(file):
        if _is_foreign(name, here):
            return " through ".join([name, *reversed(path)])
    return None


def _is_foreign(name: str, here: list[str]) -> bool:
    if OPEN_MPI_PARTS.fullmatch(name):
        return not is_open_mpi()
    found = MPI_NAME.fullmatch(name)
    if found is None:
        return False
    stem, version = found[1], int(found[2])
    if (version in OPEN_MPI_VERSIONS) != is_open_mpi():
        return True
    known = MPICH_NAMES.fullmatch(stem) or any(f.startswith(f"{stem}.so") for f in here)
    return not (known or is_open_mpi())


def second_mpi() -> str | None:
    """The file of another MPI that is mapped besides the one that mpi4py runs on, or None."""
    return next(iter(sorted(_cores() - _OURS)), None)


def refuse_second_mpi(library: str, file: Path) -> None:
    """Raise `Failure` (LibraryLoadError) if a library has loaded another MPI."""
    if other := second_mpi():
        raise Failure(
            "LibraryLoadError",
            f"library {library!r}: {file} has loaded a second MPI, {other}, but this gang runs on "
            f"{our_mpi()}, and their communicators differ: request new workers, and build the "
            "library with the gang's mpicc (`python -m ali mpicc`)",
        )


def _cores() -> set[str]:
    found = (path for path in mapped_files() if MPI_CORE.fullmatch(Path(path).name))
    return {os.path.realpath(path) for path in found}


def our_mpi() -> str:
    """The MPI library that runs here, as it names itself, on one line."""
    return " ".join(MPI.Get_library_version().split("\n")[0].strip("\0 ").split())


def is_open_mpi() -> bool:
    return "Open MPI" in our_mpi()


_OURS = _cores()  # when this module is imported: mpi4py has loaded its MPI, and no library any
