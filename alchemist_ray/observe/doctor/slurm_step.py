"""A step of a Slurm job on all of its nodes, which ends with this process."""

from __future__ import annotations

import functools
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from alchemist_ray.launchers.srun import srun_command
from mpi_workers.node.process_control import die_with_parent

END_TIMEOUT_S = 5.0


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
        preexec_fn=functools.partial(die_with_parent, os.getpid(), signal.SIGTERM),
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
