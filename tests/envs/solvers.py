"""MPI programs that environments run: how tests compile them, and what is left of them."""

from __future__ import annotations

import subprocess
from pathlib import Path

from ali import scaffold
from tests.support import traces

HERE = Path(__file__).parent


def compiled(source: str, target: Path) -> str:
    """Compile a program of this folder. Its name must be one that no other process has."""
    command = [scaffold.mpi_compiler("mpicc"), "-o", target, HERE / source]
    subprocess.run(list(map(str, command)), check=True, timeout=100)
    return str(target)


def left(solver: str) -> list[str]:
    """The command lines of the program's processes."""
    return [line for line in traces.processes().values() if solver in line]


def assert_gone(solver: str) -> None:
    """None of its processes is left, or soon will be."""
    assert traces.wait_until(lambda: not left(solver), 10.0, 0.1) is not None, left(solver)
