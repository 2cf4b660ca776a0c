"""Which MPI this process runs on, and whether a shared object would bring in another.

Open MPI and MPICH differ in what an MPI_Comm is, and a second copy of either is not
initialised: a library that wants another MPI than the ranks' is refused before it is loaded.
"""

from __future__ import annotations

import mmap
import re
from collections.abc import Iterable
from pathlib import Path

from mpi4py import MPI

MPI_NEEDED = re.compile(rb"\0(libmpi[\w+-]*)\.so\.(\d+)(?=\0)")  # in an ELF file's table of names
MPICH_NAMES = re.compile(r"libmpi(ch)?(fort|f|f90)?")  # its ABI, and Fortran's way into it
OPEN_MPI_VERSIONS = (0, 1, 20, 40)  # libmpi.so.N of Open MPI; MPICH's ABI is 12


def foreign_mpi(file: Path) -> str | None:
    """The MPI library that a file was linked to, if that is not the one that runs here.

    Another family, or a build of MPICH with a name of its own (Cray's libmpi_gnu_123.so.12)
    that is not loaded: it would come in beside ours, not initialised.
    """
    if not file.stat().st_size:
        return None  # no object at all: the loader will say so
    with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as text:
        found = MPI_NEEDED.findall(text)
    here = [Path(mapped).name for mapped in mapped_files()]
    for name, version in ((name.decode(), int(version)) for name, version in found):
        of_our_family = (version in OPEN_MPI_VERSIONS) == is_open_mpi()
        known = MPICH_NAMES.fullmatch(name) or any(f.startswith(f"{name}.so") for f in here)
        if not (of_our_family and (known or is_open_mpi())):
            return f"{name}.so.{version}"
    return None


def our_mpi() -> str:
    """The MPI library that runs here, in its own words, on one line."""
    return " ".join(MPI.Get_library_version().split("\n")[0].strip("\0 ").split())


def is_open_mpi() -> bool:
    return "Open MPI" in our_mpi()


def mpi_file() -> str:
    """The file of the MPI that is loaded."""
    return next(
        (path for path in mapped_files() if re.match(r"libmpi(ch)?(_\w+)?\.so", Path(path).name)),
        "libmpi.so.12",
    )


def mapped_files() -> Iterable[str]:
    """Shared objects in this process."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return dict.fromkeys(line.split()[-1] for line in lines if "/" in line and ".so" in line)
