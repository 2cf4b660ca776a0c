"""What recovery costs: nothing without a failure, little with some."""

from __future__ import annotations

import time
import timeit
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import ray

from alchemist_ray import AlchemistSession
from tests.faults.conftest import record
from tests.faults.recovery.conftest import Recovering

pytestmark = pytest.mark.timeout(120, func_only=True)

STEPS = 60
LOSSES = (10, 30, 45)  # steps at which the proxy is killed
CALLS = 400  # in each of two gangs, in turns
CALL_LIMIT_S = 100e-6  # 10 us on a quiet machine (benchmarks/recovery.py)


def power_iteration(
    als: AlchemistSession,
    blocks: list[tuple[ray.ObjectRef, int, int]],
    before_step: Callable[[int], object] = lambda step: None,
) -> float:
    """The largest eigenvalue of a symmetric matrix."""
    A = als.send_matrix(blocks)
    v = als.send_matrix(np.ones(A.shape[0]))
    for step in range(STEPS):
        before_step(step)
        w = A @ v
        v = w / np.linalg.norm(w)
    return float(v @ (A @ v))


@pytest.mark.alone  # it measures time
def test_an_iteration_goes_on_after_three_losses(clean: None) -> None:
    M = np.random.default_rng(0).random((2000, 2000))
    blocks = [(ray.put((M + M.T) / 2), 0, 0)]
    gang = Recovering(2, max_failures=3)
    with gang.als, ThreadPoolExecutor(1) as losing:
        power_iteration(gang.als, blocks)  # the libraries are loaded
        begin = time.monotonic()
        wanted = power_iteration(gang.als, blocks)
        undisturbed_s = time.monotonic() - begin

        def lose(step: int) -> None:
            if step in LOSSES:
                losing.submit(gang.kill, gang.proxy)  # during the next calls

        begin = time.monotonic()
        found = power_iteration(gang.als, blocks, lose)
        took_s = time.monotonic() - begin
        gang.als.list_workers()
        assert gang.losses == len(LOSSES)
    assert found == wanted
    record(
        f"max_failures: power iteration of {undisturbed_s:.1f} s, 3 nodes lost", took_s, None, "-"
    )
    assert took_s < 3 * undisturbed_s + 10  # a loaded machine; figures: benchmarks/recovery.py


def test_a_call_costs_the_same_with_recovery(clean: None) -> None:
    with AlchemistSession(1) as plain, AlchemistSession(1, max_failures=1) as recovering:
        calls = [als.load_library("echo").nothing for als in (plain, recovering)]
        turns = [[timeit.timeit(call, number=1) for call in calls] for _ in range(CALLS)]
    plain_s, recovering_s = map(min, zip(*turns, strict=True))  # a busy machine delays most calls
    assert recovering_s - plain_s < CALL_LIMIT_S
