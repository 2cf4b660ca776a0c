"""``make bench``: all benchmarks in one run; tables, JSON and pictures into results/.

Without Spark, which ``make bench-spark`` (an argument ``spark``) measures too.
"""

from __future__ import annotations

import os
import time

os.environ.setdefault("RAY_AUTH_MODE", "disabled")
for name in ("OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE"):  # they would slow NumPy down
    os.environ.pop(name, None)

import ray

from benchmarks import (
    arrays,
    between_hosts,
    clients,
    clients_spark,
    env_step,
    files,
    gateway,
    heat,
    hpc,
    launch,
    linalg,
    recovery,
    scale,
    summary,
    transfer,
)
from benchmarks.harness import WITH_SPARK, blas_kernels


def main() -> None:
    print(f"BLAS: {', '.join(blas_kernels())}", flush=True)
    begun = time.monotonic()
    ray.init(num_cpus=8, include_dashboard=False, log_to_driver=False, object_store_memory=1 << 30)
    for benchmark in (
        launch,
        scale,
        recovery,
        hpc,
        transfer,
        between_hosts,
        gateway,
        clients,
        *([clients_spark] if WITH_SPARK else []),
        arrays,
        files,
        env_step,
        linalg,
        heat,
    ):
        print(f"\n## {benchmark.__name__}", flush=True)
        begin = time.monotonic()
        report = benchmark.run()
        report.seconds = time.monotonic() - begin
        if report.rows:  # else its peer is not installed
            report.save()
        print(f"{benchmark.__name__} took {report.seconds:.0f} s", flush=True)
    ray.shutdown()
    summary.main()
    print(f"\nall took {time.monotonic() - begun:.0f} s")


if __name__ == "__main__":
    main()
