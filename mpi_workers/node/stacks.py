"""Where a rank is: its stack with C frames, by py-spy, which Ray brings along."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

LIMIT_S = 2.0  # py-spy takes a quarter of a second
FRAMES = 12  # innermost ones that are shown
# The rank's own loop and ctypes, below the code of the library or the user.
HIDDEN = ("/mpi_workers/rank/", "/ali/", "/libffi.so", "_ctypes")


def of_main_thread(pid: int) -> list[str]:
    """The innermost frames of a process's main thread, ``MPI_Recv (libmpi.so.12)`` first.

    Empty where py-spy is missing, or this process may not read the other (ptrace_scope, seccomp).
    """
    command = [str(_program()), "dump", "--native", "--json", "--pid", str(pid)]
    try:
        done = subprocess.run(
            command, capture_output=True, stdin=subprocess.DEVNULL, timeout=LIMIT_S, check=False
        )
        threads: list[dict[str, Any]] = json.loads(done.stdout)
    except (OSError, subprocess.SubprocessError, ValueError):
        return []
    main = [thread for thread in threads if thread.get("os_thread_id") == pid]
    return shown(main[0]["frames"]) if main else []


def shown(frames: list[dict[str, Any]]) -> list[str]:
    """Lines for frames of py-spy, innermost first, without those of the rank's loop."""
    lines: list[str] = []
    for frame in frames:
        path = frame.get("module") or frame.get("filename") or ""
        if any(part in path for part in HIDDEN) or frame["name"].startswith("0x"):
            if lines and "/mpi_workers/rank/" in path:
                break  # the loop that has called what is above
            continue
        line = f":{frame['line']}" if frame.get("line") else ""
        lines.append(f"{frame['name']} ({os.path.basename(path)}{line})")
    return lines[:FRAMES]


def _program() -> Path:
    return Path(sys.executable).with_name("py-spy")
