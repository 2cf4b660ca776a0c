"""Builds shared objects, programs and distributions for tests, and runs commands."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from ali import scaffold
from tests.support import commands

needs_compiler = pytest.mark.skipif(
    shutil.which("cc") is None or shutil.which("c++") is None,
    reason="needs a C and a C++ compiler (apt-get install build-essential)",
)


ADDRESS_SANITIZER = ("-fsanitize=address", "-g", "-fno-omit-frame-pointer")


def under_address_sanitizer() -> dict[str, str]:
    """Environment of a process that loads libraries built with `ADDRESS_SANITIZER`; or a skip."""
    found = [
        subprocess.run(
            ["g++", f"-print-file-name={name}"], capture_output=True, text=True, check=False
        ).stdout.strip()
        for name in ("libasan.so", "libstdc++.so")  # the second, because it intercepts throws
    ]
    if not all(map(os.path.isabs, found)):
        pytest.skip("needs AddressSanitizer's runtime (apt-get install g++)")
    preload = " ".join(map(os.path.realpath, found))
    return {"LD_PRELOAD": preload, "ASAN_OPTIONS": "detect_leaks=0"}


def uv_build(source: Path, out: Path, *options: str) -> Path:
    """Build the distributions of a folder with pyproject.toml into `out`, which is returned."""
    uv = Path(sys.executable).with_name("uv")
    if not uv.exists():
        pytest.skip("needs uv, which `make env` installs")
    commands.output(uv, "build", "--quiet", *options, "--out-dir", out, source)
    return out


def run(*command: str | Path, cwd: Path, code: int = 0, env: dict[str, str] | None = None) -> str:
    """Run a command that must end with this exit code; what it printed."""
    env = dict(os.environ) if env is None else env
    return commands.output(*command, code=code, cwd=cwd, env=env, limit_s=250, merged=True)


def library(path: Path, text: str) -> Path:
    """Write a library in Python: its routines, without the usual import."""
    path.write_text("from ali import Context, DistMatrix, routine\n" + textwrap.dedent(text))
    return path


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
    commands.output(*command)
    return target
