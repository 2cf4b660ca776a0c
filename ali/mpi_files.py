"""The names of MPI libraries, and their files in this process. Does not load MPI."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

MPI_NAME = re.compile(r"(libmpi[\w+-]*)\.so\.(\d+)")
OPEN_MPI_VERSIONS = (0, 1, 20, 40)  # libmpi.so.N of Open MPI; MPICH's ABI is 12


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
