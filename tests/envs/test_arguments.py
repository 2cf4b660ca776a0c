"""Wrong arguments of environments are refused by name, and the environment goes on."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from alchemist_ray import AlchemistSession
from alchemist_ray.errors import BadArgumentError, ResourceError
from envs import EnvConfigError, EnvError, HPCSimulatorEnv, HPCSimulatorVectorEnv
from tests.envs.conftest import CONFIG

NAN = math.nan
KEYS: list[tuple[dict[str, Any], str]] = [
    ({"worker": 2}, r"key 'worker' \(did you mean 'num_workers'\?\)\. Keys: "),
    ({"lib_name": None}, "needs 'lib_name'"),
    ({"num_workers": 0}, r"\['num_workers'\]=0: .* at least 1"),
    ({"num_workers": 1.5}, "num_workers"),
    ({"num_workers": None}, "num_workers"),
    ({"num_workers": math.inf}, "num_workers'.=inf: it must be a whole number"),
    ({"cpus_per_worker": 0}, "cpus_per_worker'.=0: it must be a finite number greater than 0"),
    ({"cpus_per_worker": -1}, "cpus_per_worker'.=-1: "),
    ({"cpus_per_worker": "x"}, "cpus_per_worker'.='x': "),
    ({"cpus_per_worker": NAN}, "cpus_per_worker'.=nan: "),
    ({"cpus_per_worker": True}, "cpus_per_worker'.=True: "),
    ({"failure_reward": NAN}, "failure_reward'.=nan: it must be a finite number"),
    ({"failure_reward": "x"}, "failure_reward'.='x': "),
    ({"lib_path": ""}, "lib_path'.='': it must be a path"),
    ({"lib_path": 5}, "lib_path'.=5: it must be a path"),
    ({"hostname": 5, "port": 6379}, "hostname'.=5: it must be a host name"),
    ({"hostname": "h", "port": 70_000}, "port'.=70000: it must be 1 to 65535"),
    ({"hostname": "", "port": 6379}, "hostname'.='': it must be a host name"),
    ({"hostname": "h"}, "both 'hostname' and 'port'"),
    ({"out_of_bounds": np.zeros(2)}, "out_of_bounds'. must be one of"),
    ({"out_of_bounds": 1}, "out_of_bounds'. must be one of"),
    ({"on_failure": "ignore"}, "on_failure'. must be one of"),
    ({"check_finite": "yes"}, "check_finite'.='yes': it must be True or False"),
    ({"step_timeout_s": -1}, "step_timeout_s"),
    ({"max_restarts": -1}, "max_restarts"),
    ({"sim": [1]}, "'sim'"),
    ({"sim": {"a": {1, 2}}}, "JSON"),
    ({"copies": 3}, "'copies'.*HPCSimulatorVectorEnv"),
    ({"placement": "here"}, r"config\['placement'\] must be one of 'own'.*; got 'here'"),
    ({"placement": {"labels": {"zone": 5}}}, "label 'zone': 5 must consist of two strings"),
    ({"placement": {"resources": {"memory": "x"}}}, "resource 'memory'='x': it must be a finite"),
    ({"placement": {"resources": {"CPU": 2}}}, "by cpus_per_worker"),
]


@pytest.mark.parametrize(("key", "said"), KEYS)
def test_keys_of_a_config(cluster: str, key: dict[str, Any], said: str) -> None:
    before = {gang.name for gang in AlchemistSession.list()}
    with pytest.raises(EnvConfigError, match=said):
        HPCSimulatorEnv({**CONFIG, **key})
    assert {gang.name for gang in AlchemistSession.list()} == before
    none: Any = []
    with pytest.raises(EnvConfigError, match="it must be a dict"):
        HPCSimulatorEnv(none)


@pytest.mark.parametrize("num_envs", ["x", 0, -1, 1.5, NAN, True])
def test_a_number_of_sub_environments(cluster: str, num_envs: Any) -> None:
    with pytest.raises(EnvConfigError, match=r"num_envs'\]=.*: it must be a whole number"):
        HPCSimulatorVectorEnv(CONFIG, num_envs=num_envs)
    with pytest.raises(EnvConfigError, match="config is a int"):
        HPCSimulatorVectorEnv(5)


def test_more_copies_than_memory(cluster: str) -> None:
    with pytest.raises(ResourceError, match=r"copies of simulator 'pendulum' do not fit"):
        HPCSimulatorVectorEnv(CONFIG, copies=10**12, sim={"length": 21})  # its spec is not known
    HPCSimulatorVectorEnv(CONFIG).close()
    with pytest.raises(ResourceError, match=r"sub-environments do not fit .* Use fewer copies"):
        HPCSimulatorVectorEnv(CONFIG, copies=10**12)


def test_actions_and_states_of_one_environment(make: Any) -> None:
    env = make({"length": 22})  # its spec is not known, so the gang is there before the first reset
    for call in (env.save_state, env.field, lambda: env.load_state(np.zeros((1, 3)))):
        with pytest.raises(EnvError, match=r"there is no episode; call reset\(\) first"):
            call()
    env.reset(seed=1)
    for state in (None, "x", [None]):
        with pytest.raises(EnvError, match=r"load_state takes an array of numbers.* not a"):
            env.load_state(state)
    with pytest.raises(BadArgumentError, match="a state of shape"):
        env.load_state(np.zeros((7, 1)))
    assert math.isfinite(env.step([0.1])[1])
    env.close()
    before = set(threading.enumerate())
    with pytest.raises(EnvError, match="closed"):
        env.step_async([0.1])
    assert set(threading.enumerate()) <= before  # threads of other tests may end


def test_seeds_and_options_of_a_vector_environment(make_vector: Any) -> None:
    envs = make_vector(copies=2)
    for seed in ("x", NAN):
        with pytest.raises(ValueError, match=r"seed=.*: it must be an integer, or one per"):
            envs.reset(seed=seed)
    with pytest.raises(ValueError, match="options=5: it must be a dict"):
        envs.reset(options=5)
    with pytest.warns(UserWarning, match=r"ignores the option 'length': .*config\['sim'\]"):
        envs.reset(options={"length": 3})
    expected = envs.reset(seed=[4, 5])[0]
    np.testing.assert_array_equal(envs.reset(seed=np.arange(4, 6))[0], expected)
    for copy in (1.0, "1", None, 2, -1):
        with pytest.raises(EnvError, match=rf"there is no copy {copy!r}: copies are numbered 0 to"):
            envs.save_state(copy)
    assert envs.step(np.zeros((2, 1)))[1].all()


@pytest.mark.parametrize("gangs", [1, 2])
def test_a_state_that_the_simulator_refuses_does_not_end_the_episodes(
    make_vector: Any, gangs: int
) -> None:
    envs, twin = make_vector(copies=2, gangs=gangs), make_vector(copies=2, gangs=gangs)
    action = np.full((2, 1), 0.1)
    for one in (envs, twin):
        one.reset(seed=1)
        one.step(action)
    for copy in (0, 1, 0):
        with pytest.raises(BadArgumentError, match="a state of shape"):
            envs.load_state(np.zeros((7, 1)), copy)
    np.testing.assert_array_equal(envs.step(action)[0], twin.step(action)[0])
    envs.load_state(envs.save_state(1), 0)


# --- RLlib ---

Configured = tuple[dict[str, Any], str]
RLLIB: list[Configured] = [
    ({"env_config": None}, "env_config is a NoneType"),
    ({"env_config": [1]}, "env_config is a list"),
    ({"config": None}, r"config is a NoneType; .*PPOConfig\(\)"),
    ({"env": None}, "env=None: it must be a class"),
    ({"env": dict}, "env=<class 'dict'>: it must be a class of environments"),
    ({"env_config": {**CONFIG, "num_workers": 0}}, "num_workers'.=0"),
    ({"env_config": {**CONFIG, "cpus_per_worker": NAN}}, "cpus_per_worker'.=nan"),
    ({"num_env_runners": -1}, "num_env_runners=-1: it must be a whole number, at least 0"),
    ({"num_env_runners": "x"}, "num_env_runners='x'"),
    ({"num_env_runners": 1.5}, "num_env_runners=1.5"),
    ({"num_envs_per_env_runner": 0}, "num_envs_per_env_runner=0: .* at least 1"),
    ({"num_envs_per_env_runner": "x"}, "num_envs_per_env_runner='x'"),
    ({"ranks_per_bundle": "x"}, "ranks_per_bundle='x'"),
    ({"max_runner_restarts": "x"}, "max_runner_restarts='x'"),
]


@pytest.fixture
def rllib() -> Any:
    pytest.importorskip("torch", reason="needs torch: pip install 'alchemist-on-ray[rllib]'")
    return pytest.importorskip(
        "envs.rllib", reason="needs RLlib: pip install 'alchemist-on-ray[rllib]'"
    )


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(("wrong", "said"), RLLIB)
def test_arguments_of_configure(cluster: str, rllib: Any, wrong: dict[str, Any], said: str) -> None:
    from ray.rllib.algorithms.ppo import PPOConfig  # noqa: PLC0415  (optional package)

    given = {"config": PPOConfig(), "env": HPCSimulatorEnv, "env_config": CONFIG, **wrong}
    with pytest.raises(EnvConfigError, match=said):
        rllib.configure(given.pop("config"), given.pop("env"), **given)


def test_arguments_of_rllibs_resources(rllib: Any) -> None:
    wrong: list[tuple[Callable[[], Any], type[Exception], str]] = [
        (lambda: rllib.env_runner_resources(-1), ResourceError, "num_workers=-1"),
        (lambda: rllib.env_runner_resources(1, num_envs=0), ValueError, "num_envs=0"),
        (lambda: rllib.env_runner_resources(1, cpus_per_worker=NAN), ValueError, "cpus_per_w"),
        (lambda: rllib.spanning(5), EnvConfigError, "spanning takes a class of RLlib"),
        (lambda: rllib.spanning(dict), EnvConfigError, "spanning takes a class of RLlib"),
        (lambda: rllib.configure(runners=2), TypeError, "configure has no option 'runners'"),
    ]
    for call, kind, said in wrong:
        with pytest.raises(kind, match=said):
            call()
