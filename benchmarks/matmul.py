"""matmul end to end: send, compute, fetch, against numpy on the same cores."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import ray

from alchemist_ray import AlchemistSession
from benchmarks.harness import Report, in_turns

N = 4000


def run() -> Report:
    report = Report("matmul")
    rng = np.random.default_rng(0)
    A, B = rng.random((N, N)), rng.random((N, N))
    result: list[Any] = [None]
    cores = len(os.sched_getaffinity(0))
    with AlchemistSession(cores, progress=False) as als:
        linalg = als.load_library("linalg")

        def ours() -> None:
            result[0] = None
            a, b = als.send_matrix(A), als.send_matrix(B)
            c = linalg.matmul(a, b)
            result[0] = c.fetch()
            for handle in (a, b, c):
                handle.free()

        a, b = als.send_matrix(A), als.send_matrix(B)

        def compute() -> None:
            linalg.matmul(a, b).free()

        ours()
        exact = A @ B
        if not np.allclose(result[0], exact, rtol=1e-10):
            raise SystemExit("the gang's product is wrong")
        times = in_turns({"numpy": lambda: A @ B, "ours": ours, "compute": compute}, rounds=3)
    report.add(
        f"matmul {N} x {N}, send + compute + fetch",
        times["ours"] / times["numpy"],
        1.5,
        "x numpy",
        at_most=True,
        detail=f"{cores} ranks; compute alone {times['compute'] / times['numpy']:.2f} x; numpy "
        f"{2 * N**3 / times['numpy'] / 1e9:.0f} GF/s",
    )
    return report


if __name__ == "__main__":
    ray.init(num_cpus=8, include_dashboard=False, log_to_driver=False)
    run().save()
