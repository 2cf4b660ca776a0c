"""``make bench``: all benchmarks in one run; tables, JSON and pictures into results/."""

from __future__ import annotations

import os

os.environ.setdefault("RAY_AUTH_MODE", "disabled")

import ray

from benchmarks import (
    arrays,
    clients,
    env_step,
    files,
    gateway,
    hpc,
    launch,
    linalg,
    recovery,
    scale,
    transfer,
)


def main() -> None:
    ray.init(num_cpus=8, include_dashboard=False, log_to_driver=False, object_store_memory=1 << 30)
    for benchmark in (
        launch,
        scale,
        recovery,
        hpc,
        transfer,
        gateway,
        clients,
        arrays,
        files,
        env_step,
        linalg,
    ):
        print(f"\n## {benchmark.__name__}", flush=True)
        benchmark.run().save()
    ray.shutdown()


if __name__ == "__main__":
    main()
