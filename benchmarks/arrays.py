"""Expressions on handles against NumPy on the same cores: one pass over memory each."""

from __future__ import annotations

import os

os.environ.setdefault("RAY_AUTH_MODE", "disabled")

from typing import Any

import dask.array
import dask.dataframe
import numpy as np

from alchemist_ray import AlchemistSession
from benchmarks.harness import Report, in_turns

CORES = min(2, len(os.sched_getaffinity(0)))
SHAPE = (8000, 4000)
TARGET = 1.5
SMALL = (100, 10)
VALUES = 10_000_000
MANY = 100_000_000
SHARES = [5, 50, 95]
ROUNDS = 10


def run() -> Report:
    report = Report("arrays")
    random = np.random.default_rng(0)
    a, b = random.random(SHAPE), random.random(SHAPE)
    row, warm = a.mean(axis=0), np.zeros(SHAPE)
    with AlchemistSession(CORES, progress=False) as als:
        A, B = als.send_matrix(a), als.send_matrix(b)
        expressions: dict[str, tuple[Any, Any, bool]] = {
            "A + B": (lambda: A + B, lambda: a + b, True),
            "A.sum(axis=0)": (lambda: A.sum(axis=0), lambda: a.sum(axis=0), True),
            "`A + B` beside `np.add(a, b, out=c)`, whose memory is warm,": (
                lambda: A + B,
                lambda: np.add(a, b, warm),
                False,
            ),
            "`A.sum(axis=1)`": (lambda: A.sum(axis=1), lambda: a.sum(axis=1), False),
            "`2 * A`": (lambda: 2 * A, lambda: 2 * a, False),
            "`A - row`": (lambda: A - row, lambda: a - row, False),
            "`np.exp(A)`": (lambda: np.exp(A), lambda: np.exp(a), False),
            "`A > 0.5`": (lambda: A > 0.5, lambda: a > 0.5, False),
            "`A.std(axis=0)`": (lambda: A.std(axis=0), lambda: a.std(axis=0), False),
            "`A.max()`": (lambda: A.max(), lambda: a.max(), False),
            "`A.T`": (lambda: A.T, lambda: a.T.copy(), False),
            "`A[::2]`": (lambda: A[::2], lambda: a[::2].copy(), False),
        }
        others = []
        for name, (ours, numpys, wanted) in expressions.items():
            times = in_turns({"ours": ours, "numpy": numpys}, ROUNDS)
            ratio, detail = times["ours"] / times["numpy"], _detail(times)
            if wanted:
                report.add(name, ratio, TARGET, "x numpy", at_most=True, detail=detail)
            else:
                others.append(f"{name} {ratio:.2f} ({detail})")
                print(others[-1], flush=True)
        report.notes.append("Others, x numpy: " + "; ".join(others) + ".")
        report.notes.append(_overhead(als))
    with AlchemistSession(CORES, progress=False) as als:
        report.notes.append(_ordering(als))
    with AlchemistSession(CORES, progress=False) as als:
        report.notes.append(_many(als))
    return report


def _many(als: AlchemistSession) -> str:
    """Sort and percentiles of many values, against NumPy and Dask, whose are approximate."""
    a = np.random.default_rng(0).random(MANY)
    A, D = als.send_matrix(a), dask.array.from_array(a, chunks=MANY // 16)
    np.testing.assert_array_equal(np.sort(A)[:: MANY // 100], np.sort(a)[:: MANY // 100])
    sorts = in_turns({"ours": lambda: np.sort(A), "numpy": lambda: np.sort(a)}, 5)
    shares = in_turns({
        "ours": lambda: np.percentile(A, SHARES), "numpy": lambda: np.percentile(a, SHARES),
        "dask": lambda: dask.array.percentile(D, SHARES).compute(),
    }, 5)  # fmt: skip
    told = []
    for name, times in (("`np.sort`", sorts), ("`np.percentile` (three)", shares)):
        dasks = f"; Dask's {times['dask']:.2f}" if "dask" in times else ""
        ours, numpys = times["ours"], times["numpy"]
        told.append(f"{name} {ours / numpys:.2f} ({ours:.2f} s; numpy {numpys:.2f}{dasks})")
        print(told[-1], flush=True)
    return f"Of a vector of {MANY:.0e} float64, x numpy: " + "; ".join(told) + "."


def _consumed(frame: Any) -> None:
    """Compute all partitions of a frame, and keep none."""
    frame.map_partitions(len).compute()


def _ordering(als: AlchemistSession) -> str:
    """Functions that need the order of all elements of a vector, against NumPy and Dask.

    Dask has no sort of an array: that of its data frames is exact, with an index that moves along.
    Its percentiles are approximate.
    """
    a = np.random.default_rng(0).random(VALUES)
    A, D = als.send_matrix(a), dask.array.from_array(a, chunks=VALUES // 8)
    frame = dask.dataframe.from_array(a, chunksize=VALUES // 8, columns="value").to_frame()
    dasks: dict[str, tuple[str, Any]] = {
        "`np.sort`": ("sort", lambda: _consumed(frame.sort_values("value"))),
        "`np.percentile` (three)": (
            "approximation",
            lambda: dask.array.percentile(D, SHARES).compute(),
        ),
    }
    works: dict[str, tuple[Any, Any]] = {
        "`np.sort`": (lambda: np.sort(A), lambda: np.sort(a)),
        "stable `np.argsort`": (lambda: np.argsort(A), lambda: np.argsort(a, kind="stable")),
        "`np.percentile` (three)": (
            lambda: np.percentile(A, SHARES),
            lambda: np.percentile(a, SHARES),
        ),
        "`np.median`": (lambda: np.median(A), lambda: np.median(a)),
        "`np.cumsum`": (lambda: np.cumsum(A), lambda: np.cumsum(a)),
        "`np.histogram`": (lambda: np.histogram(A, 100), lambda: np.histogram(a, 100)),
    }
    told = []
    for name, (ours, numpys) in works.items():
        what, its = dasks.get(name, ("", None))
        times = in_turns({"ours": ours, "numpy": numpys} | ({"dask": its} if its else {}), 5)
        ratio = times["ours"] / times["numpy"]
        told.append(f"{name} {ratio:.2f} ({_detail(times)})")
        if its:
            told[-1] += f", {times['ours'] / times['dask']:.2f} x Dask's {what}"
        print(told[-1], flush=True)
    return f"Of a vector of {VALUES:.0e} float64, x numpy: " + "; ".join(told) + "."


def _detail(times: dict[str, float]) -> str:
    return f"{times['ours'] * 1e3:.1f} ms; numpy {times['numpy'] * 1e3:.1f}"


def _overhead(als: AlchemistSession) -> str:
    """The cost of an expression on a very small matrix."""
    A = als.send_matrix(np.ones(SMALL))
    row = np.ones(SMALL[1])
    works: dict[str, Any] = {
        "`A + A`": lambda: A + A,
        "`A - row`": lambda: A - row,
        "`A.sum(axis=0)`": lambda: A.sum(axis=0),
        "`(A + 1) * 2` with its temporary freed": lambda: (A + 1) * 2,
    }
    times = in_turns(works, rounds=200)
    told = "; ".join(f"{name} {time_s * 1e3:.2f}" for name, time_s in times.items())
    print(told, flush=True)
    return f"Of {SMALL[0]} x {SMALL[1]}, where there is nothing to compute, ms: {told}."


if __name__ == "__main__":
    import ray

    ray.init(num_cpus=8, include_dashboard=False, log_to_driver=False, object_store_memory=1 << 30)
    run().save()
    ray.shutdown()
