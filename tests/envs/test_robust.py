"""Environments outside RLlib survive losses, and check numbers, placement and their process."""

from __future__ import annotations

import logging
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
from gymnasium.vector import AsyncVectorEnv, SyncVectorEnv

from envs import (
    BadActionError,
    EnvConfigError,
    EnvError,
    GangLostError,
    HPCSimulatorEnv,
    NotFiniteError,
    SimulationError,
    StepTimeoutError,
)
from envs.losses import RestartRate
from tests.envs.conftest import CONFIG
from tests.envs.local import LocalPendulum
from tests.envs.test_faults import pids, pids_of, simulations
from tests.support import commands, traces
from tests.support.traces import within

ACTION = np.array([0.1], np.float32)


# --- failures that truncate ---


def test_a_lost_gang_truncates_an_episode_and_the_next_has_a_new_gang(
    make: Any, caplog: pytest.LogCaptureFixture
) -> None:
    env = make(num_workers=2, on_failure="truncate")
    first, info = env.reset(seed=4)
    assert info == {}
    last = env.step(ACTION)[0]
    ranks = pids(env)
    os.kill(ranks[1], signal.SIGKILL)
    with caplog.at_level(logging.WARNING, "envs.losses"):
        observation, reward, terminated, truncated, info = env.step(ACTION)
        assert (reward, terminated, truncated) == (0.0, False, True)
        np.testing.assert_array_equal(observation, last)
        assert info["gang_lost"] is True
        assert "rank 1" in info["failure"]
        with pytest.raises(EnvError, match="reset"):
            env.step(ACTION)
        again, info = env.reset(seed=4)
    np.testing.assert_array_equal(again, first)
    assert info == {"gang_restarts": 1, "step_timeouts": 0, "dropped_steps": 1}
    assert "gang_restarts" in caplog.text
    assert "GangLostError" in caplog.text
    assert set(pids(env)).isdisjoint(ranks)
    assert "gang_lost" not in env.step(ACTION)[4]


def test_a_hang_and_an_exception_truncate_too(make: Any) -> None:
    env = make({"hang_at": 2}, on_failure="truncate", step_timeout_s=1.0)
    env.reset(seed=1)
    env.step(ACTION)
    info = env.step(ACTION)[4]
    assert info["gang_lost"]
    assert "step_timeout_s" in info["failure"]
    assert info["step_timeouts"] == 1
    env = make({"raise_at": 2}, on_failure="truncate")
    env.reset(seed=1)
    before = env.step(ACTION) and pids(env)
    *_, truncated, info = env.step(ACTION)
    assert truncated
    assert not info["gang_lost"]
    assert "flew off" in info["failure"]
    env.reset()
    assert pids(env) == before


def test_one_gang_of_several_is_lost_and_the_other_copies_do_not_notice(make_vector: Any) -> None:
    sim = {"length": 6}
    env = make_vector(sim, copies=3, gangs=3, on_failure="truncate")
    theirs = SyncVectorEnv([lambda: LocalPendulum(**sim)] * 3)
    np.testing.assert_array_equal(env.reset(seed=3)[0], theirs.reset(seed=3)[0])
    actions = np.full((3, 1), 0.2, np.float32)
    for _ in range(2):
        np.testing.assert_array_equal(env.step(actions)[0], theirs.step(actions)[0])
    ours = [i for sim in simulations(env) for i in pids_of(sim)]
    os.kill(ours[1], signal.SIGKILL)
    found, expected = env.step(actions), theirs.step(actions)
    assert found[3].tolist() == [False, True, False]
    assert found[4]["gang_lost"].tolist() == [False, True, False]
    assert found[4]["_gang_lost"].tolist() == [False, True, False]
    for part in (0, 2):
        np.testing.assert_array_equal(found[0][part], expected[0][part])
        assert found[1][part] == expected[1][part]
    # The lost copy begins an episode in the next step; the others go on to the end of theirs.
    found, expected = env.step(actions), theirs.step(actions)
    assert found[1][1] == 0.0
    assert not found[3][1]
    assert abs(found[0][1]).max() <= 0.5
    for _ in range(6):
        found, expected = env.step(actions), theirs.step(actions)
        np.testing.assert_array_equal(found[0][[0, 2]], expected[0][[0, 2]])
        np.testing.assert_array_equal(found[3][[0, 2]], expected[3][[0, 2]])
    ranks = [i for sim in simulations(env) for i in pids_of(sim)]
    assert [a == b for a, b in zip(ours, ranks, strict=True)] == [True, False, True]
    assert env.reset()[1]["gang_restarts"].tolist() == [1, 1, 1]


def test_a_vector_environment_with_one_gang_truncates_all_and_goes_on(make_vector: Any) -> None:
    env = make_vector({"length": 3}, copies=3, num_workers=2, on_failure="truncate")
    env.reset(seed=1)
    actions = np.zeros((3, 1))
    for _ in range(3):
        env.step(actions)
    os.kill(pids(env)[0], signal.SIGKILL)  # just when all copies begin an episode
    _, rewards, terminated, truncated, _ = env.step(actions)
    assert not np.concatenate([rewards, terminated, truncated]).any()
    os.kill(pids(env)[1], signal.SIGKILL)
    assert env.step(actions)[3].all()
    assert not env.step(actions)[3].any()
    assert env.step(actions)[1].all()


def test_episodes_that_a_partial_reset_finds_lost_are_truncated(make_vector: Any) -> None:
    """A reset of one copy finds the gang dead, and with it the episodes of the others."""
    env = make_vector(copies=3, num_workers=2, on_failure="truncate")
    env.reset(seed=1)
    actions = np.full((3, 1), 0.1)
    last = env.step(actions)[0]
    os.kill(pids(env)[1], signal.SIGKILL)
    first = env.reset(seed=[None, 7, None], options={"reset_mask": np.arange(3) == 1})[0]
    np.testing.assert_array_equal(first[[0, 2]], last[[0, 2]])
    found = env.step(actions)
    assert found[3].tolist() == [True, False, True]
    assert found[4]["gang_lost"].tolist() == [True, False, True]
    assert found[1][[0, 2]].tolist() == [0.0, 0.0]
    np.testing.assert_array_equal(found[0][[0, 2]], last[[0, 2]])
    local = LocalPendulum()
    local.reset(seed=7)
    np.testing.assert_array_equal(found[0][1], local.step(actions[1])[0])
    found = env.step(actions)  # these begin an episode
    assert not found[3].any()
    assert abs(found[0][[0, 2]]).max() <= 0.5
    np.testing.assert_array_equal(found[0][1], local.step(actions[1])[0])
    assert not env.step(actions)[3].any()


def test_a_gang_that_is_lost_between_steps_must_be_reset(make_vector: Any) -> None:
    env = make_vector(copies=2, gangs=2, on_failure="truncate")
    env.reset(seed=1)
    os.kill(pids_of(simulations(env)[1])[0], signal.SIGKILL)
    with pytest.raises(GangLostError):
        env.save_state(1)
    with pytest.raises(EnvError, match="reset"):  # the copy on the other gang has an episode
        env.step(np.zeros((2, 1)))
    env.reset(options={"reset_mask": np.arange(2) == 1})
    assert not env.step(np.zeros((2, 1)))[3].any()


def test_raising_is_the_default_and_gangs_are_for_vector_environments(make_vector: Any) -> None:
    env = make_vector(copies=2, gangs=2)
    env.reset(seed=1)
    os.kill(pids_of(simulations(env)[1])[0], signal.SIGKILL)
    with pytest.raises(GangLostError):
        [env.step(np.zeros((2, 1))) for _ in range(9)]
    with pytest.raises(EnvError, match="reset"):
        env.step(np.zeros((2, 1)))
    env.reset(seed=1)
    env.step(np.zeros((2, 1)))
    with pytest.raises(EnvConfigError, match=r"must be 1 to 2 \(the copies\); got 3"):
        make_vector(copies=2, gangs=3)
    with pytest.raises(EnvConfigError, match=r"'gangs'.*HPCSimulatorVectorEnv"):
        HPCSimulatorEnv(CONFIG, gangs=2)


def test_gangs_step_at_the_same_time(make_vector: Any) -> None:
    env = make_vector({"hang_at": 2}, copies=4, gangs=4, step_timeout_s=1.5, max_restarts=1)
    env.reset(seed=0)
    env.step(np.zeros((4, 1)))
    with within(4 * 1.5), pytest.raises(StepTimeoutError):
        env.step(np.zeros((4, 1)))


def test_a_restart_limit_is_a_rate() -> None:
    rate = RestartRate(window_s=0.2)
    rate.add()
    rate.add()
    assert rate.recent() == 2
    time.sleep(0.25)
    assert rate.recent() == 0


# --- numbers ---


@pytest.mark.parametrize("reward", [False, True])
def test_numbers_that_are_not_finite_end_the_episode_with_a_named_error(
    make: Any, reward: bool
) -> None:
    sim = {"nan_push": 1.0, "nan_reward": reward}
    env = make(sim, num_workers=2)
    env.reset(seed=1)
    env.step(ACTION)
    before = pids(env)
    with pytest.raises(NotFiniteError, match="check_finite") as caught:
        env.step([1.0])
    assert isinstance(caught.value, SimulationError)
    assert ("reward" in str(caught.value)) == reward
    assert "in step 2 of its episode" in str(caught.value)
    with pytest.raises(EnvError, match="reset"):
        env.step(ACTION)
    env.reset(seed=1)
    env.step(ACTION)
    assert pids(env) == before
    unchecked = make(sim, check_finite=False)
    unchecked.reset(seed=1)
    observation, score, *_ = unchecked.step([1.0])
    assert np.isnan(observation).all() != reward
    assert np.isinf(score) == reward


def test_one_copy_that_is_not_finite_ends_one_episode(make_vector: Any) -> None:
    options = {"on_failure": "truncate", "failure_reward": -7.0}
    env = make_vector({"nan_push": 1.0}, copies=3, num_workers=2, **options)
    first = env.reset(seed=1)[0]
    found = env.step(np.array([[0.0], [1.0], [0.0]]))
    assert found[3].tolist() == [False, True, False]
    assert found[4]["gang_lost"].tolist() == [False] * 3
    assert "copy 1" in found[4]["failure"][1]
    np.testing.assert_array_equal(found[0][1], first[1])
    assert found[1][1] == -7.0
    assert found[4]["dropped_steps"][1] == 1
    assert found[4]["_energy"].tolist() == [True, False, True]
    assert not env.step(np.zeros((3, 1)))[3].any()


def test_a_step_that_is_not_finite_is_counted_logged_and_punished(
    make: Any, caplog: pytest.LogCaptureFixture
) -> None:
    env = make({"nan_push": 1.0}, on_failure="truncate", failure_reward=-7.0)
    env.reset(seed=1)
    _, reward, _, truncated, info = env.step([1.0])
    assert (reward, truncated, info["dropped_steps"]) == (-7.0, True, 1)
    assert (
        "dropped_steps +1: simulator 'pendulum': observation in step 1 of its episode is not finite"
        in caplog.text
    )


def test_observations_have_their_own_dtype(make: Any, make_vector: Any) -> None:
    sim = {"dtype": "uint8", "nan_push": 1.0}
    env = make(sim)
    assert env.observation_space.dtype == np.uint8
    assert (env.observation_space.low.min(), env.observation_space.high.max()) == (0, 255)
    observation = env.reset(seed=1)[0]
    assert observation.dtype == np.uint8
    assert env.observation_space.contains(observation)
    assert 0 < observation.min() < observation.max() < 255
    with pytest.raises(NotFiniteError, match="does not fit uint8"):  # it is 300
        env.step([1.0])
    many = make_vector(sim, copies=2)
    assert many.reset(seed=1)[0].dtype == np.uint8


@pytest.mark.parametrize("workers", [1, 2])
def test_large_observations_arrive_and_stay(make: Any, make_vector: Any, workers: int) -> None:
    size = 200_000
    env, local = make({"size": size}, num_workers=workers), LocalPendulum(size=size)
    np.testing.assert_array_equal(env.reset(seed=1)[0], local.reset(seed=1)[0])
    found = [env.step(ACTION)[0] for _ in range(3)]  # each has memory of its own
    for observation in found:
        np.testing.assert_allclose(observation, local.step(ACTION)[0], rtol=1e-6)
    many = make_vector({"size": size}, copies=3, num_workers=workers)
    many.reset(seed=1), local.reset(seed=2)
    observation = many.step(np.tile(ACTION, (3, 1)))[0][1]
    np.testing.assert_allclose(observation, local.step(ACTION)[0], rtol=1e-6)


def test_actions_out_of_bounds_are_clipped_or_refused(make: Any, make_vector: Any) -> None:
    clipped, local = make(), LocalPendulum()
    clipped.reset(seed=1), local.reset(seed=1)
    np.testing.assert_array_equal(clipped.step([7.0])[0], local.step([1.0])[0])
    refusing = make(out_of_bounds="refuse")
    refusing.reset(seed=1), local.reset(seed=1)
    with pytest.raises(BadActionError, match="bounds"):
        refusing.step([-1.001])
    np.testing.assert_array_equal(refusing.step([-1.0])[0], local.step([-1.0])[0])
    many = make_vector({"agents": 2}, copies=2, out_of_bounds="refuse")
    many.reset(seed=1)
    with pytest.raises(BadActionError, match="bounds"):
        many.step([[0.0], [0.0], [0.0], [2.0]])


# --- placement, clusters, processes ---


def test_automatic_placement_follows_the_process(cluster: str) -> None:
    def reservations() -> int:
        groups = ray.util.placement_group_table().values()
        return sum(group["state"] == "CREATED" for group in groups)

    def made_by_a_gang() -> int:
        """Reservations of a gang of two."""
        before = reservations()
        with HPCSimulatorEnv(CONFIG, num_workers=2, placement="auto") as env:
            env.reset(seed=1)
            assert env.step([0.5])[4]["ranks"] == 2.0
            return reservations() - before

    assert made_by_a_gang() == 1  # a driver
    task = ray.remote(made_by_a_gang)
    assert ray.get(task.options(num_cpus=3).remote(), timeout=60) == 0
    assert ray.get(task.options(num_cpus=2).remote(), timeout=60) == 1


def test_environments_in_old_frames_give_their_cpus_back(cluster: str) -> None:
    def failed() -> None:
        env: Any = HPCSimulatorEnv(CONFIG, num_workers=6)
        env.reset()
        env.itself = env  # only the garbage collector finds it
        raise KeyError("a mistake in a notebook")

    with pytest.raises(KeyError):
        failed()
    start = traces.clock()
    with HPCSimulatorEnv(CONFIG, num_workers=6) as env:
        env.reset()
        assert traces.clock() - start < 20


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # fork with threads
@pytest.mark.filterwarnings("ignore::UserWarning")  # gymnasium logs the error so, too
def test_forked_environments_say_how_to_start_them(cluster: str) -> None:
    makers = [lambda: HPCSimulatorEnv(CONFIG)] * 2
    start = traces.clock()
    forked = AsyncVectorEnv(makers)
    try:
        with pytest.raises(EnvError, match='context="spawn"'):
            forked.reset(seed=1)
        assert traces.clock() - start < 30
    finally:
        forked.close(terminate=True)


def test_spawned_environments_work(cluster: str, tmp_path: Path) -> None:
    program = tmp_path / "spawned.py"
    program.write_text(
        "from gymnasium.vector import AsyncVectorEnv\n"
        "from envs import HPCSimulatorEnv\n"
        f"def make(): return HPCSimulatorEnv({CONFIG!r})\n"
        "if __name__ == '__main__':\n"
        "    env = AsyncVectorEnv([make] * 2, context='spawn')\n"
        "    print(env.reset(seed=1)[0].shape, env.step([[0.1], [0.2]])[1].shape)\n"
        "    env.close()\n"
    )
    done = commands.run(sys.executable, program, RAY_ADDRESS=cluster)
    assert done.stdout.strip() == "(2, 3) (2,)", done.stderr[-3000:]


def test_a_missing_cluster_is_a_warning(cluster: str) -> None:
    program = (
        "from envs import HPCSimulatorEnv\n"
        f"env = HPCSimulatorEnv({CONFIG!r}, hostname='0.0.0.0', port=9)\n"
        "env.reset(); env.close()\n"
    )
    done = commands.python(program, RAY_ADDRESS=cluster)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "no Ray cluster at 127.0.0.1:9" in done.stderr
