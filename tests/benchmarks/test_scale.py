"""Simulated gangs: they start, answer, fail and leave nothing; the client learns of nodes only."""

from __future__ import annotations

import json
import os
import sys

import pytest

from benchmarks import scale
from mpi_workers.data.transfers import MatrixReader, MatrixWriter
from tests.support import commands, traces

LIMIT_S = 60
ERROR_LIMIT_S = 3.0
PATHS = os.pathsep.join(map(os.path.abspath, sys.path))


def simulated(ranks: int, nodes: int) -> scale.Measured:
    command = [sys.executable, "-m", "benchmarks.scale", str(ranks), str(nodes), "5"]
    # If it fails: with the errors of all processes of the gang.
    said = commands.output(*command, limit_s=LIMIT_S, PYTHONPATH=PATHS)
    return scale.Measured(**json.loads(said))


def test_a_simulated_gang_starts_answers_and_fails() -> None:
    found = simulated(6, 3)
    assert 0 < found.barrier_s < found.start_s
    assert 0 < found.call_s < ERROR_LIMIT_S
    assert 0 < found.failure_s < ERROR_LIMIT_S
    left = [pid for pid, line in traces.processes().items() if "spawn_main" in line]
    assert not left


def test_the_address_of_a_gang_grows_with_its_nodes_alone() -> None:
    few, many, more_nodes = simulated(8, 4), simulated(64, 4), simulated(64, 8)
    assert many.address_nbytes <= few.address_nbytes + 8  # numbers of more digits
    assert more_nodes.address_nbytes > many.address_nbytes + 100


# In a process of its own: a first child that is spawned leaves a resource tracker.
FAULTY = """
from benchmarks import scale, simulated_gang
with scale.Processes() as processes:
    processes.start(simulated_gang.crowd, 1, "/no/such/folder").recv()
"""


def test_a_part_that_ends_is_named_with_its_error() -> None:
    done = commands.python(FAULTY, limit_s=LIMIT_S, PYTHONPATH=PATHS)
    assert "RuntimeError: crowd ended with code 1" in done.stderr
    assert "FileNotFoundError" in done.stderr


def test_a_plan_of_a_redistribution_visits_partners_only() -> None:
    seconds, exchanges = scale.planned(2048, "MC_MR", "VC_STAR")
    assert exchanges == 64  # the ranks of a grid row
    assert seconds < 1.0


@pytest.mark.parametrize("kind", [MatrixReader, MatrixWriter])
def test_a_row_costs_a_client_no_more_in_a_larger_gang(
    kind: type[MatrixReader | MatrixWriter],
) -> None:
    (small_s, few), (large_s, many) = scale.row_cpu_s(kind, 64), scale.row_cpu_s(kind, 4096)
    assert few == many == 1
    assert large_s < 3 * small_s  # 60 times, if it looks at all ranks


def test_growth_is_the_factor_per_doubling() -> None:
    sizes = [1.0, 2.0, 4.0, 8.0]
    assert scale.growth(sizes, sizes) == pytest.approx(2.0)
    assert scale.growth(sizes, [3.0] * 4) == pytest.approx(1.0)
    assert scale.growth(sizes, [size**2 for size in sizes]) == pytest.approx(4.0)
