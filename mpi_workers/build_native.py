"""Builds what is compiled of this package where there is a C compiler; nothing needs it.

The copy kernel, the C frames of crashes, and the layer under MPI. Hatch runs it for wheels and for
editable installations; in place they are built by ``python -m mpi_workers.build_native``.
"""

from __future__ import annotations

import os
import runpy
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

SOURCES = tuple(
    Path(__file__).parent / name
    for name in ("matrix/copy_kernel.c", "rank/crash_frames.c", "waits/mpi_waits.c")
)
GENERATORS = {"mpi_waits": "mpi_calls.py"}  # whose `source` completes a C file
FLAGS = ("-O3", "-std=gnu11", "-pthread", "-shared", "-fPIC", "-x", "c", "-")
COMPILE_TIMEOUT_S = 120.0
ADVICE = "install a C compiler and run `python -m mpi_workers.build_native` on every node"


def build_all() -> str | None:
    """Compile all of them in place; returns None, or the reason why that failed."""
    for source in SOURCES:
        if why := build(source, source.with_suffix(".so")):
            return why
    return None


def missing() -> str:
    """The compiled parts that this installation lacks, and the effect; empty if it has all."""
    names = [source.stem for source in SOURCES if not source.with_suffix(".so").exists()]
    if not names:
        return ""
    return (
        f"this installation lacks {', '.join(names)}: it found neither a wheel for "
        f"{sysconfig.get_platform()} nor a C compiler. A call that fails or is cancelled while "
        "ranks wait in MPI costs the ranks, and NumPy copies between array orders"
    )


def build(source: Path, library: Path) -> str | None:
    """Compile one file; returns None, or the reason why it was not built."""
    compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc")
    if not compiler:
        return "no C compiler was found"
    unfinished = library.with_suffix(f".{os.getpid()}.new")
    text = source.read_text()
    if source.stem in GENERATORS:
        text = runpy.run_path(str(source.with_name(GENERATORS[source.stem])))["source"]()
    try:
        done = subprocess.run(
            [*compiler.split(), *FLAGS, "-o", str(unfinished)],
            input=text,
            capture_output=True,
            text=True,
            timeout=COMPILE_TIMEOUT_S,
            check=False,
        )
        if done.returncode:
            return f"{compiler} failed: {done.stderr.strip()[-500:]}"
        unfinished.replace(library)
    except (OSError, subprocess.SubprocessError) as error:
        return f"{compiler} failed: {error}"
    finally:
        unfinished.unlink(missing_ok=True)
    return None


def get_build_hook() -> Any:
    """Hatch's entry point: the class of the hook."""
    from hatchling.builders.hooks.plugin.interface import (  # noqa: PLC0415
        BuildHookInterface,
    )

    class Hook(BuildHookInterface):  # type: ignore[misc,type-arg,unused-ignore]
        def initialize(self, version: str, build_data: dict[str, Any]) -> None:
            if self.target_name != "wheel":
                return
            if why := build_all():
                self.app.display_warning(f"The compiled parts were not built: {why}")
            elif version != "editable":
                platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
                build_data["pure_python"] = False
                build_data["tag"] = f"py3-none-{platform}"
                build_data["artifacts"] += [
                    f"mpi_workers/{source.parent.name}/{source.stem}.so" for source in SOURCES
                ]

    return Hook


if __name__ == "__main__":
    sys.exit(build_all())
