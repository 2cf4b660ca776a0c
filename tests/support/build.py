"""Builds small shared objects and programs for tests, with the MPI compilers of the wheel."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from ali import scaffold

needs_compiler = pytest.mark.skipif(
    shutil.which("cc") is None or shutil.which("c++") is None,
    reason="needs a C and a C++ compiler (apt-get install build-essential)",
)


def shared_object(source: Path, target: Path, *flags: str) -> Path:
    """Compile and link one file as a library; warnings are errors."""
    return program(source, target, "-shared", "-fPIC", *flags)


def program(source: Path, target: Path, *flags: str) -> Path:
    """Compile and link one file; warnings are errors."""
    plus = source.suffix == ".cpp"
    compiler = scaffold.mpi_compiler("mpicxx" if plus else "mpicc")
    command = [compiler, "-O1", "-Wall", "-Wextra", "-Werror", "-Wno-missing-field-initializers"]
    command += [f"-std={'gnu++17' if plus else 'gnu11'}"]
    command += [f"-I{scaffold.include_directory()}", "-o", target, source, *flags]
    done = subprocess.run(
        list(map(str, command)), capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr
    return target
