"""Builds the compiled copy kernel where there is a C compiler; nothing needs it.

Hatch runs it for wheels and for editable installations; in place it is built by
``python -m mpi_workers.matrix.build_kernel``.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

SOURCE = Path(__file__).with_name("copy_kernel.c")
LIBRARY = Path(__file__).with_name("copy_kernel.so")
FLAGS = ("-O3", "-std=c11", "-shared", "-fPIC")
TIMEOUT_S = 120.0


def build(library: Path = LIBRARY) -> str | None:
    """Compile the kernel, by default in place; returns None, or the reason why it was not built."""
    compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc")
    if not compiler:
        return "no C compiler was found"
    unfinished = library.with_suffix(f".{os.getpid()}.new")
    try:
        done = subprocess.run(
            [*compiler.split(), *FLAGS, str(SOURCE), "-o", str(unfinished)],
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
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
            if why := build():
                self.app.display_warning(f"The compiled copy kernel was not built: {why}")
            elif version != "editable":
                platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
                build_data["pure_python"] = False
                build_data["tag"] = f"py3-none-{platform}"
                build_data["artifacts"].append(f"mpi_workers/matrix/{LIBRARY.name}")

    return Hook


if __name__ == "__main__":
    sys.exit(build())
