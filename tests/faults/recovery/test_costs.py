"""What recovery costs: nothing without a failure, little with some."""

from __future__ import annotations

import statistics
import threading
import time

import numpy as np
import pytest
import ray

from alchemist_ray import AlchemistSession
from alchemist_ray.gang.libraries import Routine
from tests.faults.conftest import record
from tests.faults.recovery.conftest import Recovering

pytestmark = pytest.mark.timeout(120, func_only=True)

STEPS = 200
CALLS = 1000  # in each of two gangs, in turns
CALL_LIMIT_S = 50e-6  # 10 us on a quiet machine (benchmarks/recovery.py)


def power_iteration(als: AlchemistSession, blocks: list[tuple[ray.ObjectRef, int, int]]) -> float:
    """The largest eigenvalue of a symmetric matrix."""
    A = als.send_matrix(blocks)
    v = als.send_matrix(np.ones(A.shape[0]))
    for _ in range(STEPS):
        w = A @ v
        v = w / np.linalg.norm(w)
    return float(v @ (A @ v))


def test_an_iteration_goes_on_after_three_losses(clean: None) -> None:
    M = np.random.default_rng(0).random((2000, 2000))
    blocks = [(ray.put((M + M.T) / 2), 0, 0)]
    gang = Recovering(2, max_failures=3)
    power_iteration(gang.als, blocks)  # the libraries are loaded
    begin = time.monotonic()
    wanted = power_iteration(gang.als, blocks)
    undisturbed_s = time.monotonic() - begin

    def lose() -> None:
        for share in (0.2, 0.5, 0.3):
            last = gang.ranks[-1]  # of ranks that are there again
            time.sleep(max(1.0, share * undisturbed_s))  # no call is lost twice
            gang.kill(last)

    losing = threading.Thread(target=lose)
    losing.start()
    begin = time.monotonic()
    found = power_iteration(gang.als, blocks)
    took_s = time.monotonic() - begin
    losing.join()
    assert found == wanted
    gang.als.list_workers()
    assert gang.losses == 3
    gang.als.close()
    record(
        f"max_failures: power iteration of {undisturbed_s:.1f} s, 3 ranks killed", took_s, None, "-"
    )
    assert took_s < 3 * undisturbed_s + 10  # a loaded machine; figures: benchmarks/recovery.py


def test_a_call_costs_the_same_with_recovery(clean: None) -> None:
    with AlchemistSession(1) as plain, AlchemistSession(1, max_failures=1) as recovering:
        calls = [als.load_library("echo").nothing for als in (plain, recovering)]
        plain_s, recovering_s = medians(calls)
    assert recovering_s - plain_s < CALL_LIMIT_S


def medians(calls: list[Routine]) -> list[float]:
    """Median times of calls that are made in turns."""
    times: list[list[float]] = [[] for _ in calls]
    for _ in range(CALLS):
        for call, its in zip(calls, times, strict=True):
            begin = time.perf_counter()
            call()
            its.append(time.perf_counter() - begin)
    return [statistics.median(its) for its in times]
