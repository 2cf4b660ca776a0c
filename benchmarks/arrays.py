"""Expressions on handles against NumPy on the same cores: one pass over memory each.

An expression is recorded, and computed when its value is needed: `_done` asks for it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import dask.array
import dask.dataframe
import numpy as np

from alchemist_ray import AlchemistSession, Handle
from benchmarks.harness import Report, Time, alone, in_turns, use_peers

CORES = min(2, len(os.sched_getaffinity(0)))
SHAPE = (8000, 4000)
TARGET = 1.5
SMALL = (100, 10)
VALUES = 10_000_000
MANY = 100_000_000
SHARES = [5, 50, 95]
ROUNDS = 10
ONE_PASS = 0.6  # of the quicker of numexpr and Dask
COUNTS = (1_000_000, MANY)
Work = Callable[[], Any]
Works = dict[str, tuple[Work, ...]]  # ours, NumPy's and, where it has the work, Dask's


def _done(result: Any) -> Any:
    """Have a recorded expression computed, and wait for it."""
    return result.computed() if isinstance(result, Handle) else result


def _measured(works: Works, rounds: int) -> Iterator[tuple[str, dict[str, Time]]]:
    """The times of each work: ours, those of NumPy, and of Dask where it has the work."""
    for name, (ours, *others) in works.items():
        peers = dict(zip(("numpy", "dask"), others, strict=False))
        yield name, in_turns({"ours": lambda ours=ours: _done(ours())} | peers, rounds)


def _beside_numpy(works: Works, rounds: int) -> str:
    """The ratios of our times to NumPy's, and to Dask's where it has the work."""
    told = []
    for name, times in _measured(works, rounds):
        told.append(f"{name} {times['ours'] / times['numpy']:.2f} ({_detail(times)})")
        if "dask" in times:
            told[-1] += f", {times['ours'] / times['dask']:.2f} x Dask's"
        print(told[-1], flush=True)
    return "; ".join(told) + "."


def _detail(times: dict[str, Time]) -> str:
    return f"{times['ours'] * 1e3:.1f} ms; numpy {times['numpy'] * 1e3:.1f}"


def run() -> Report:
    report = Report("arrays")
    random = np.random.default_rng(0)
    a, b = random.random(SHAPE), random.random(SHAPE)
    row, warm = a.mean(axis=0), np.zeros(SHAPE)
    with AlchemistSession(CORES, progress=False) as als:
        A, B = als.send_matrix(a), als.send_matrix(b)
        targets: Works = {
            "A + B": (lambda: A + B, lambda: a + b),
            "A.sum(axis=0)": (lambda: A.sum(axis=0), lambda: a.sum(axis=0)),
        }
        others: Works = {
            "`A + B` beside `np.add(a, b, out=c)`, whose memory is warm,": (
                lambda: A + B,
                lambda: np.add(a, b, warm),
            ),
            "`A.sum(axis=1)`": (lambda: A.sum(axis=1), lambda: a.sum(axis=1)),
            "`2 * A`": (lambda: 2 * A, lambda: 2 * a),
            "`A - row`": (lambda: A - row, lambda: a - row),
            "`np.exp(A)`": (lambda: np.exp(A), lambda: np.exp(a)),
            "`A > 0.5`": (lambda: A > 0.5, lambda: a > 0.5),
            "`A.std(axis=0)`": (lambda: A.std(axis=0), lambda: a.std(axis=0)),
            "`A.max()`": (lambda: A.max(), lambda: a.max()),
            "`A.T`": (lambda: A.T, lambda: a.T.copy()),
            "`A[::2]`": (lambda: A[::2], lambda: a[::2].copy()),
        }
        for name, times in _measured(targets, ROUNDS):
            ratio = times["ours"] / times["numpy"]
            report.add(name, ratio, TARGET, "x numpy", at_most=True, detail=_detail(times))
        report.notes.append("Others, x numpy: " + _beside_numpy(others, ROUNDS))
        report.notes.append(_overhead(als))
    with AlchemistSession(CORES, progress=False) as als:
        report.notes.append(_ordering(als))
    with AlchemistSession(CORES, progress=False) as als:
        _one_pass(als, report)
    with AlchemistSession(CORES, progress=False) as als:
        for count in COUNTS:
            report.notes.append(_elements(als, count))
    return report


def _one_pass(als: AlchemistSession, report: Report) -> None:
    """Expressions of 1e8 elements against numexpr and Dask on as many threads, and NumPy."""
    use_peers()
    try:
        import numexpr
    except ImportError:
        print("numexpr is not installed: make peers", flush=True)
        return
    numexpr.set_num_threads(CORES)
    shape = (10_000, MANY // 10_000)
    random = np.random.default_rng(0)
    a, b = random.random(shape), random.random(shape)
    A, B = als.send_matrix(a), als.send_matrix(b)
    DA, DB = (dask.array.from_array(x, chunks=(shape[0] // 16, -1)) for x in (a, b))

    def evaluated(text: str, **names: Any) -> Any:
        return numexpr.evaluate(text, {"a": a, "b": b, **names})

    def selected() -> float:
        total = evaluated("sum(where(a > 0.5, a, 0))")
        return float(total / evaluated("sum(where(a > 0.5, 1, 0))"))

    rows: dict[str, tuple[Any, Any, Any, Any]] = {
        "(A * 2 + B).sum()": (
            lambda: float((A * 2 + B).sum()),
            lambda: float(evaluated("sum(a * 2 + b)")),
            lambda: float((DA * 2 + DB).sum().compute()),
            lambda: float((a * 2 + b).sum()),
        ),
        "sqrt(A * A + B * B)": (
            lambda: _done(np.sqrt(A * A + B * B)),
            lambda: evaluated("sqrt(a * a + b * b)"),
            lambda: np.sqrt(DA * DA + DB * DB).compute(),
            lambda: np.sqrt(a * a + b * b),
        ),
        "A[A > 0.5].mean()": (
            lambda: float(A[A > 0.5].mean()),
            selected,
            lambda: float(DA[DA > 0.5].mean().compute()),
            lambda: float(a[a > 0.5].mean()),
        ),
        "(A - A.mean(0)) / A.std(0)": (
            lambda: _done((A - A.mean(0)) / A.std(0)),
            lambda: evaluated("(a - mean) / std", mean=a.mean(0), std=a.std(0)),
            lambda: ((DA - DA.mean(0)) / DA.std(0)).compute(),
            lambda: (a - a.mean(0)) / a.std(0),
        ),
    }
    for name, (ours, numexprs, dasks, numpys) in rows.items():
        works = {"ours": ours, "numexpr": numexprs, "dask": dasks, "numpy": numpys}
        times = in_turns(works, 5)
        quicker = min(times["numexpr"], times["dask"])
        detail = "; ".join(f"{who} {time_s:.3f} s" for who, time_s in times.items())
        report.add(
            f"{name}, 1e8 elements",
            times["ours"] / quicker,
            ONE_PASS,
            "x numexpr or Dask",
            at_most=True,
            detail=detail,
        )


def _elements(als: AlchemistSession, count: int) -> str:
    """Functions that select, order or move elements, against NumPy."""
    random = np.random.default_rng(0)
    a = random.random(count)
    m = a.reshape(count // 100, 100)
    rows = random.permutation(m.shape[0])
    A, M = als.send_matrix(a), als.send_matrix(m)
    works: Works = {
        "`a[a > 0.5]`": (lambda: A[A > 0.5], lambda: a[a > 0.5]),
        "`m.argmax(1)`": (lambda: M.argmax(axis=1), lambda: m.argmax(axis=1)),
        "`cumsum`": (lambda: np.cumsum(A), lambda: np.cumsum(a)),
        "`sort`": (lambda: np.sort(A), lambda: np.sort(a)),
        "`m[rows]`": (lambda: M[rows], lambda: m[rows]),
        "`m.reshape(-1, 50)`, copied": (
            lambda: M.reshape(-1, 50),
            lambda: m.reshape(-1, 50).copy(),
        ),
    }
    if count < MANY:  # NumPy takes a minute for more
        whole = random.integers(0, count // 10, count)
        W = als.send_matrix(whole)
        works["`unique` of integers"] = (lambda: np.unique(W), lambda: np.unique(whole))
    else:
        works["`np.percentile` (three)"] = _percentiles(A, a)
    rounds = 2 if count == MANY else 15
    return f"Of {count:.0e} elements, x numpy: {_beside_numpy(works, rounds)}"


def _percentiles(A: Handle, a: Any) -> tuple[Work, Work, Work]:
    """Three of them; Dask's are approximate."""
    D = dask.array.from_array(a, chunks=a.size // 16)
    return (
        lambda: np.percentile(A, SHARES),
        lambda: np.percentile(a, SHARES),
        lambda: dask.array.percentile(D, SHARES).compute(),
    )


def _consumed(frame: Any) -> None:
    """Compute all partitions of a frame, and keep none."""
    frame.map_partitions(len).compute()


def _ordering(als: AlchemistSession) -> str:
    """Functions that need the order of all elements of a vector, against NumPy and Dask.

    Dask has no sort of an array: that of its data frames is exact, with an index that moves along.
    """
    a = np.random.default_rng(0).random(VALUES)
    A = als.send_matrix(a)
    frame = dask.dataframe.from_array(a, chunksize=VALUES // 8, columns="value").to_frame()
    works: Works = {
        "`np.sort`": (
            lambda: np.sort(A),
            lambda: np.sort(a),
            lambda: _consumed(frame.sort_values("value")),
        ),
        "stable `np.argsort`": (lambda: np.argsort(A), lambda: np.argsort(a, kind="stable")),
        "`np.percentile` (three)": _percentiles(A, a),
        "`np.median`": (lambda: np.median(A), lambda: np.median(a)),
        "`np.cumsum`": (lambda: np.cumsum(A), lambda: np.cumsum(a)),
        "`np.histogram`": (lambda: np.histogram(A, 100), lambda: np.histogram(a, 100)),
    }
    return f"Of a vector of {VALUES:.0e} float64, x numpy: {_beside_numpy(works, 5)}"


def _overhead(als: AlchemistSession) -> str:
    """The cost of an expression on a very small matrix."""
    A = als.send_matrix(np.ones(SMALL))
    row = np.ones(SMALL[1])

    def chain(made: Any) -> Any:
        for _ in range(10):
            made = made * 0.5 + 1
        return made.fetch()

    works: dict[str, Any] = {
        "`A + A`": lambda: _done(A + A),
        "`A - row`": lambda: _done(A - row),
        "`A.sum(axis=0)`": lambda: _done(A.sum(axis=0)),
        "`(A + 1) * 2`": lambda: _done((A + 1) * 2),
        "20 operations and a fetch": lambda: chain(A),
    }
    times = in_turns(works, rounds=200)
    told = "; ".join(f"{name} {time_s * 1e3:.2f}" for name, time_s in times.items())
    print(told, flush=True)
    return f"Of {SMALL[0]} x {SMALL[1]}, where there is nothing to compute, ms: {told}."


if __name__ == "__main__":
    alone(run, store_bytes=1 << 30)
