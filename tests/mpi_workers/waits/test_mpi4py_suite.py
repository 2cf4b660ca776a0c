"""mpi4py's own tests, on 2 ranks with the layer under their MPI: only in ``make test-long``."""

from __future__ import annotations

import subprocess
import sys
import tarfile
from importlib.metadata import version
from pathlib import Path

import pytest

from mpi_workers.local import local_gang
from tests.support.suite import LONG

MODULE = "tests.mpi_workers.waits.ranks_mpi4py:module"
CACHE = Path(__file__).parents[3] / "build" / "mpi4py-tests"
LIMIT_S = 600.0  # of a module; most take 2 s
DOWNLOAD_S = 120.0
# Modules that are about something else than MPI in the ranks of a gang.
LEFT_OUT = {
    "test_spawn": "starts processes by MPI, which a gang refuses",
    "test_dynproc": "starts processes by MPI, which a gang refuses",
    "test_util_pool": "starts processes by MPI, which a gang refuses",
}
# Tests of the others, and why.
TESTS_LEFT_OUT = {
    "test_mpiabi.TestMPIABI.testGetFortranInfo": (
        "fails also in plain MPI: the wheel of MPICH knows no Fortran types of its own"
    ),
    "test_ulfm.TestULFMWorld.testIAgree": (
        "not a correct program where MPIX_Comm_iagree is missing, and mpi4py calls MPI_Iallreduce: "
        "one rank calls it before a barrier, the other after that, which MPI forbids: it fails, or "
        "hangs"
    ),
}

pytestmark = pytest.mark.skipif(not LONG, reason="make test-long runs mpi4py's own tests")


def _suite() -> Path:
    """The folder of the tests, from mpi4py's source distribution; downloaded once."""
    release = version("mpi4py")
    folder = CACHE / f"mpi4py-{release}" / "test"
    if not folder.exists():
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        command += ["--no-build-isolation", "--no-binary", "mpi4py", f"mpi4py=={release}"]
        try:
            subprocess.run([*command, "--dest", CACHE], check=True, timeout=DOWNLOAD_S)
        except (subprocess.SubprocessError, OSError) as error:
            pytest.skip(f"needs mpi4py's source distribution from the package index: {error}")
        with tarfile.open(CACHE / f"mpi4py-{release}.tar.gz") as archive:
            archive.extractall(CACHE, filter="data")
    return folder


@pytest.mark.timeout(7200)
def test_mpi4pys_own_tests_pass_except_those_that_are_listed() -> None:
    folder, wrong, total = _suite(), {}, 0
    for name in sorted(path.stem for path in folder.glob("test_*.py")):
        if name in LEFT_OUT:
            continue
        try:
            ran, found = local_gang.run(
                MODULE, 2, str(folder), name, list(TESTS_LEFT_OUT), timeout=LIMIT_S
            )
        except AssertionError as error:  # a rank has ended, or hangs
            ran, found = 0, {name: str(error)}
        total += ran
        wrong |= found
    assert wrong == {}
    assert total > 1200
