"""An environment whose step is a gang's: gymnasium's rules, its spaces, its errors."""

from __future__ import annotations

import copy
import gc
import pickle
import re
import time
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import ray
from gymnasium import spaces
from gymnasium.utils.env_checker import check_env

import envs
from alchemist_ray.errors import AlchemistError, BadArgumentError, LibraryError
from envs import (
    BadActionError,
    EnvConfigError,
    EnvError,
    HPCSimulatorEnv,
    HPCSimulatorVectorEnv,
    SimulationError,
)
from tests.envs.conftest import CONFIG, PENDULUM
from tests.envs.local import LocalPendulum
from tests.support import traces

Make = Callable[..., HPCSimulatorEnv]


def ranks() -> set[int]:
    """Processes of gangs that run here; what earlier tests have kept warm may end at any time."""
    return {pid for pid, line in traces.processes().items() if "mpi_workers" in line}


@pytest.mark.parametrize("workers", [1, 3])
def test_it_does_what_the_simulation_does(make: Make, workers: int) -> None:
    sim = {"length": 12, "limit": 1.1}
    env, local = make(sim, num_workers=workers), LocalPendulum(**sim)
    assert env.observation_space == local.observation_space
    assert env.action_space == local.action_space
    local.action_space.seed(3)
    for episode in range(3):
        seed = 7 if episode == 0 else None
        found, info = env.reset(seed=seed)
        np.testing.assert_array_equal(found, local.reset(seed=seed)[0])
        assert info == {}
        over = False
        while not over:
            action = local.action_space.sample()
            mine, other = env.step(action), local.step(action)
            np.testing.assert_allclose(mine[0], other[0], rtol=1e-6)
            assert mine[0].dtype == np.float32
            assert mine[1] == pytest.approx(other[1])
            assert [type(part) for part in mine] == [np.ndarray, float, bool, bool, dict]
            assert mine[2:4] == other[2:4]
            assert mine[4] == pytest.approx({**other[4], "ranks": workers})
            over = mine[2] or mine[3]


@pytest.mark.filterwarnings("error")
def test_gymnasium_has_nothing_to_say_against_it(cluster: str) -> None:
    env = gymnasium.make("alchemist/Simulator-v0", **CONFIG, num_workers=2, render_mode="rgb_array")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_env(env.unwrapped)
    env.close()
    env.close()


def test_the_same_seed_begins_the_same_and_goes_on_the_same(make: Make) -> None:
    env = make()
    first = [env.reset(seed=5)[0], env.reset()[0], env.reset()[0]]
    again = [env.reset(seed=5)[0], env.reset()[0], env.reset()[0]]
    np.testing.assert_array_equal(first, again)
    assert len(np.unique(first)) == 9
    other = make()
    assert not np.array_equal(other.reset()[0], make().reset()[0])


def test_a_choice(make: Make) -> None:
    env = make({"choices": 5})
    assert env.action_space == spaces.Discrete(5)
    env.reset(seed=0)
    for action in (3, np.int64(0), np.array([4])):
        env.step(action)
    for action in (5, -1, 1.5, [1, 2]):
        with pytest.raises(BadActionError):
            env.step(action)


def test_a_bad_action_is_refused_and_the_episode_goes_on(make: Make) -> None:
    env, local = make(num_workers=2), LocalPendulum()
    env.reset(seed=1), local.reset(seed=1)
    good = np.array([0.25])
    actions: list[tuple[Any, str]] = [
        ([np.nan], "NaN"),
        ([np.inf], "infinity"),
        ([1.0, 2.0], r"shape \(2,\); it must be \(1,\)"),
        (np.zeros(1, complex), "complex"),
        ("left", "not numeric"),
        (None, "NaN|not numeric|shape"),
    ]
    for action, words in actions:
        with pytest.raises(BadActionError, match=words):
            env.step(action)
        np.testing.assert_allclose(env.step(good)[0], local.step(good)[0], rtol=1e-6)


def test_a_simulation_that_raises_loses_its_episode_and_not_its_gang(make: Make) -> None:
    env = make({"raise_at": 3, "on_rank": 1}, num_workers=2)
    env.reset(seed=1)
    before = ranks()
    env.step([0.0]), env.step([0.0])
    with pytest.raises(SimulationError, match="flew off in step 3") as caught:
        env.step([0.0])
    assert caught.value.rank == 1
    assert "ArithmeticError" in str(caught.value)
    with pytest.raises(EnvError, match="reset"):
        env.step([0.0])
    env.reset(seed=1)
    assert env.step([0.0])[4]["ranks"] == 2
    assert ranks() <= before


def test_a_picture(make: Make) -> None:
    env = make(num_workers=2, render_mode="rgb_array")
    env.reset(seed=1)
    picture = env.render()
    assert picture is not None
    assert picture.shape == (4, 3, 3)
    assert picture.dtype == np.uint8
    assert (picture[0] == picture[3]).all()
    assert len(np.unique(picture[0], axis=0)) == 3
    assert make().render() is None
    with pytest.raises(EnvConfigError, match="'rgb_array'"):
        make(render_mode="human")


def test_spaces_are_known_without_a_gang_the_second_time(make: Make) -> None:
    make({"size": 2}).close()
    before = ranks()
    env = make({"size": 2}, num_workers=2)
    assert env.observation_space.shape == (2,)
    assert ranks() <= before
    assert "no episode" in repr(env)
    env.reset()
    assert ranks() - before
    assert "running" in repr(env)
    env.close()
    assert "closed" in repr(env)
    assert traces.wait_until(lambda: ranks() <= before, 10) is not None
    with pytest.raises(EnvError, match="closed"):
        env.reset()


def test_a_dropped_environment_leaves_no_gang(cluster: str) -> None:
    HPCSimulatorEnv(CONFIG, sim={"size": 5}).close()  # what is kept warm is there
    before = ranks()
    env = HPCSimulatorEnv(CONFIG)
    env.reset()
    assert ranks() - before
    alive = weakref.ref(env)
    del env

    def gone() -> bool:
        gc.collect()  # again and again: it does nothing while another thread collects
        return ranks() <= before

    assert traces.wait_until(gone, 15) is not None, (
        f"the ranks {sorted(ranks() - before)} live; the collector takes {gc.collect()} objects; "
        f"the environment {alive()} is held by {[str(x)[:200] for x in gc.get_referrers(alive())]}"
    )


@pytest.mark.parametrize("kind", ["make", "make_vector"])
def test_copies_of_it_are_new_ones(request: pytest.FixtureRequest, kind: str) -> None:
    env = request.getfixturevalue(kind)(num_workers=2)
    state = env.reset(seed=9)[0]
    for other in (copy.deepcopy(env), pickle.loads(pickle.dumps(env))):
        np.testing.assert_array_equal(other.reset(seed=9)[0], state)
        other.close()
    env.step(np.zeros_like(env.action_space.sample()))


def test_what_is_no_simulator_is_told_so_and_leaves_nothing(cluster: str, tmp_path: Path) -> None:
    HPCSimulatorEnv(CONFIG, sim={"size": 6}).close()
    before = ranks()
    half = tmp_path / "half.py"
    half.write_text(
        "from ali import Context, routine\n@routine()\ndef reset(ctx: Context) -> None: 'Reset.'\n"
    )
    for config, error, words in (
        ({"lib_name": "echo"}, LibraryError, "'echo' is not a simulator: it has no spec"),
        ({"lib_name": "half", "lib_path": half}, LibraryError, "no spec, step, get_state"),
        ({"lib_name": "nowhere"}, LibraryError, "no library 'nowhere'"),
        ({**CONFIG, "sim": {"depth": 2}}, BadArgumentError, r"unknown options \['depth'\]"),
        ({**CONFIG, "sim": {"agents": 2}}, EnvConfigError, "HPCSimulatorVectorEnv"),
    ):
        with pytest.raises(error, match=words):
            HPCSimulatorEnv(config)
    assert traces.wait_until(lambda: ranks() <= before, 10) is not None


def test_what_is_wrong_with_a_spec_is_told(cluster: str) -> None:
    path = Path(PENDULUM).with_name("composite.py")
    for sim, words in (
        ({"acton": {}}, "unknown keys.*acton"),
        ({"observation": {"shape": [5]}}, "get_state returned 12 numbers.* says 5"),
    ):
        with (
            pytest.raises(AlchemistError, match=words),
            HPCSimulatorEnv(lib_name="composite", lib_path=path, sim=sim) as env,
        ):
            env.reset()


def test_the_cluster_of_the_config_is_joined(cluster: str, make: Make) -> None:
    host, _, port = cluster.rpartition(":")
    env = make(hostname=host, port=int(port))
    env.reset()
    with pytest.warns(UserWarning, match=rf"in the Ray cluster at {re.escape(cluster)}"):
        other = make({"size": 4}, hostname="192.0.2.77", port=1234)
    other.reset()


def test_importing_envs_is_light() -> None:
    assert sorted(envs.__all__) == envs.__all__
    assert {getattr(envs, name) for name in envs.__all__} >= {
        HPCSimulatorEnv,
        HPCSimulatorVectorEnv,
    }
    with pytest.raises(AttributeError):
        _ = envs.nothing


def test_it_runs_in_a_ray_actor_inside_of_its_cpus(cluster: str) -> None:
    class Runner:
        def run(self) -> Any:
            with HPCSimulatorEnv(CONFIG, num_workers=2, placement="inherit") as env:
                env.reset(seed=1)
                return env.step([0.5])[4]["ranks"]

    runner = ray.remote(Runner).options(num_cpus=3).remote()
    assert ray.get(runner.run.remote(), timeout=60) == 2.0
    ray.kill(runner)
    time.sleep(0.1)


def test_large_seeds_are_episodes_of_their_own_and_options_are_not_ignored_silently(
    make: Make,
) -> None:
    env = make()
    seeds = [1, 1 + (1 << 31), 1 + (1 << 32), 1 + (1 << 70)]
    first = [env.reset(seed=seed)[0].tolist() for seed in seeds]
    assert len({str(each) for each in first}) == len(seeds)
    assert [env.reset(seed=seed)[0].tolist() for seed in seeds] == first
    assert env.reset(seed=1, options={})[0].tolist() == first[0]
    with pytest.warns(UserWarning, match=r"ignores the option 'length': .*config\['sim'\]"):
        env.reset(options={"length": 3})
