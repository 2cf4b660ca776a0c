"""The program of a job, and a gateway for clients without Ray: run on the head's node."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence

from alchemist_ray.cluster.batch_job import JobCluster, JobFolder
from alchemist_ray.deploy.slurm import allocation, sites
from alchemist_ray.deploy.slurm.allocation import is_this_node
from alchemist_ray.deploy.slurm.keeper import RayInJob, step_base
from alchemist_ray.deploy.slurm.signals import Signals, Terminated, exit_code
from alchemist_ray.errors import JobError
from mpi_workers.node.processes import die_with_parent

POLL_INTERVAL_S = 0.1
TEARDOWN_S = 15  # of a job's spare time, to stop Ray
LEAST_GRACE_S = 5
GATEWAY_TIMEOUT_S = 120.0
KILL_WAIT_S = 30.0  # Slurm's default


def on_head(
    command: Sequence[str], address: JobCluster, folder: JobFolder, base: Mapping[str, str]
) -> tuple[list[str], dict[str, str]]:
    """Return the words that run a command on the head's node, in the job's image, and their env.

    From another node it is a step.
    """
    words = list(command)
    env = dict(base)
    if address.container:  # in this folder
        words = [*address.container, "/usr/bin/env", "-C", os.getcwd(), *command]
    if not is_this_node(address.head):
        env = step_base(base)
        words = [
            "srun", "--overlap", "--nodes=1", "--ntasks=1", f"--nodelist={address.head}",
            "--mpi=none", "--cpu-bind=none", "--quiet", "--job-name=program", *words,
        ]  # fmt: skip
    return words, env | folder.environment(address, env)


def run(
    command: Sequence[str],
    address: JobCluster,
    folder: JobFolder,
    signals: Signals,
    *,
    base: dict[str, str],
    cluster: RayInJob | None,
    grace_s: float,
) -> int:
    """Run a program in a job's Ray. Returns its exit code, or 128 + the signal that ended it.

    Parameters
    ----------
    base : dict
        The program's environment, without the cluster's variables.
    cluster : RayInJob, optional
        The cluster to watch meanwhile.
    grace_s : float
        Time that the program has to end after SIGTERM; half of Slurm's KillWait after scancel.

    Raises
    ------
    JobError
        If Ray is lost; the program has been ended then.
    """
    words, env = on_head(command, address, folder, base)
    keeper = os.getpid()
    try:
        program = subprocess.Popen(
            words, env=env, preexec_fn=lambda: die_with_parent(keeper, signal.SIGTERM)
        )
    except OSError as error:
        print(f"alchemist: {words[0]}: {error.strerror}", file=sys.stderr)
        return 127 if isinstance(error, FileNotFoundError) else 126
    signals.program_has_terminal = True
    try:
        while program.poll() is None:
            signals.check()
            if cluster is None:
                time.sleep(POLL_INTERVAL_S)
            else:
                cluster.watch()
        if cluster is not None and program.returncode:  # Ray's end may have ended it
            cluster.watch()
    except Terminated as ending:
        state, *times = allocation.squeue(base.get("SLURM_JOB_ID", ""), "%T|%L|%l") or [""]
        if times:
            signals.time_left = " with {} left of the job's time limit of {}".format(*times)
        has_it = False
        if state == "COMPLETING":  # cancelled: Slurm kills the job after KillWait
            has_it, kill_wait_s = _cancellation()
            grace_s = min(grace_s, kill_wait_s / 2)
        said = f"{ending}: the program has {grace_s:.0f} s to end{signals.time_left}"
        print(f"alchemist: {said}", file=sys.stderr, flush=True)
        if not has_it:
            program.terminate()
        _end(program, signals.arrived + grace_s - time.monotonic())
    except BaseException:
        program.terminate()
        _end(program, LEAST_GRACE_S)
        raise
    finally:
        signals.program_has_terminal = False
    return exit_code(program)


def serve_gateway(address: JobCluster, folder: JobFolder, port: int) -> str:
    """Start a gateway on the head's node, which ends with the job's Ray.

    Returns
    -------
    str
        Its address, fingerprint and files.

    Raises
    ------
    JobError
        If it does not start; Ray runs on.
    """
    python = sites.PYTHON if address.container else sys.executable
    command = [python, "-m", "alchemist_ray.cli", "gateway", f"--port={port}"]
    words, env = on_head(command, address, folder, os.environ)
    try:
        done = subprocess.run(
            words, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True,
            timeout=GATEWAY_TIMEOUT_S, check=False,
        )  # fmt: skip
        problem = done.stderr.strip() if done.returncode else ""
    except (OSError, subprocess.TimeoutExpired) as error:
        problem = str(error)
    if problem:
        raise JobError(f"Ray is up, but its gateway did not start: {problem}")
    return done.stdout.strip()


def _cancellation() -> tuple[bool, float]:
    """Return whether scancel has sent SIGTERM to all processes of the job, and KillWait.

    With ``proctrack/cgroup`` it goes to the processes that Slurm itself has started.
    """
    settings = allocation.slurm_settings()
    seconds = re.match(r"\d+", settings.get("KillWait", ""))
    to_all = settings.get("ProctrackType") != "proctrack/cgroup"
    return to_all, float(seconds[0]) if seconds else KILL_WAIT_S


def _end(program: subprocess.Popen[bytes], grace_s: float) -> None:
    try:
        program.wait(max(0.0, grace_s))
    except subprocess.TimeoutExpired:
        program.kill()
        program.wait()


def grace_s(spare_s: int) -> float:
    """Return the part of a job's spare seconds that its program has to end."""
    return max(LEAST_GRACE_S, spare_s - TEARDOWN_S)
