"""Factorizations of a square matrix that stays distributed, against NumPy's on the same cores.

``python -m benchmarks.factorizations`` starts a Ray for it (``ORDER=1500``: a smaller matrix); not
in ``make bench``.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import numpy as np

from alchemist_ray import AlchemistSession
from alchemist_ray.errors import LibraryError
from benchmarks.harness import Report, Turns, alone, timed

CORES = min(2, len(os.sched_getaffinity(0)))
ORDER = int(os.environ.get("ORDER", "4000"))
ROUNDS = 2
EIGH, SVD = 1.5, 3.0  # targets with ScaLAPACK, x NumPy's time


def run() -> Report:
    report = Report("factorizations")
    a = np.random.default_rng(0).standard_normal((ORDER, ORDER))
    h = a + a.T
    with AlchemistSession(CORES, progress=False) as als:
        linalg = als.load_library("linalg")
        methods = ["auto"]
        try:
            als.load_library("scalapack")
            methods.append("scalapack")
        except LibraryError as error:
            report.notes.append(f"scalapack is not in this table: {str(error).split('.')[0]}.")
        for name, routine, numpy_s, given, target in (
            ("eigh", linalg.eigh, np.linalg.eigh, h, EIGH),
            ("svd", linalg.svd, np.linalg.svd, a, SVD),
        ):
            A = als.send_matrix(given)
            turns = Turns()
            for _ in range(ROUNDS):
                turns.add((name, "numpy"), timed(lambda f=numpy_s, x=given: f(x)))
                for method in methods:
                    turns.add((name, method), timed(_called(routine, A, method)))
            A.free()
            times = turns.times()
            unit = times[name, "numpy"]
            for method in methods:
                seconds = times[name, method]
                report.add(
                    f"{name} {ORDER} x {ORDER}, method {method}",
                    seconds / unit,
                    target,
                    "x numpy",
                    at_most=True,
                    detail=f"{CORES} ranks; {seconds:.1f} s, numpy {unit:.1f} s",
                )
    return report


def _called(routine: Callable[..., Any], A: Any, method: str) -> Callable[[], None]:
    def call() -> None:
        for result in routine(A, method=method):
            result.free()

    return call


if __name__ == "__main__":
    alone(run, cpus=4)
