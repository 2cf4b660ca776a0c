"""Many sub-environments on one gang do what as many in this process do, step by step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from envs import BadActionError, EnvConfigError, HPCSimulatorVectorEnv
from tests.envs.conftest import PENDULUM
from tests.envs.local import LocalPendulum

Make = Callable[..., HPCSimulatorVectorEnv]


def same(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    assert ours.keys() == theirs.keys()
    for key, value in theirs.items():
        if isinstance(value, dict):
            same(ours[key], value)
            continue
        assert ours[key].dtype == value.dtype
        for mine, other in zip(ours[key], value, strict=True):
            np.testing.assert_array_equal(mine, other)


@pytest.mark.parametrize("mode", [AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP])
@pytest.mark.parametrize(("copies", "workers"), [(5, 2), (3, 1), (3, 3)])
def test_copies_are_a_sync_vector_env(
    make_vector: Make, copies: int, workers: int, mode: AutoresetMode
) -> None:
    # Some episodes are over because of their length, some because the mass swings too far.
    sim = {"length": 9, "limit": 0.9}
    ours = make_vector(sim, copies=copies, num_workers=workers, autoreset_mode=mode)
    theirs = SyncVectorEnv([lambda: LocalPendulum(**sim)] * copies, autoreset_mode=mode)
    assert ours.num_envs == copies
    assert ours.metadata["autoreset_mode"] is mode
    for name in ("single_observation_space", "single_action_space", "observation_space"):
        assert getattr(ours, name) == getattr(theirs, name)
    theirs.action_space.seed(5)
    found, info = ours.reset(seed=3)
    expected, _ = theirs.reset(seed=3)
    np.testing.assert_array_equal(found, expected)
    assert found.dtype == expected.dtype
    assert info == {}
    ends = np.zeros(2, int)
    for _ in range(40):
        actions = theirs.action_space.sample()
        mine, other = ours.step(actions), theirs.step(actions)
        for a, b in zip(mine[:4], other[:4], strict=True):
            np.testing.assert_array_equal(a, b)
            assert a.dtype == b.dtype
        same(mine[4], other[4])
        ends += mine[2].any(), mine[3].any()
    assert ends.all(), "both kinds of end were to be seen"
    for seed in (None, 11, [7, None, 8, 1, 2][:copies]):
        np.testing.assert_array_equal(ours.reset(seed=seed)[0], theirs.reset(seed=seed)[0])


def test_a_mask_begins_some(make_vector: Make) -> None:
    sim = {"length": 6}
    ours = make_vector(sim, copies=3, num_workers=2)
    theirs = SyncVectorEnv([lambda: LocalPendulum(**sim)] * 3)
    for env in (ours, theirs):
        env.reset(seed=0)
    actions = np.full((3, 1), 0.5, np.float32)
    for turn in range(16):
        if turn == 4:
            mask = np.array([True, False, True])
            a = ours.reset(seed=[4, None, None], options={"reset_mask": mask})
            b = theirs.reset(seed=[4, None, None], options={"reset_mask": mask.copy()})
            np.testing.assert_array_equal(a[0], b[0])
        for a, b in zip(ours.step(actions)[:4], theirs.step(actions)[:4], strict=True):
            np.testing.assert_array_equal(a, b)
    with pytest.raises(ValueError, match="3 bools"):
        ours.reset(options={"reset_mask": np.array([True])})
    with pytest.raises(ValueError, match="2 seeds for 3"):
        ours.reset(seed=[1, 2])


def test_ranks_share_a_copy_where_there_are_more_of_them(make_vector: Make) -> None:
    env = make_vector(copies=2, num_workers=3)
    env.reset(seed=1)
    _, _, _, _, info = env.step(np.zeros((2, 1)))
    assert info["ranks"].tolist() == [2.0, 1.0]


def test_agents_of_one_simulation(make_vector: Make) -> None:
    env = make_vector({"agents": 4, "length": 3}, num_workers=2, agents=4)
    assert env.num_envs == 4
    assert env.single_observation_space.shape == (3,)
    first, _ = env.reset(seed=2)
    assert first.shape == (4, 3)
    assert len(np.unique(first)) == 12
    pushed = np.array([[0.0], [1.0], [0.0], [-1.0]])
    second, rewards, _, truncated, info = env.step(pushed)
    x = first.astype(float)
    np.testing.assert_allclose(second, x + 0.1 * np.roll(x, 1, axis=1) + 0.1 * pushed, rtol=1e-6)
    np.testing.assert_allclose(rewards, -(second[:, 0].astype(float) ** 2), rtol=1e-6)
    assert info["ranks"].tolist() == [2.0] * 4
    assert not truncated.any()
    env.step(pushed)
    assert env.step(pushed)[3].all()
    _, rewards, terminated, truncated, info = env.step(pushed)  # starts again
    assert not rewards.any()
    assert not (terminated | truncated).any()
    assert info == {}


def test_several_simulations_of_several_agents(make_vector: Make) -> None:
    env = make_vector({"agents": 3}, num_envs=6, num_workers=2)
    assert env.num_envs == 6
    one = make_vector({"agents": 3}, num_workers=1)
    both = env.reset(seed=8)[0]
    np.testing.assert_array_equal(both[:3], one.reset(seed=8)[0])
    np.testing.assert_array_equal(both[3:], one.reset(seed=9)[0])
    actions = np.linspace(-1, 1, 6)[:, None]
    np.testing.assert_array_equal(env.step(actions)[0][3:], one.step(actions[3:])[0])
    with pytest.raises(ValueError, match="equal for all agents"):
        env.reset(options={"reset_mask": np.arange(6) == 1})
    with pytest.raises(BadActionError, match=r"\(5, 1\); it must be \(6, 1\)"):
        env.step(actions[:5])
    with pytest.raises(EnvConfigError, match=r"num_envs must be .*; got 7"):
        make_vector({"agents": 3}, num_envs=7)
    with pytest.raises(EnvConfigError, match="must be 3"):
        make_vector({"agents": 3}, agents=2)


def test_a_bad_action_is_refused_before_any_copy_has_moved(make_vector: Make) -> None:
    env = make_vector(copies=3, num_workers=2)
    theirs = SyncVectorEnv([LocalPendulum] * 3)
    for one in (env, theirs):
        one.reset(seed=4)
    bad = np.zeros((3, 1))
    bad[2] = np.nan
    with pytest.raises(BadActionError, match="NaN"):
        env.step(bad)
    good = np.ones((3, 1))
    np.testing.assert_array_equal(env.step(good)[0], theirs.step(good)[0])


def test_pictures_of_all(make_vector: Make) -> None:
    env = make_vector(copies=3, num_workers=2, render_mode="rgb_array")
    env.reset(seed=4)
    shown = env.render()
    assert shown is not None
    assert [picture.shape for picture in shown] == [(4, 3, 3)] * 3
    assert not np.array_equal(shown[0], shown[2])


def test_gymnasium_makes_one(cluster: str) -> None:
    env = gymnasium.make_vec(
        "alchemist/Simulator-v0", num_envs=3, lib_name="pendulum", lib_path=PENDULUM, num_workers=2
    )
    assert isinstance(env, HPCSimulatorVectorEnv)
    assert env.reset(seed=0)[0].shape == (3, 3)
    env.close()
    env.close()
