"""Builds the simulator on the node that needs it, once.

``python -m envs.rayleigh_benard.build`` does it ahead of time. The shared object is in a folder
that only the user can write to. Its name is a hash of the sources, flags, compiler, MPI and
processor. It is compiled for the processor of the node (``-march=native``: 14 us per step instead
of 40), so nodes with different processors that share a home directory have one each.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import shlex
import shutil
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

from ali import scaffold
from mpi_workers.failures import Failure

SOURCES = Path(__file__).parent
# No -ffast-math: results must not depend on how the compiler reorders sums.
FLAGS = (
    "-std=c11", "-O2", "-march=native", "-ffp-contract=fast", "-fvisibility=hidden", "-fPIC",
    "-shared", "-Wall", "-Wextra", "-Wno-missing-field-initializers",
)  # fmt: skip
BUILD_TIMEOUT_S = 120.0


def shared_object() -> str:
    """The path of the simulator's shared object on this node; builds it if necessary.

    All ranks of a node may call this at once, as they do at the first start there. Each builds its
    own file and moves it into place; that of the last rank remains.

    Returns
    -------
    str
        Path of the shared object.

    Raises
    ------
    Failure
        LibraryLoadError: no compiler (the message says how to install one), an error of the
        compiler, or no suitable folder.

    Notes
    -----
    About two seconds the first time, then a few milliseconds.
    """
    compiler, programs = _compiler()
    command = [*compiler, *FLAGS, f"-I{scaffold.include_directory()}"]
    sources = sorted(SOURCES.glob("*.c"))
    target = _cache() / f"rayleigh_benard-{_key(command, programs)}.so"
    if not target.is_file():
        _build([*command, *map(str, sources), "-lm"], target)
    return str(target)


def _compiler() -> tuple[list[str], list[str]]:
    """MPI's C compiler (``MPICC``, or the one next to this Python), and the programs it runs."""
    if words := shlex.split(os.environ.get("MPICC", "")):
        if shutil.which(words[0]) is None:
            raise _failed(f"there is no program {words[0]!r}, which MPICC names")
        return words, words[:1]
    try:
        mpicc = str(scaffold.mpi_compiler("mpicc"))
    except FileNotFoundError as error:
        raise _failed(str(error)) from None
    beneath = (*shlex.split(os.environ.get("MPICH_CC", "")), "cc")[0]  # the compiler behind mpicc
    if shutil.which(beneath) is None:
        raise _failed(
            f"it is written in C, and there is no compiler {beneath!r} on node {platform.node()}: "
            "install one (apt-get install gcc libc6-dev, or dnf install gcc), or name yours in "
            "MPICH_CC"
        )
    return [mpicc], [mpicc, beneath]


def _key(command: list[str], programs: list[str]) -> str:
    """A hash of everything that the shared object depends on."""
    digest = hashlib.sha256(repr(command).encode())
    for path in [*sorted(SOURCES.glob("*.[ch]")), scaffold.include_directory() / "alchemist.h"]:
        digest.update(path.name.encode() + path.read_bytes())
    for program in programs:
        found = Path(shutil.which(program) or program).resolve()
        about = found.stat()
        digest.update(f"{found} {about.st_size} {about.st_mtime_ns}".encode())
    digest.update(_processor().encode())
    return digest.hexdigest()[:20]


def _processor() -> str:
    """Model and features of this node's processor, as the kernel reports them."""
    found = platform.machine()
    with contextlib.suppress(OSError):
        kinds = ("model name", "flags", "Features", "CPU part")
        for line in Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines():
            if line.split("\t")[0].strip() in kinds:
                found += line
    return found


def _cache() -> Path:
    """A folder that only this user can write to, because its shared objects are executed."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    for folder in (
        Path(home) / "alchemist-on-ray",
        Path(tempfile.gettempdir()) / f"alchemist-on-ray-{os.getuid()}",
    ):
        with contextlib.suppress(OSError):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            about = folder.lstat()
            own = stat.S_ISDIR(about.st_mode) and about.st_uid == os.getuid()
            if own and not about.st_mode & 0o022 and os.access(folder, os.W_OK | os.X_OK):
                return folder
    raise _failed(
        f"it must be built in a folder that only you can write to, and neither {home} nor "
        f"{tempfile.gettempdir()} has one: set XDG_CACHE_HOME"
    )


def _build(command: list[str], target: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="build-", dir=target.parent) as folder:
        made = Path(folder) / target.name
        try:
            done = subprocess.run(
                [*command, "-o", str(made)], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT, text=True, errors="replace", timeout=BUILD_TIMEOUT_S,
                check=False,
            )  # fmt: skip
        except (OSError, subprocess.TimeoutExpired) as error:
            raise _failed(f"the compiler did not run: {error}") from None
        if done.returncode != 0:
            raise _failed(f"{shlex.join(command)} failed:\n{done.stdout[-4000:]}")
        os.replace(made, target)


def _failed(words: str) -> Failure:
    return Failure("LibraryLoadError", f"simulator 'rayleigh_benard' cannot be built: {words}")


def main() -> int:
    """Build the simulator and print its path."""
    try:
        print(shared_object())
    except Failure as failure:
        print(failure.message, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
