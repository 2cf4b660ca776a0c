"""The cost of `max_failures`, per call and for iterations whose ranks die; that of resizes."""

from __future__ import annotations

import os
import signal
import statistics
import tempfile
import threading
import time
from collections.abc import Collection
from typing import Any

import numpy as np
import ray

from alchemist_ray import AlchemistSession
from alchemist_ray.errors import GroupRecoveredError
from benchmarks.harness import Report, Turns, alone, timed

CALLS = 5_000
SIZE = 11_000  # 968 MB
STEPS = 150
KILL_AFTER_S = 0.005  # in the middle of a step
SIZES = (8, 2)  # from 4
TURNS = 5
KILLS = (STEPS // 4, STEPS // 2, 3 * STEPS // 4)  # the steps in which a rank is killed
CHANGING_SIZE = 3_000  # 72 MB
CHANGING_STEPS = 1_500  # so long that automatic checkpoints are written
CHANGING_TURNS = 2


def run() -> Report:
    report = Report("recovery")
    with AlchemistSession(2) as plain, AlchemistSession(2, max_failures=1) as recovering:
        calls = [als.load_library("echo").nothing for als in (plain, recovering)]
        turns = [[timed(call) for call in calls] for _ in range(CALLS)]
    without, log = (statistics.median(times) for times in zip(*turns, strict=True))
    report.add(
        "empty call with the log, minus without", (log - without) * 1e6, 10.0, "us", at_most=True,
        detail=f"medians of {CALLS} calls in turns: {log * 1e6:.0f} and {without * 1e6:.0f} us",
    )  # fmt: skip
    M = np.random.default_rng(0).random((SIZE, SIZE))
    blocks = [(ray.put((M + M.T) / 2), 0, 0)]
    turns = Turns()
    with AlchemistSession(2, max_failures=3 * TURNS) as als:
        wanted, _ = _power_iteration(als, blocks)
        for _ in range(TURNS):
            for name, kills in (("undisturbed", ()), ("killed three times", KILLS)):
                found, seconds = _power_iteration(als, blocks, kills)
                if found != wanted:
                    raise AssertionError(f"{found} instead of {wanted}")
                turns.add(name, seconds)
    undisturbed_s, took_s = turns.times().values()
    report.add(
        "power iteration, ranks killed three times / undisturbed", took_s / undisturbed_s, 1.5, "x",
        at_most=True, detail=f"{STEPS} steps, {M.nbytes / 1e6:.0f} MB in the object store: "
        f"{took_s}; undisturbed {undisturbed_s}; the same result",
    )  # fmt: skip
    _changing(report)
    _resize(report)
    return report


def _changing(report: Report) -> None:
    """Each step changes the matrix, so that only automatic checkpoints limit what is repeated."""
    kills = tuple(CHANGING_STEPS * step // STEPS for step in KILLS)
    turns = Turns()
    with (
        tempfile.TemporaryDirectory() as folder,
        AlchemistSession(
            2, max_failures=3 * CHANGING_TURNS, checkpoint_folder=f"{folder}/checkpoint"
        ) as als,
    ):
        for _ in range(CHANGING_TURNS):
            turns.add("undisturbed", _added(als, ()))
            turns.add("killed three times", _added(als, kills))
    undisturbed_s, took_s = turns.times().values()
    report.add(
        "each step changes the matrix, ranks killed three times / undisturbed",
        took_s / undisturbed_s, 1.5, "x", at_most=True,
        detail=f"{CHANGING_STEPS} steps, {CHANGING_SIZE**2 * 8 / 1e6:.0f} MB, checkpoints written "
        f"automatically: {took_s}; undisturbed {undisturbed_s}; the same result",
    )  # fmt: skip


def _added(als: AlchemistSession, kills: Collection[int]) -> float:
    """The seconds of steps that each add 1 to a matrix; a rank is killed in some."""

    def add_one(comm: Any, A: Any) -> None:
        A.local += 1.0

    A = als.send_matrix(np.zeros((CHANGING_SIZE, CHANGING_SIZE)), durable=True)
    begin = time.perf_counter()
    for step in range(CHANGING_STEPS):
        if step in kills:
            _kill_soon(als)
        while True:
            try:
                als.run(add_one, A)
                break
            except GroupRecoveredError:  # it was restored to what it was before the call
                continue
    took_s = time.perf_counter() - begin
    found = np.unique(A.fetch())
    A.free()
    if list(found) != [CHANGING_STEPS]:
        raise AssertionError(f"{found[:3]} instead of {CHANGING_STEPS}")
    return took_s


def _kill_soon(als: AlchemistSession) -> None:
    victim = als.list_workers()[-1].pid
    threading.Timer(KILL_AFTER_S, os.kill, (victim, signal.SIGKILL)).start()


def _resize(report: Report) -> None:
    """4 -> 8 -> 2 ranks, compared with `to_layout` of the same bytes, also into fresh memory."""
    turns = Turns()
    with AlchemistSession(4) as als:
        A = als.send_matrix(np.random.default_rng(0).random((SIZE, SIZE)))
        corner = A[-3:, -3:].fetch()
        for _ in range(TURNS):
            for size in SIZES:
                turns.add(
                    (f"resize to {size}", "fresh"), timed(lambda: A.to_layout("MC_MR").free())
                )
                turns.add((f"resize to {size}", "warm"), timed(lambda: A.to_layout("MC_MR").free()))
                resize_s = timed(lambda size=size: als.resize(size))
                turns.add((f"resize to {size}", "resize"), resize_s)
            als.resize(4)
        if not np.array_equal(A[-3:, -3:].fetch(), corner):
            raise AssertionError("the matrix has changed")
    times = turns.times()
    for before, size in zip((4, *SIZES), SIZES, strict=False):
        fresh_s, warm_s, resize_s = (
            times[f"resize to {size}", what] for what in ("fresh", "warm", "resize")
        )
        report.add(
            f"resize from {before} to {size} ranks / to_layout", resize_s / fresh_s,
            2.0, "x", at_most=True, detail=f"{A.nbytes / 1e6:.0f} MB: {resize_s}, with "
            f"the start of the ranks; to_layout {fresh_s:.2f} s ({warm_s:.2f} s into memory "
            "that the ranks have used before)",
        )  # fmt: skip


def _power_iteration(
    als: AlchemistSession,
    blocks: list[tuple[ray.ObjectRef, int, int]],
    kills: Collection[int] = (),
) -> tuple[float, float]:
    """The largest eigenvalue, and the seconds that it took; a rank is killed in some steps."""
    begin = time.perf_counter()
    A = als.send_matrix(blocks)
    v = als.send_matrix(np.ones(A.shape[0]))
    for step in range(STEPS):
        if step in kills:
            _kill_soon(als)
        w = A @ v
        v = w / np.linalg.norm(w)
    return float(v @ (A @ v)), time.perf_counter() - begin


if __name__ == "__main__":
    alone(run)
