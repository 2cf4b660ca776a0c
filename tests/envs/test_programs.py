"""Simulators that are MPI programs, whose processes are the ranks or children of one rank."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("gymnasium", reason="needs gymnasium: pip install 'alchemist-on-ray[envs]'")

import ali
from ali import scaffold
from envs import (
    GangLostError,
    HPCSimulatorEnv,
    HPCSimulatorVectorEnv,
    SimulationError,
    StepTimeoutError,
)
from mpi_workers.node.cleanup import SHM, segments_of
from tests.envs.test_faults import pids
from tests.support import traces
from tests.support.build import needs_compiler

pytestmark = needs_compiler
SPEC = {
    "observation": {"shape": [8], "dtype": "float64"},
    "action": {"shape": [1], "low": -100, "high": 100},
    "info": ["size"],
}


HERE = Path(__file__).parent


def compiled(source: str, target: Path) -> str:
    """Compile a program of this folder. Its name must be one that no other process has."""
    command = [scaffold.mpi_compiler("mpicc"), "-o", target, HERE / source]
    subprocess.run(list(map(str, command)), check=True, timeout=100)
    return str(target)


@pytest.fixture(scope="module")
def solver(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A program whose processes are the ranks."""
    return compiled("stepped.c", tmp_path_factory.mktemp("solver") / "stepped_rod_solver")


@pytest.fixture(scope="module")
def line_solver(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A program that reads lines, and that a rank starts."""
    return compiled("solver.c", tmp_path_factory.mktemp("solver") / "torn_mesh_solver")


@pytest.fixture
def make(cluster: str, solver: str) -> Iterator[Any]:
    with contextlib.ExitStack() as stack:

        def new(*words: str, kind: Any = HPCSimulatorEnv, **options: Any) -> Any:
            sim = {"argv": [solver, *words], "spec": SPEC, **options.pop("sim", {})}
            return stack.enter_context(kind(lib_name="program", sim=sim, **options))

        yield new
    assert_gone(solver)


@pytest.fixture
def make_line(cluster: str, line_solver: str) -> Iterator[Any]:
    with contextlib.ExitStack() as stack:

        def new(ranks: int = 2, **options: Any) -> Any:
            mpiexec = str(Path(sys.executable).with_name("mpiexec"))
            sim = {"command": json.dumps([mpiexec, "-n", str(ranks), line_solver])}
            config = {"lib_name": "program", "lib_path": HERE / "program.py"}
            env = HPCSimulatorEnv(config, sim=sim, cpus_per_worker=ranks, **options)
            return stack.enter_context(env)

        yield new
    assert_gone(line_solver)


def assert_gone(solver: str, limit_s: float = 10.0) -> None:
    """None of its processes is left, or soon will be."""
    assert traces.wait_until(lambda: not started(solver), limit_s, 0.1) is not None, started(solver)


def started(solver: str) -> dict[int, str]:
    """The program's processes: pid and command line."""
    return {pid: line for pid, line in traces.processes().items() if solver in line}


def segments(solver: str) -> set[Path]:
    """MPICH's files of the running program."""
    names = {SHM / name for pid in started(solver) for name in segments_of(pid)}
    assert any(path.exists() for path in names)
    return names


def assert_removed(paths: set[Path]) -> None:
    gone = traces.wait_until(lambda: not any(map(Path.exists, paths)), 5.0, 0.1)
    assert gone is not None, paths


def moved(heat: np.ndarray[Any, Any], action: float) -> np.ndarray[Any, Any]:
    """A step, computed in this process."""
    wide = np.concatenate([[action], heat, [0.0]])
    return heat + 0.25 * (wide[:-2] - 2 * heat + wide[2:])


def steps(env: Any, count: int) -> None:
    for _ in range(count):
        env.step([0.1])


@pytest.mark.parametrize(("ranks", "words"), [(1, ()), (3, ()), (3, ("binary",))])
def test_its_processes_are_the_ranks(
    make: Any, solver: str, ranks: int, words: tuple[str, ...]
) -> None:
    env = make(*words, num_workers=ranks, sim={"binary": bool(words)})
    heat = np.arange(8.0) + 3
    assert np.array_equal(env.reset(seed=3)[0], heat)
    assert len(started(solver)) == ranks
    for step in range(5):
        heat = moved(heat, 0.5)
        observation, reward, terminated, _, info = env.step([0.5])
        assert np.array_equal(observation, heat)
        assert (reward, terminated, info["size"]) == (-heat[0], step == 4, ranks)
    before = started(solver)
    assert np.array_equal(env.reset(seed=4)[0], np.arange(8.0) + 4)
    assert started(solver) == before
    env.close()
    assert_gone(solver)


def test_several_steps_a_second_leave_no_rank_behind(make: Any) -> None:
    env = make(num_workers=3)
    for seed in range(3):
        env.reset(seed=seed)
        steps(env, 300)


def test_copies_each_have_a_program(make: Any, solver: str) -> None:
    env = make(kind=HPCSimulatorVectorEnv, num_workers=2, copies=2)
    observations = env.reset(seed=[1, 5])[0]
    assert observations[:, 0].tolist() == [1.0, 5.0]
    assert env.step(np.zeros((2, 1)))[4]["size"].tolist() == [1.0, 1.0]
    assert len(started(solver)) == 2


def test_a_program_for_each_episode_ends_by_itself(make: Any, solver: str, tmp_path: Path) -> None:
    ended = tmp_path / "ended"
    sim = {"per_episode": True, "environment": {"ENDED": str(ended)}, "folder": str(tmp_path)}
    env = make(num_workers=2, sim=sim)
    env.reset(seed=1)
    first = started(solver)
    env.step([0.1])
    assert not ended.exists()
    assert env.reset(seed=2)[0][0] == 2.0
    second = started(solver)
    assert ended.exists()  # after its loop, and before MPI_Finalize
    assert len(second) == 2
    assert not first.keys() & second.keys()


@pytest.mark.parametrize(
    ("action", "message"),
    [
        (92.0, "exited with code 3 on rank 1.*the mesh is torn"),
        (93.0, "ended with code 0"),
        (94.0, "MPI_Abort.*code 5"),
        (95.0, r"answered 'step' with 'banner'.*8 numbers for the observation"),
    ],
)
def test_a_failure_ends_it_on_all_ranks_and_a_reset_starts_it_again(
    make: Any, solver: str, action: float, message: str
) -> None:
    env = make(num_workers=2)
    env.reset(seed=1)
    ranks = pids(env)
    with pytest.raises(SimulationError, match=f"(?s){message}"):
        env.step([action])
    assert env.reset(seed=4)[0][0] == 4.0
    assert (pids(env), len(started(solver))) == (ranks, 2)  # in the same gang


@pytest.mark.parametrize(
    ("kind", "fault"),
    [
        *[("the ranks", fault) for fault in ("hang", "kill a rank", "kill a process")],
        *[("of a rank", fault) for fault in ("hang", "kill a rank")],
    ],
)
def test_nothing_of_it_is_left_after_a_loss(
    request: pytest.FixtureRequest, kind: str, fault: str
) -> None:
    if kind == "the ranks":
        solver = request.getfixturevalue("solver")
        env = request.getfixturevalue("make")(num_workers=2, step_timeout_s=2.0)
    else:
        solver = request.getfixturevalue("line_solver")
        env = request.getfixturevalue("make_line")(step_timeout_s=2.0)
    env.reset(seed=1)
    env.step([0.1])
    names = segments(solver)
    if fault == "hang":
        with pytest.raises(StepTimeoutError):
            env.step([91.0])
    elif fault == "kill a rank":
        os.kill(pids(env)[-1], signal.SIGKILL)
        with pytest.raises(GangLostError):
            steps(env, 10_000)  # rank 0 and the program do not wait for the last rank
    else:
        os.kill(max(started(solver)), signal.SIGKILL)
        with pytest.raises(SimulationError, match="SIGKILL"):
            env.step([0.1])
    assert_gone(solver, 5.0)
    assert_removed(names)
    heat = env.reset(seed=2)[0]
    assert heat[0] == 2.0
    after = moved(heat, 1.0) if kind == "the ranks" else [3.0]
    assert np.array_equal(env.step([1.0])[0], after)


def test_a_program_that_is_run_once_for_each_step(
    session: Any, solver: str, tmp_path: Path
) -> None:
    ended = tmp_path / "ended"

    def run(comm: Any) -> None:
        from ali.executables.stepped_program import SteppedProgram  # noqa: PLC0415 - imports MPI

        program = SteppedProgram(ali.context(), [solver], tmp_path, {"ENDED": str(ended)})
        program.wait()

    session.run(run)
    assert ended.exists()
    assert not started(solver)


def test_a_line_that_is_longer_than_both_pipes(session: Any) -> None:
    """The program answers while it reads: neither side may wait for the other."""

    def echoed(comm: Any) -> list[int]:
        from ali.executables.stepped_program import SteppedProgram  # noqa: PLC0415

        program = SteppedProgram(ali.context(), ["cat"])
        lengths = [len(program.ask("x" * (4 << 20))) for _ in range(2)]
        program.close()
        return lengths

    assert session.run(echoed, timeout_s=60) == [4 << 20, 4 << 20]


def test_wrong_options_are_refused(make: Any) -> None:
    with pytest.raises(Exception, match="needs 'argv', a list of strings"):
        make(sim={"argv": "solver"})
    with pytest.raises(Exception, match=r"/nowhere/solver.*does not exist there"):
        make(sim={"argv": ["/nowhere/solver"]}).reset()


# --- a program that a rank starts and asks by lines ---


def test_ranks_of_a_program_that_a_rank_starts_compute_the_steps(
    make_line: Any, line_solver: str
) -> None:
    env = make_line(ranks=2)
    assert env.reset(seed=3)[0].tolist() == [3.0]
    observation, reward, *_, info = env.step([0.5])
    assert (observation.tolist(), reward, info) == ([3.5], -3.5, {"size": 2.0})
    assert len(started(line_solver)) >= 3  # mpiexec and two ranks
    env.close()
    assert_gone(line_solver)


def test_such_a_program_ends_with_its_message_and_starts_again(
    make_line: Any, line_solver: str
) -> None:
    env = make_line(ranks=1)
    env.reset(seed=1)
    names = segments(line_solver)
    with pytest.raises(SimulationError, match=r"ended with code \d+.*the mesh is torn"):
        env.step([95.0])
    assert env.reset(seed=4)[0].tolist() == [4.0]
    names |= segments(line_solver)
    env.close()
    assert_removed(names)
