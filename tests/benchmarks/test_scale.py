"""Simulated gangs: they start, answer, fail and leave nothing; the client learns of nodes only."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from benchmarks import scale
from tests.support import traces

LIMIT_S = 60
ERROR_LIMIT_S = 3.0


def simulated(ranks: int, nodes: int) -> scale.Measured:
    command = [sys.executable, "-m", "benchmarks.scale", str(ranks), str(nodes), "5"]
    paths = os.pathsep.join(map(os.path.abspath, sys.path))
    done = subprocess.run(
        command, env=os.environ | {"PYTHONPATH": paths}, check=True, timeout=LIMIT_S,
        stdout=subprocess.PIPE,
    )  # fmt: skip
    return scale.Measured(**json.loads(done.stdout))


@pytest.mark.alone  # looks for what is left of it among all processes
def test_a_simulated_gang_starts_answers_and_fails() -> None:
    found = simulated(6, 3)
    assert 0 < found.barrier_s < found.start_s
    assert 0 < found.call_s < ERROR_LIMIT_S
    assert 0 < found.failure_s < ERROR_LIMIT_S
    left = [pid for pid, line in traces.processes().items() if "spawn_main" in line]
    assert not left


@pytest.mark.alone
def test_the_address_of_a_gang_grows_with_its_nodes_alone() -> None:
    few, many, more_nodes = simulated(8, 4), simulated(64, 4), simulated(64, 8)
    assert many.address_nbytes <= few.address_nbytes + 8  # numbers of more digits
    assert more_nodes.address_nbytes > many.address_nbytes + 100


def test_growth_is_the_factor_per_doubling() -> None:
    sizes = [1.0, 2.0, 4.0, 8.0]
    assert scale.growth(sizes, sizes) == pytest.approx(2.0)
    assert scale.growth(sizes, [3.0] * 4) == pytest.approx(1.0)
    assert scale.growth(sizes, [size**2 for size in sizes]) == pytest.approx(4.0)
