"""Environments in the APIs of Stable-Baselines3 and PettingZoo, by these packages' own checks."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from envs import BadActionError, EnvConfigError, EnvError
from tests.envs.conftest import CONFIG, closing
from tests.envs.local import LocalPendulum
from tests.envs.test_faults import pids

# --- Stable-Baselines3 ---


@pytest.fixture
def sb3(cluster: str) -> Iterator[Any]:
    pytest.importorskip(
        "stable_baselines3", reason="needs stable-baselines3: pip install 'alchemist-on-ray[sb3]'"
    )
    from envs.stable_baselines import HPCSimulatorVecEnv  # noqa: PLC0415

    yield from closing(HPCSimulatorVecEnv, CONFIG)


def test_copies_are_a_dummy_vec_env(sb3: Any) -> None:
    from stable_baselines3.common.monitor import Monitor  # noqa: PLC0415
    from stable_baselines3.common.vec_env import DummyVecEnv  # noqa: PLC0415

    sim = {"length": 5, "limit": 0.9}
    ours, theirs = (
        sb3(sim, copies=3, num_workers=2),
        DummyVecEnv([lambda: Monitor(LocalPendulum(**sim))] * 3),
    )
    ours.seed(4), theirs.seed(4)
    np.testing.assert_array_equal(ours.reset(), theirs.reset())
    ours.action_space.seed(1)
    ends = 0
    for _ in range(14):
        actions = np.stack([ours.action_space.sample() for _ in range(3)])
        mine, other = ours.step(actions), theirs.step(actions)
        for a, b in zip(mine[:3], other[:3], strict=True):
            np.testing.assert_array_equal(a, b)
            assert a.dtype == b.dtype
        for a, b in zip(mine[3], other[3], strict=True):
            assert a.keys() == b.keys()
            assert a["TimeLimit.truncated"] == b["TimeLimit.truncated"]
            if "terminal_observation" in b:
                ends += 1
                np.testing.assert_array_equal(a["terminal_observation"], b["terminal_observation"])
                assert a["episode"]["r"] == pytest.approx(b["episode"]["r"], abs=1e-5)
                assert a["episode"]["l"] == b["episode"]["l"]
    assert ends > 3
    assert ours.get_attr("num_envs") == [3] * 3
    assert ours.get_attr("num_envs", 1) == [3]
    assert ours.env_is_wrapped(type(None)) == [False] * 3
    ours.set_options({"length": 4})
    with pytest.warns(UserWarning, match="reset ignores the option 'length'"):
        ours.reset()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore::UserWarning")  # of torch and of a small n_steps
def test_ppo_learns_on_the_agents_of_copies_and_survives_a_loss(sb3: Any, tmp_path: Path) -> None:
    from stable_baselines3 import PPO  # noqa: PLC0415

    env = sb3({"agents": 2}, copies=2, num_workers=2, on_failure="truncate")
    model = PPO(
        "MlpPolicy", env, n_steps=32, batch_size=64, n_epochs=1, device="cpu",
        tensorboard_log=str(tmp_path),
    )  # fmt: skip
    before = [p.detach().clone() for p in model.policy.parameters()]
    model.learn(256)
    assert len(model.ep_info_buffer) > 0
    assert all(info["l"] > 0 for info in model.ep_info_buffer)
    os.kill(pids(env.env)[1], signal.SIGKILL)
    model.learn(256, reset_num_timesteps=False)
    assert model.num_timesteps == 512
    assert any((a != b).any() for a, b in zip(before, model.policy.parameters(), strict=True))
    assert env.reset_infos[0].get("gang_restarts") == 1
    assert list(tmp_path.glob("PPO_*/events.out.tfevents.*"))
    model.save(tmp_path / "model.zip")
    assert PPO.load(tmp_path / "model.zip", device="cpu").num_timesteps == 512


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_sac_learns_on_parts_of_an_observation(cluster: str) -> None:
    pytest.importorskip("stable_baselines3", reason="needs stable-baselines3")
    from stable_baselines3 import SAC  # noqa: PLC0415

    from envs.stable_baselines import HPCSimulatorVecEnv  # noqa: PLC0415

    box = {"shape": [5], "low": -1, "high": 1}
    parts = {"x": {"shape": [2, 3], "dtype": "float32"}, "y": {"shape": [6], "dtype": "float32"}}
    sim = {"action": box, "observation": {"dict": parts}}
    path = str(Path(__file__).with_name("composite.py"))
    env = HPCSimulatorVecEnv(lib_name="composite", lib_path=path, sim=sim, copies=2)
    model = SAC("MultiInputPolicy", env, learning_starts=20, batch_size=16, device="cpu",
                policy_kwargs={"net_arch": [16]})  # fmt: skip
    model.learn(40)
    assert model.num_timesteps == 40
    env.close()


# --- PettingZoo ---


@pytest.fixture
def parallel(cluster: str) -> Iterator[Any]:
    pytest.importorskip(
        "pettingzoo", reason="needs pettingzoo: pip install 'alchemist-on-ray[pettingzoo]'"
    )
    from envs.parallel_env import HPCSimulatorParallelEnv  # noqa: PLC0415

    yield from closing(HPCSimulatorParallelEnv, CONFIG)


@pytest.mark.filterwarnings("ignore::UserWarning")  # bounds that are not 0 to 1
def test_pettingzoo_has_nothing_to_say_against_it(parallel: Any) -> None:
    from pettingzoo.test import parallel_api_test  # noqa: PLC0415

    parallel_api_test(parallel({"agents": 3, "length": 7}, num_workers=2), num_cycles=20)


def test_agents_act_by_name(parallel: Any, make_vector: Any) -> None:
    env = parallel({"agents": 2, "length": 3}, render_mode="rgb_array")
    local = make_vector({"agents": 2, "length": 3})
    names = ["agent_0", "agent_1"]
    assert env.possible_agents == names
    first, infos = env.reset(seed=2)
    expected = local.reset(seed=2)[0]
    assert infos == {name: {} for name in names}
    for _ in range(3):
        found, rewards, terminated, truncated, infos = env.step(
            {"agent_1": [0.5], "agent_0": [-1.0]}
        )
        theirs = local.step([[-1.0], [0.5]])
        for row, name in enumerate(names):
            np.testing.assert_array_equal(found[name], theirs[0][row])
            assert rewards[name] == theirs[1][row]
            assert not terminated[name]
            assert infos[name]["energy"] == theirs[4]["energy"][row]
    assert truncated == {"agent_0": True, "agent_1": True}
    assert env.agents == []
    np.testing.assert_array_equal(env.state(), np.concatenate([found[name] for name in names]))
    assert not np.array_equal(first["agent_0"], expected[1])
    with pytest.raises(EnvError, match="reset"):
        env.step({})
    env.reset(seed=2)
    with pytest.raises(BadActionError, match="agent_1"):
        env.step({"agent_0": [0.0]})
    with pytest.raises(BadActionError, match="must be a dict"):
        env.step([[0.0], [0.0]])
    assert env.render().shape == (4, 6, 3)
    with pytest.raises(EnvConfigError, match=r"copies.\]=2: HPCSimulatorParallelEnv has one"):
        parallel({"agents": 2}, copies=2)
