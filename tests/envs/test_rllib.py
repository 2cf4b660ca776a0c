"""RLlib trains on gangs: ranks die, steps hang, and training goes on, or ends with the reason."""

from __future__ import annotations

import os
import pickle
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="needs torch: pip install 'alchemist-on-ray[rllib]'")
pytest.importorskip("ray.rllib", reason="needs RLlib: pip install 'alchemist-on-ray[rllib]'")

import ray
from ray import tune
from ray.rllib.algorithms.ppo import PPO, PPOConfig
from ray.rllib.env.env_errors import StepFailedRecreateEnvError
from ray.rllib.models import ModelCatalog
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from alchemist_ray.errors import LibraryNotFoundError, ResourceError
from envs import (
    EnvConfigError,
    GangLostError,
    HPCSimulatorEnv,
    HPCSimulatorVectorEnv,
    RestartLimitError,
)
from envs.rllib import (
    HPCSimulatorMultiAgentEnv,
    configure,
    env_runner_resources,
    spanning,
    step_failed,
)
from tests.envs.conftest import PENDULUM
from tests.envs.papers_listing import CustomModel, ForRLlib
from tests.support import commands, traces

pytestmark = [
    pytest.mark.usefixtures("rllib"),
    # RLlib's own, in this process: what it calls of itself, of torch and of gymnasium.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning:ray"),
    pytest.mark.filterwarnings("ignore:.*Overriding environment:UserWarning"),
]

OSCILLATOR = str(Path(__file__).with_name("oscillator.py"))
BATCH = 40


def settings(workers: int = 2, **more: Any) -> dict[str, Any]:
    return {"num_workers": workers, "lib_name": "oscillator", "lib_path": OSCILLATOR, **more}


def short() -> PPOConfig:
    config = PPOConfig()
    config.training(train_batch_size_per_learner=BATCH, minibatch_size=20, num_epochs=1)
    return config.learners(num_learners=0)


def ppo(env: Any, env_config: dict[str, Any], **how: Any) -> PPOConfig:
    config = short()
    configure(config, env, env_config=env_config, **how)
    return config


@pytest.fixture
def no_cpu_taken(cluster: str) -> Iterator[None]:
    """After the test all CPUs of the cluster are free again."""
    yield
    free = traces.wait_until(lambda: ray.available_resources().get("CPU") == 8.0, 20.0, 0.1)
    assert free is not None, f"CPUs are still taken: {ray.available_resources()}"


@pytest.fixture
def training(no_cpu_taken: None) -> Iterator[Callable[[PPOConfig], Any]]:
    """Builds algorithms, and stops them."""
    built = []

    def build(config: PPOConfig) -> Any:
        built.append(config.build_algo())
        traces.note_segments()
        return built[-1]

    yield build
    for algorithm in built:
        algorithm.stop()


def sampled(result: dict[str, Any]) -> int:
    return int(result["env_runners"]["num_env_steps_sampled_lifetime"])


def test_a_rank_is_killed_and_training_goes_on(training: Any, tmp_path: Path) -> None:
    marks = tmp_path / "marks"
    sim = {"fault": "kill", "at": 7, "times": 1, "marks": str(marks)}
    algorithm = training(ppo(HPCSimulatorEnv, settings(sim=sim), num_env_runners=2))
    pids = algorithm.env_runner_group.foreach_env_runner(
        lambda runner: os.getpid(), local_env_runner=False
    )
    assert len(set(pids)) == 2
    results = [algorithm.train() for _ in range(3)]
    assert marks.read_text() == "x"
    assert [sampled(result) for result in results] == [BATCH, 2 * BATCH, 3 * BATCH]
    assert results[-1]["env_runners"]["num_env_step_failures"] >= 1
    counted = results[-1]["env_runners"]
    assert (counted["gang_restarts"], counted["step_timeouts"]) == (1, 0)
    assert counted["dropped_steps"] == 7  # the failed one, and six before it in its episode
    still = algorithm.env_runner_group.foreach_env_runner(
        lambda runner: os.getpid(), local_env_runner=False
    )
    assert still == pids  # gangs came and went, not their runners


def test_a_step_that_hangs_is_ended_by_its_deadline(training: Any, tmp_path: Path) -> None:
    marks = tmp_path / "marks"
    sim = {"fault": "hang", "at": 3, "times": 1, "marks": str(marks)}
    config = ppo(HPCSimulatorEnv, settings(sim=sim, step_timeout_s=2.0), num_env_runners=0)
    algorithm = training(config)
    started, begun = time.monotonic(), traces.clock()
    result = algorithm.train()
    assert marks.read_text() == "x"
    assert sampled(result) == BATCH
    assert time.monotonic() - started > 2.0
    assert traces.clock() - begun < 60.0


@pytest.mark.parametrize(("fault", "runners"), [("kill", 1), ("raise", 0)])
def test_what_fails_again_and_again_ends_training_with_the_reason(
    training: Any, tmp_path: Path, fault: str, runners: int
) -> None:
    marks = tmp_path / "marks"
    sim = {"fault": fault, "at": 2, "times": 1000, "marks": str(marks)}
    env_config = settings(1, sim=sim, max_restarts=1)
    algorithm = training(ppo(HPCSimulatorEnv, env_config, num_env_runners=runners))
    with pytest.raises(RestartLimitError, match="max_restarts"):
        algorithm.train()
    assert 2 <= len(marks.read_text()) <= 3


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_the_papers_class_as_printed_trains_with_a_custom_model(
    cluster: str, no_cpu_taken: None, tmp_path: Path
) -> None:
    """RLlib's new API stack has neither custom models nor `timesteps_total`; the old one has."""
    host, _, port = cluster.rpartition(":")
    ModelCatalog.register_custom_model("my_model", CustomModel)
    found = tune.run(
        "PPO",
        stop={"timesteps_total": 2 * BATCH},
        config={
            "env": ForRLlib,
            "env_config": {
                "hostname": host, "port": int(port), "num_workers": 2,
                "lib_name": "oscillator", "lib_path": OSCILLATOR,
            },
            "model": {"custom_model": "my_model"},
            "enable_rl_module_and_learner": False,
            "enable_env_runner_and_connector_v2": False,
            "num_env_runners": 1, "rollout_fragment_length": BATCH, "train_batch_size": BATCH,
            "minibatch_size": 20, "num_epochs": 1,
        },
        storage_path=str(tmp_path),
        verbose=0,
    )  # fmt: skip
    (trial,) = found.trials
    assert trial.last_result["timesteps_total"] == 2 * BATCH
    assert trial.last_result["training_iteration"] == 2


def test_the_papers_listing_trains_on_a_fresh_machine(tmp_path: Path) -> None:
    program = tmp_path / "listing.py"
    config = {
        "env_config": {
            "hostname": "0.0.0.0", "port": 6379, "num_workers": 2,
            "lib_name": "oscillator", "lib_path": OSCILLATOR,
        },
        "num_env_runners": 1, "train_batch_size_per_learner": BATCH, "minibatch_size": 20,
        "num_epochs": 1,
    }  # fmt: skip
    program.write_text(
        "import ray\nfrom ray import tune\nfrom envs import HPCSimulatorEnv\n"
        "from envs.rllib import GangCallbacks\n"
        "ray.init(num_cpus=8, include_dashboard=False)\n"
        f"config = {{'env': HPCSimulatorEnv, 'callbacks': GangCallbacks, **{config!r}}}\n"
        f"found = tune.run('PPO', stop={{'timesteps_total': {2 * BATCH}}}, config=config,\n"
        f"                 verbose=0, storage_path={str(tmp_path)!r})\n"
        "result = found.trials[0].last_result['env_runners']\n"
        "print('sampled', int(result['num_env_steps_sampled_lifetime']), flush=True)\n"
    )
    env = {k: v for k, v in os.environ.items() if k != "RAY_ADDRESS"}
    env["RAY_TMPDIR"] = tempfile.mkdtemp(dir="/tmp", prefix="ray-")  # no cluster is known there
    done = commands.run(sys.executable, program, limit_s=280, env=env)
    shutil.rmtree(env["RAY_TMPDIR"], ignore_errors=True)
    assert f"sampled {2 * BATCH}\n" in done.stdout, done.stdout[-3000:] + done.stderr[-3000:]


def tuned(algorithm: Any, config: Any, folder: Path) -> Any:
    """The results of an iteration of each trial."""
    stop = {"training_iteration": 1}
    run = tune.RunConfig(stop=stop, verbose=0, storage_path=str(folder))
    return tune.Tuner(algorithm, param_space=config, run_config=run).fit()


def test_under_tune_gangs_are_inside_of_their_trial(cluster: str, tmp_path: Path) -> None:
    config = ppo(HPCSimulatorEnv, settings(), ranks_per_bundle=1)
    algorithm: Any = spanning(PPO)
    assert algorithm.default_resource_request(config).bundles == [{"CPU": 1}] * 4
    found = tuned(algorithm, config, tmp_path)
    assert not found.errors, found.errors
    assert sampled(found[0].metrics) == BATCH


def test_tune_varies_the_simulators_options_and_shows_why_one_is_refused(
    cluster: str, tmp_path: Path
) -> None:
    config = ppo(
        HPCSimulatorEnv,
        {
            "lib_name": "pendulum", "lib_path": PENDULUM, "num_workers": 2,
            "sim": tune.grid_search([{"length": 10}, {"lenght": 10}]),
        },
    )  # fmt: skip
    inside: Any = PPO
    assert inside.default_resource_request(config).bundles == [{"CPU": 1}, {"CPU": 3}]
    found = tuned(PPO, config, tmp_path)
    assert sampled(found[0].metrics) == BATCH
    assert "unknown options ['lenght']; there are [" in str(found[1].error)


def test_too_few_cpus_are_said_before_anything_starts(cluster: str) -> None:
    started = traces.clock()
    with pytest.raises(ResourceError, match=r"2 env runners of 5 CPUs \(1 for the runner, 1 for"):
        ppo(HPCSimulatorEnv, settings(4), num_env_runners=2)
    with pytest.raises(ResourceError, match="need 10 CPUs, and the cluster has 8"):
        ppo(HPCSimulatorEnv, settings(4), num_env_runners=2, ranks_per_bundle=2)
    assert traces.clock() - started < 10.0


def test_an_evaluation_in_the_driver_has_its_own_gang_and_losses(
    training: Any, tmp_path: Path
) -> None:
    sim = {"fault": "kill", "at": 1, "times": 1, "marks": str(tmp_path / "marks")}
    with HPCSimulatorEnv(settings(1, sim=sim)) as env:
        env.reset()
        with pytest.raises(GangLostError):
            env.step(env.action_space.sample())
        env.reset()
    config = ppo(HPCSimulatorEnv, settings())
    config.evaluation(evaluation_interval=1, evaluation_num_env_runners=0, evaluation_duration=1)
    result = training(config).train()
    assert sampled(result) == BATCH
    evaluated = result["evaluation"]["env_runners"]
    assert evaluated["num_episodes"] == 1
    assert (evaluated["gang_restarts"], evaluated["dropped_steps"]) == (0, 0)


def test_a_permanent_error_is_raised_at_once_and_not_tried_again(training: Any) -> None:
    config = ppo(HPCSimulatorEnv, settings(), num_env_runners=0)
    config.environment(env_config=settings(placement="inherit"))
    started = traces.clock()
    with pytest.raises(ResourceError, match=r"^placement='inherit'"):
        training(config).train()
    assert traces.clock() - started < 20.0


def test_configure_refuses_with_the_line_to_write(cluster: str) -> None:
    with pytest.raises(EnvConfigError, match="num_envs_per_env_runner=4"):
        ppo(HPCSimulatorVectorEnv, settings(1, copies=4))
    with pytest.raises(EnvConfigError, match=r"HPCSimulatorEnv is single.*remove \.multi_agent"):
        configure(agents("own"), HPCSimulatorEnv, env_config=settings())
    with pytest.raises(EnvConfigError, match=r"(?s)write\nconfig\.multi_agent\("):
        configure(PPOConfig(), HPCSimulatorMultiAgentEnv, env_config=settings())

    def trial() -> None:
        ppo(HPCSimulatorEnv, settings(1), num_env_runners=2)

    group = ray.util.placement_group([{"CPU": 1}, {"CPU": 1}])
    inside = PlacementGroupSchedulingStrategy(group, placement_group_capture_child_tasks=True)
    task = ray.remote(num_cpus=1, scheduling_strategy=inside)(trial)
    with pytest.raises(EnvConfigError, match=r"(?s)tune.with_resources.*\[\{\"CPU\": 2\}\] \* 2"):
        ray.get(task.remote(), timeout=60)
    ray.util.remove_placement_group(group)


def test_what_is_wrong_with_the_simulator_is_said_at_once(cluster: str) -> None:
    with pytest.raises(LibraryNotFoundError, match="there is no file"):
        ppo(HPCSimulatorEnv, settings(1) | {"lib_path": "/nowhere/oscillator.py"})


def test_a_vector_environment_is_one_gang_and_is_restored_in_a_driver(
    training: Any, tmp_path: Path
) -> None:
    config = ppo(HPCSimulatorVectorEnv, settings(2, copies=4), num_envs_per_env_runner=4)
    assert config.num_cpus_per_env_runner == 3
    assert config.gym_env_vectorize_mode == "vector_entry_point"
    algorithm = training(config)
    assert sampled(algorithm.train()) == BATCH
    path = algorithm.save_to_path(str(tmp_path / "checkpoint"))
    algorithm.stop()
    restored = PPO.from_checkpoint(path)
    try:
        assert sampled(restored.train()) == 2 * BATCH
    finally:
        restored.stop()


def agents(policies: str) -> PPOConfig:
    config = short()
    if policies == "shared":
        config.multi_agent(policies={"p"}, policy_mapping_fn=lambda *_, **__: "p")
    else:
        names = {"agent_0", "agent_1"}
        config.multi_agent(policies=names, policy_mapping_fn=lambda agent, *_, **__: agent)
    return config


@pytest.mark.parametrize("policies", ["shared", "own"])
def test_agents_train_with_shared_and_with_own_policies(
    training: Any, tmp_path: Path, policies: str
) -> None:
    env_config = {
        "lib_name": "pendulum", "lib_path": PENDULUM, "num_workers": 2, "sim": {"agents": 2},
    }  # fmt: skip
    config = agents(policies)
    configure(config, HPCSimulatorMultiAgentEnv, env_config=env_config)
    algorithm = training(config)
    ranks = algorithm.env_runner_group.foreach_env_runner(
        lambda runner: [w.pid for w in gang(runner).list_workers()], local_env_runner=False
    )
    assert sampled(algorithm.train()) == BATCH
    os.kill(ranks[0][1], signal.SIGKILL)
    result = algorithm.train()
    assert sampled(result) == 2 * BATCH
    assert result["env_runners"]["gang_restarts"] == 1
    learned = {"p"} if policies == "shared" else {"agent_0", "agent_1"}
    assert set(result["learners"]) - {"__all_modules__"} == learned


def gang(runner: Any) -> Any:
    """The session of a multi-agent runner's environment."""
    (simulation,) = runner.env.envs[0].unwrapped._env._simulation._parts
    return simulation._session


def test_resources_for_a_dict_of_settings() -> None:
    assert env_runner_resources(2) == {"num_cpus_per_env_runner": 3}
    found = env_runner_resources(2, num_envs=3, cpus_per_worker=0.5)
    assert found == {"num_cpus_per_env_runner": 4.0}


def test_errors_are_ours_and_rllibs() -> None:
    error = step_failed(GangLostError("the gang is lost", rank=1))
    assert isinstance(error, GangLostError)
    assert isinstance(error, StepFailedRecreateEnvError)
    assert str(error) == "the gang is lost"
    assert error.rank == 1
    again = pickle.loads(pickle.dumps(error))
    assert isinstance(again, GangLostError)
    assert str(again) == str(error)
