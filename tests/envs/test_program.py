"""A simulator that is an unmodified MPI program, started by a rank; nothing of it is left."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from envs import GangLostError, HPCSimulatorEnv, SimulationError, StepTimeoutError
from mpi_workers.node.cleanup import SHM, segments_of
from tests.envs.solvers import assert_gone, compiled, left
from tests.envs.test_faults import pids
from tests.support import traces
from tests.support.build import needs_compiler

HERE = Path(__file__).parent
pytestmark = needs_compiler


@pytest.fixture(scope="module")
def solver(tmp_path_factory: pytest.TempPathFactory) -> str:
    target = tmp_path_factory.mktemp("solver") / "torn_mesh_solver"
    return compiled("solver.c", target)


@pytest.fixture
def make(cluster: str, solver: str) -> Iterator[Any]:
    made: list[Any] = []

    def new(hang_at: int = 0, ranks: int = 2, **options: Any) -> Any:
        mpiexec = str(Path(sys.executable).with_name("mpiexec"))
        command = json.dumps([mpiexec, "-n", str(ranks), solver, str(hang_at)])
        config = {"lib_name": "program", "lib_path": HERE / "program.py"}
        sim = {"command": command}
        made.append(HPCSimulatorEnv(config, sim=sim, cpus_per_worker=ranks, **options))
        return made[-1]

    yield new
    for env in made:
        env.close()
    assert_gone(solver)


def segments(solver: str) -> set[Path]:
    """MPICH's files of the running program."""
    solvers = [pid for pid, line in traces.processes().items() if solver in line]
    names = {SHM / name for pid in solvers for name in segments_of(pid)}
    assert any(path.exists() for path in names)
    return names


def test_its_ranks_compute_the_steps(make: Any, solver: str) -> None:
    env = make(ranks=2)
    assert env.reset(seed=3)[0].tolist() == [3.0]
    observation, reward, *_, info = env.step([0.5])
    assert (observation.tolist(), reward, info) == ([3.5], -3.5, {"size": 2.0})
    assert len(left(solver)) >= 3  # mpiexec and two ranks
    env.close()
    assert_gone(solver)


def test_it_ends_with_its_message_and_starts_again(make: Any, solver: str) -> None:
    env = make(ranks=1)
    env.reset(seed=1)
    names = segments(solver)
    with pytest.raises(SimulationError, match=r"ended with code \d+.*the mesh is torn"):
        env.step([95.0])
    assert env.reset(seed=4)[0].tolist() == [4.0]
    names |= segments(solver)
    env.close()
    assert traces.wait_until(lambda: not any(map(Path.exists, names)), 5.0, 0.1) is not None, names


@pytest.mark.parametrize("fault", ["hang", "kill"])
def test_nothing_of_it_is_left_after_a_loss(make: Any, solver: str, fault: str) -> None:
    env = make(hang_at=2 if fault == "hang" else 0, step_timeout_s=2.0)
    env.reset(seed=1)
    env.step([0.1])
    names = segments(solver)
    if fault == "hang":
        with pytest.raises(StepTimeoutError):
            env.step([0.1])
    else:
        os.kill(pids(env)[0], signal.SIGKILL)
        with pytest.raises(GangLostError):
            env.step([0.1])
    start = time.monotonic()
    assert traces.wait_until(lambda: not left(solver), 5.0, 0.1) is not None, left(solver)
    assert time.monotonic() - start < 5.0
    gone = traces.wait_until(lambda: not any(map(Path.exists, names)), 5.0, 0.1)
    assert gone is not None, names
    assert env.reset(seed=2)[0].tolist() == [2.0]
    assert env.step([1.0])[0].tolist() == [3.0]
