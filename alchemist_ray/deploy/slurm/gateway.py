"""``alchemist slurm start --gateway``: a gateway in a job's Ray, for clients without Ray."""

from __future__ import annotations

import os
import subprocess
import sys

from alchemist_ray.deploy.slurm import container
from alchemist_ray.deploy.slurm.program import command_on_head, in_image
from alchemist_ray.deploy.slurm.supervisors import step_base
from alchemist_ray.errors import JobError
from alchemist_ray.runtime.cluster.batch_job import JobCluster, JobFolder

TIMEOUT_S = 120.0


def serve(address: JobCluster, folder: JobFolder, port: int) -> str:
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
    python = container.PYTHON if address.container else sys.executable
    inside = in_image([python, "-m", "alchemist_ray.cli", "gateway", f"--port={port}"], address)
    words = command_on_head(inside, address)
    env = dict(os.environ) if words == inside else step_base(os.environ)
    try:
        done = subprocess.run(
            words, env=env | folder.environment(address, env), stdin=subprocess.DEVNULL,
            capture_output=True, text=True, timeout=TIMEOUT_S, check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        raise JobError(f"Ray is up, but its gateway did not start: {error}") from None
    if done.returncode:
        raise JobError(f"Ray is up, but its gateway did not start: {done.stderr.strip()}")
    return done.stdout.strip()
