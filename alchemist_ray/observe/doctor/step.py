"""A step of a Slurm job on all of its nodes, which ends with this process."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from alchemist_ray.launchers.srun import srun_command

END_TIMEOUT_S = 5.0
PR_SET_PDEATHSIG = 1


def start(
    names: Sequence[str],
    *module: str,
    pmi: str = "none",
    tasks_per_node: int = 1,
    options: Sequence[str] = (),
    stdin: int = subprocess.DEVNULL,
) -> subprocess.Popen[str]:
    """Start a Python module on every node, next to the job's other steps, with piped output.

    Raises
    ------
    LaunchError
        If there is no srun.
    """
    command = [
        *srun_command(os.environ), "--overlap", f"--mpi={pmi}", "--quiet", *options,
        f"--nodes={len(names)}", f"--ntasks={tasks_per_node * len(names)}",
        f"--ntasks-per-node={tasks_per_node}", f"--nodelist={','.join(names)}",
        "--job-name=alchemist-doctor", sys.executable, "-m", *module,
    ]  # fmt: skip
    return subprocess.Popen(
        command, stdin=stdin, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        errors="replace",
        preexec_fn=_end_with_parent,
    )  # fmt: skip


def end(step: subprocess.Popen[Any]) -> None:
    """Wait for the step, then end it: a killed srun would leave its tasks until the job's end."""
    for stop in (step.terminate, step.kill):
        try:
            step.wait(END_TIMEOUT_S)
            return
        except subprocess.TimeoutExpired:
            stop()
    step.wait()


def _end_with_parent() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
