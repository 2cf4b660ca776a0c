"""Observations and actions with parts, in their own dtypes: gymnasium's spaces, one and many."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.utils.env_checker import check_env
from gymnasium.vector.utils import batch_space

from ali.simulator import spec
from ali.simulator.spec import parse
from envs import BadActionError, HPCSimulatorEnv, HPCSimulatorVectorEnv, simulation
from mpi_workers.failures import Failure
from mpi_workers.local import local_gang

COMPOSITE = str(Path(__file__).with_name("composite.py"))
CONFIG = {"lib_name": "composite", "lib_path": COMPOSITE}
ACTION = ({"force": [0.5, -0.25], "gear": 3}, [1, 2])


@pytest.mark.filterwarnings("ignore:.*Box (low|high):UserWarning")
def test_a_simulator_with_dicts_tuples_and_choices(cluster: str) -> None:
    with HPCSimulatorEnv(CONFIG, num_workers=2) as env:
        assert env.observation_space == spaces.Dict(
            {
                "picture": spaces.Box(0, 255, (2, 3), np.uint8),
                "speed": spaces.Box(-10, 10, (2,), np.float64),
                "gear": spaces.Discrete(4),
                "both": spaces.Tuple([spaces.MultiDiscrete([2, 3]), spaces.Box(0, 9, ())]),
            }
        )
        force = spaces.Box(-1, 1, (2,), np.float32)
        first = spaces.Dict({"force": force, "gear": spaces.Discrete(4)})
        assert env.action_space == spaces.Tuple([first, spaces.MultiDiscrete([2, 3])])
        check_env(env, skip_render_check=True)
        env.reset(seed=0)
        found, reward, *_ = env.step(ACTION)
        assert env.observation_space.contains(found)
        assert list(found) == ["picture", "speed", "gear", "both"]
        np.testing.assert_array_equal(found["picture"], [[250, 251, 252], [253, 254, 255]])
        assert (found["picture"].dtype, found["speed"].dtype) == (np.uint8, np.float64)
        assert found["speed"].tolist() == [5.0, -2.5]
        assert (found["gear"], reward) == (3, 3.0)
        assert found["both"][0].tolist() == [1, 2]
        assert found["both"][1] == 2.0  # rank 0 of 2
        for action, words in (
            (ACTION[0], "tuple of 2"),
            (({"force": [0, 0]}, [0, 0]), "keys"),
            (({"force": [0, 0], "gear": 4}, [0, 0]), "choice from 0 to 3"),
            (({"force": [0, 0], "gear": 0}, [0, 3]), "choice from 0 to 2"),
            (({"force": [0, 0], "gear": 0}, [0.5, 0]), "choice"),
            (({"force": [0], "gear": 0}, [0, 0]), r"\(1,\); it must be \(2,\)"),
        ):
            with pytest.raises(BadActionError, match=words):
                env.step(action)
        assert env.step(ACTION)[0]["speed"].tolist() == [5.0, -2.5]


@pytest.mark.filterwarnings("ignore:.*Box (low|high):UserWarning")
def test_copies_of_it_are_batched_as_gymnasium_does(cluster: str) -> None:
    with HPCSimulatorVectorEnv(CONFIG, num_workers=2, copies=3) as env:
        assert env.observation_space == batch_space(env.single_observation_space, 3)
        env.action_space.seed(2)
        first, _ = env.reset(seed=1)
        assert env.observation_space.contains(first)
        actions = env.action_space.sample()
        found, rewards, *_ = env.step(actions)
        assert env.observation_space.contains(found)
        np.testing.assert_array_equal(found["speed"], 10 * actions[0]["force"].astype(float))
        np.testing.assert_array_equal(found["gear"], actions[0]["gear"])
        np.testing.assert_array_equal(found["both"][0], actions[1])
        np.testing.assert_array_equal(rewards, actions[0]["gear"])
        kept = found["speed"].copy()
        env.step(env.action_space.sample())
        np.testing.assert_array_equal(found["speed"], kept)  # the caller's own


def test_choices_of_several_agents(make_vector: Any) -> None:
    with make_vector({"choices": 5, "agents": 3}, copies=2) as env:
        assert env.single_action_space == spaces.Discrete(5)
        assert env.action_space == spaces.MultiDiscrete([5] * 6)
        first = env.reset(seed=1)[0].astype(float)
        chosen = np.array([0, 1, 2, 3, 4, 2])
        expected = first + 0.1 * np.roll(first, 1, axis=1) + 0.1 * (chosen - 2)[:, None]
        np.testing.assert_allclose(env.step(chosen)[0], expected, rtol=1e-5, atol=1e-6)
        with pytest.raises(BadActionError, match="choice from 0 to 4"):
            env.step(np.array([0, 1, 2, 3, 4, 5]))


def test_agents_with_parts(cluster: str) -> None:
    gears = {"dict": {"force": {"shape": [2, 1], "low": -1, "high": 1}, "gear": {"n": 3}}}
    sim = {"agents": 2, "observation": {"shape": [2, 2]}, "action": gears}
    found = local_gang.run(
        "ali.conformance:episodes", 1, "composite", COMPOSITE, json.dumps(sim), [1, 2, 1], 3, 2
    )
    assert not found["faults"]
    assert found["records"][0] == found["records"][2]
    with HPCSimulatorVectorEnv(CONFIG, sim=sim, copies=2) as env:
        env.reset(seed=1)
        forces = np.array([[0.1], [0.2], [0.3], [-5.0]])
        found = env.step({"gear": np.array([0, 1, 2, 1]), "force": forces})
        assert found[1].tolist() == [0.0, 1.0, 2.0, 1.0]
        np.testing.assert_allclose(found[0].ravel(), [0.1, 0.2, 0, 1, 0.3, -1.0, 2, 1], rtol=1e-6)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"observation": {"shape": [0]}}, "observation shape"),
        ({"observation": {"shape": [2], "low": [1, 2, 3]}}, "low=.*2 numbers"),
        ({"observation": {"dict": {"a": 3}}}, "must be an object"),
        ({"observation": {"shape": [2], "dtype": "float128"}}, "must be one of float32"),
        ({"action": {"n": 0}}, "n=0"),
        ({"action": {"dict": {}}}, "without parts"),
        ({"action": {"tuple": {"a": {"n": 2}}}}, "must be an object"),
        ({"action": {"nvec": [2, 0]}}, r"nvec=\[2, 0\].*at least 1"),
        ({"acton": {}}, "unknown keys.*acton"),
        ({"episode_length": 0}, "episode_length"),
        ({"agents": 3}, "agents"),
        ({"info": "x"}, "info"),
    ],
)
def test_a_spec_that_cannot_be_is_told_so(change: dict[str, Any], words: str) -> None:
    spec = {"observation": {"shape": [2]}, "action": {"shape": [1]}, **change}
    with pytest.raises(Failure, match=words):
        parse("changed", json.dumps(spec))


def test_both_sides_of_a_step_agree_on_the_header_of_shared_memory() -> None:
    assert simulation.HEADER_NBYTES == spec.HEADER_NBYTES
