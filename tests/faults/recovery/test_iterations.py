"""An iteration during which nodes are lost; what it costs is in benchmarks/recovery.py."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import ray

from alchemist_ray import AlchemistSession
from tests.faults.recovery.conftest import Recovering

STEPS = 60
LOSSES = (10, 30, 45)  # steps at which the proxy is killed


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


def test_an_iteration_goes_on_after_three_losses(clean: None) -> None:
    M = np.random.default_rng(0).random((500, 500))
    blocks = [(ray.put((M + M.T) / 2), 0, 0)]
    gang = Recovering(2, max_failures=3)
    with gang.als, ThreadPoolExecutor(1) as losing:
        wanted = power_iteration(gang.als, blocks)

        def lose(step: int) -> None:
            if step in LOSSES:
                losing.submit(gang.kill, gang.proxy)  # during the next calls

        found = power_iteration(gang.als, blocks, lose)
        gang.als.list_workers()
        assert gang.losses == len(LOSSES)
    assert found == wanted
