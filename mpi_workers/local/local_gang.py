"""A gang of MPI ranks without Ray, for one function call.

For tests of code that runs on ranks::

    found = local_gang.run("tests.ali.ranks_linalg:accuracy", 3, "float64")

The function gets a real `Gang` and the arguments, and returns a value that JSON can represent. An
exception on any rank is raised as an AssertionError with the output of all ranks. Every run has a
time limit, prints the stacks of ranks that hang to stderr, and leaves no processes or files. The
mpiexec in this Python's environment starts the ranks (`local_rank.py`).
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from mpi_workers.node.processes import crowded, die_with_parent, set_waits
from mpi_workers.node.stacks import by_stack, crash_file, of_main_thread
from mpi_workers.waits.interruption import (
    EndedWaits,
    begin,
    interrupt,
    uninterruptible,
    unsafe,
)

# All but run: on a rank.
__all__ = ["EndedWaits", "begin", "interrupt", "run", "uninterruptible", "unsafe"]
OUTPUT_LIMIT = 6000  # characters of the ranks' output in a failure


def run(
    function: str,
    ranks: int,
    *arguments: Any,
    timeout: float = 60.0,
    timeout_name: str = "timeout",
    under: Sequence[str] | None = None,
) -> Any:
    """Run ``module:function`` on `ranks` MPI ranks.

    Parameters
    ----------
    function : str
        ``"module:name"`` of ``f(gang, *arguments)``.
    ranks : int
        Number of ranks.
    *arguments
        Values that JSON can represent.
    timeout : float
        Seconds; then all ranks are killed.
    timeout_name : str
        What the caller calls it, for the error.
    under : sequence of str, optional
        A command that starts each rank, such as ``["gdb", "--args"]``. The ranks then have the
        standard streams of this process.

    Returns
    -------
    object
        The value that the function returned on rank 0.

    Raises
    ------
    AssertionError
        If a rank failed or time ran out; its message ends with the ranks' output.
    """
    mpiexec = Path(sys.executable).parent / "mpiexec"
    parent = os.getpid()
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        command: list[Any] = [mpiexec, "-n", ranks, *(under or ())]
        command += [sys.executable, "-m", "mpi_workers", "local-rank"]
        command += [function, json.dumps(arguments), folder, time.time() + timeout]
        process = subprocess.Popen(
            list(map(str, command)),
            env=_environment(ranks),
            stdin=subprocess.DEVNULL if under is None else None,
            stdout=subprocess.PIPE if under is None else None,
            stderr=subprocess.STDOUT if under is None else None,
            text=True,
            errors="replace",
            start_new_session=True,
            preexec_fn=lambda: die_with_parent(parent, signal.SIGTERM),  # mpiexec ends its ranks
        )
        try:
            output, _ = process.communicate(timeout=timeout + 1)
            what = f"exit code {process.returncode}"
        except subprocess.TimeoutExpired:
            sys.stderr.write(_where(Path(folder), tested=under is None))
            _kill(process.pid, folder)
            output, _ = process.communicate()
            what = f"over {timeout:g} s ({timeout_name})"
        finally:
            _kill(process.pid, folder)
        done = len(list(Path(folder).glob("done*")))
        if done != ranks:
            said = (output or "")[-OUTPUT_LIMIT:]
            raise AssertionError(f"{function} on {ranks} ranks: {what}, {done} done\n{said}")
        return json.loads(Path(folder, "result.json").read_text())


def _environment(ranks: int) -> dict[str, str]:
    env = {k: v for k, v in os.environ.items() if not k.startswith(("PMI", "HYDI", "MPI"))}
    env["PYTHONPATH"] = os.pathsep.join(os.path.abspath(path) for path in sys.path)
    env["OPENBLAS_NUM_THREADS"] = env["OMP_NUM_THREADS"] = "1"
    set_waits(crowded(ranks), env)
    return env


def _where(folder: Path, *, tested: bool) -> str:
    """The stacks of the ranks; in tests also each rank's own, with the frames of this package."""
    pids = {int(path.stem[4:]): int(path.read_text()) for path in folder.glob("rank*.pid")}
    with ThreadPoolExecutor() as pool:
        found = dict(zip(pids, pool.map(of_main_thread, pids.values()), strict=True))
    lines = by_stack({rank: frames for rank, frames in found.items() if frames})
    for rank, frames in found.items():
        file = Path(crash_file(str(folder), rank))
        if (tested or not frames) and file.exists():
            lines.append(f"rank {rank}:\n{file.read_text(errors='replace')}")
    return "\n".join([*lines, ""])


def _kill(mpiexec: int, folder: str) -> None:
    """Kill the remaining processes of a run. Hydra gives every rank its own session."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(mpiexec, signal.SIGKILL)
    for path in Path(folder).glob("rank*.pid"):
        pid = int(path.read_text())
        with contextlib.suppress(OSError):
            if folder.encode() in Path(f"/proc/{pid}/cmdline").read_bytes():
                os.kill(pid, signal.SIGKILL)
