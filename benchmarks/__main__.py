"""``make bench``: all benchmarks in one run; tables, JSON and pictures into results/.

Without Spark, which ``make bench-spark`` (an argument ``spark``) measures too.
"""

from __future__ import annotations

import time
from importlib import import_module

from benchmarks import summary
from benchmarks.harness import WITH_SPARK, blas_kernels, run_and_save, start_ray

NAMES = (
    "launch", "scale", "recovery", "hpc", "transfer", "between_hosts", "gateway", "clients",
    *(["clients_spark"] if WITH_SPARK else []), "arrays", "files", "env_step", "linalg", "heat",
)  # fmt: skip


def main() -> None:
    print(f"BLAS: {', '.join(blas_kernels())}", flush=True)
    begun = time.monotonic()
    start_ray(8, store_bytes=1 << 30)
    for name in NAMES:
        print(f"\n## {name}", flush=True)
        run_and_save(import_module(f"benchmarks.{name}").run)
    summary.main()
    print(f"\nall took {time.monotonic() - begun:.0f} s")


if __name__ == "__main__":
    main()
