"""The simulator is built where it is asked for, once, and says what it lacks."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import envs.rayleigh_benard
from tests.support import commands
from tests.support.build import needs_compiler

BUILD = [sys.executable, "-m", "envs.rayleigh_benard.build"]
SOURCES = Path(envs.rayleigh_benard.__file__).parent


def builder(cache: Path, **environment: str) -> subprocess.Popen[str]:
    env = {**os.environ, "XDG_CACHE_HOME": str(cache), **environment}
    return subprocess.Popen(
        BUILD, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


def said(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=100)
    return process.returncode, out.strip(), err.strip()


@needs_compiler
def test_many_builders_at_once_make_one_library(tmp_path: Path) -> None:
    told = [said(process) for process in [builder(tmp_path) for _ in range(3)]]
    assert [code for code, _, _ in told] == [0, 0, 0], told
    (path,) = {out for _, out, _ in told}
    folder = Path(path).parent
    assert [p.name for p in folder.iterdir() if p.suffix == ".so"] == [Path(path).name]
    assert not list(folder.glob("build-*"))
    assert folder.stat().st_mode & 0o077 == 0, "no other user may write code there"

    made = Path(path).stat()
    code, again, _ = said(builder(tmp_path))
    assert (code, again) == (0, path)
    assert Path(path).stat().st_mtime_ns == made.st_mtime_ns, "it was there: nothing was built"
    code, other, _ = said(builder(tmp_path, MPICC=f"{Path(sys.executable).parent / 'mpicc'} -DX"))
    assert code == 0
    assert other != path, "another command makes another library"


@needs_compiler
def test_a_folder_that_others_can_write_to_is_not_used(tmp_path: Path) -> None:
    shared = tmp_path / "alchemist-on-ray"
    shared.mkdir()
    shared.chmod(0o777)
    private = tmp_path / "private"
    private.mkdir()
    code, out, _ = said(builder(tmp_path, TMPDIR=str(private)))
    assert code == 0
    assert Path(out).is_relative_to(private)
    assert not list(shared.iterdir())


def test_without_a_compiler_it_says_what_to_install(tmp_path: Path) -> None:
    code, out, err = said(builder(tmp_path, MPICH_CC="no-such-cc"))
    assert (code, out) == (1, "")
    assert "there is no compiler 'no-such-cc'" in err
    assert "apt-get install gcc" in err
    code, _, err = said(builder(tmp_path, MPICC="no-such-mpicc"))
    assert code == 1
    assert "no program 'no-such-mpicc', which MPICC names" in err


@needs_compiler
def test_what_the_compiler_says_is_passed_on(tmp_path: Path) -> None:
    mpicc = Path(sys.executable).parent / "mpicc"
    code, _, err = said(builder(tmp_path, MPICC=f"{mpicc} -DHOT=+++ -fno-such-option"))
    assert code == 1
    assert "-fno-such-option" in err
    assert not list(tmp_path.rglob("*.so"))


@needs_compiler
def test_the_sources_have_no_warnings_in_plain_c11(tmp_path: Path) -> None:
    from ali import scaffold  # noqa: PLC0415 - it initialises MPI

    command = [
        scaffold.mpi_compiler("mpicc"), "-std=c11", "-O1", "-fsyntax-only", "-Wall", "-Wextra",
        "-Wshadow", "-Wconversion", "-Werror", "-Wno-missing-field-initializers", "-isystem",
        scaffold.include_directory(), *sorted(SOURCES.glob("*.c")),
    ]  # fmt: skip
    done = commands.run(*command)
    assert done.returncode == 0, done.stderr
