"""Which Ray cluster a session is in."""

from __future__ import annotations

import os

import ray

from alchemist_ray.errors import SessionError
from alchemist_ray.runtime.batch_job import adopt

LAPTOP_CPUS = 4  # a Ray that we start ourselves has room for at least so many workers


def join_ray(workers: int | None) -> bool:
    """Be in a Ray cluster: this process's, its batch job's, one that runs here, or a new one.

    Returns whether a new one was started. A new one has a CPU for every core, and
    at least `LAPTOP_CPUS` (or `workers`): on a small machine ranks share cores.
    """
    if ray.is_initialized():
        return False
    if adopt(os.environ):
        raise SessionError(
            "this job's Ray wants its token, and ray was imported before it was said so: import "
            "alchemist_ray before ray, or start the program with `alchemist slurm run -- ...`"
        )
    try:
        ray.init(address="auto")
        return False
    except ConnectionError:
        cpus = max(os.cpu_count() or 1, LAPTOP_CPUS, workers or 0)
        ray.init(num_cpus=cpus, include_dashboard=False)
        return True
