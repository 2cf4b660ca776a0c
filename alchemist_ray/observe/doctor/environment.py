"""Checks of a node's environment for settings that make correct programs slow or unbuildable."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

from alchemist_ray.observe.doctor.finding import INFO, OK, WARN, Expected, Finding

TIMEOUT_S = 5.0
SCALAPACK = "SCALAPACK_LIB"
SCALAPACK_PLACES = ("usr/lib/*/libscalapack-mpich*.so*", "usr/lib*/libscalapack*.so*")
BLAS = re.compile(r"libblas\.so\S* => (\S+)")
FORCED = ("OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE")
HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")


def openblas(expected: Expected) -> Iterator[Finding]:
    """Check for variables that force OpenBLAS to the kernels of another processor."""
    forced = [f"{name}={os.environ[name]}" for name in FORCED if name in os.environ]
    if forced:
        yield Finding(
            "OpenBLAS", WARN, f"{', '.join(forced)} overrides the detection of the processor",
            f"unset {' and '.join(word.partition('=')[0] for word in forced)} before Ray starts: "
            "the wrong kernels can halve the speed of NumPy and of the ranks",
        )  # fmt: skip
    else:
        yield Finding("OpenBLAS", OK, "detects the processor itself")


def scalapack_blas(expected: Expected, root: Path = Path("/")) -> Iterator[Finding]:
    """Check that ScaLAPACK does not use the reference BLAS."""
    check = "BLAS of ScaLAPACK"
    given = os.environ.get(SCALAPACK)
    found = [Path(given)] if given else [p for g in SCALAPACK_PLACES for p in sorted(root.glob(g))]
    ldd = shutil.which("ldd")
    if not found or ldd is None:
        yield Finding(check, INFO, "no ScaLAPACK was found")
        return
    library = found[0]
    done = subprocess.run(
        [ldd, str(library)], capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    match = BLAS.search(done.stdout)
    blas = os.path.realpath(match[1]) if match else ""
    if blas and "/blas/" in blas:
        yield Finding(
            check, WARN, f"{library} uses the reference BLAS, {blas}",
            "install an optimized BLAS (Debian: apt-get install libopenblas0-pthread): matmul of "
            "4000 x 4000 took 10 s instead of 0.7 s",
        )  # fmt: skip
    else:
        yield Finding(check, OK, f"{library}: {blas or 'linked statically'}")


def open_mpi(expected: Expected) -> Iterator[Finding]:
    """Check that the MPI compiler on PATH is not Open MPI's."""
    check = "MPI on PATH"
    for name in ("mpicc", "mpiexec"):
        program = shutil.which(name)
        if program is None:
            continue
        option = "--showme:version" if name == "mpicc" else "--version"
        done = subprocess.run(
            [program, option],
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
            stdin=subprocess.DEVNULL,
        )
        text = done.stdout + done.stderr
        if re.search(r"open ?mpi|open-?rte", text, re.I) and "unrecognized" not in text:
            yield Finding(
                check, WARN, f"{program} belongs to Open MPI",
                "gangs use MPICH or an MPI with its ABI, and refuse libraries that are built with "
                f"Open MPI: put MPICH's {name} first on PATH (Python's environment has one)",
            )  # fmt: skip
            return
    yield Finding(check, OK, "MPICH, an MPI with MPICH's ABI, or none")


def huge_pages(expected: Expected, path: Path = HUGE_PAGES) -> Iterator[Finding]:
    """Report whether shared memory, where matrices are, uses huge pages."""
    try:
        chosen = re.search(r"\[(\w+)\]", path.read_text())
    except OSError:
        chosen = None
    setting = chosen[1] if chosen else "unknown"
    yield Finding("huge pages of shared memory", INFO, f"{setting} ({path})")


CHECKS = {
    "OpenBLAS": openblas,
    "BLAS of ScaLAPACK": scalapack_blas,
    "MPI on PATH": open_mpi,
    "huge pages of shared memory": huge_pages,
}
