"""`configure`: sets up an RLlib config for environments that run on gangs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import gymnasium
import ray
from gymnasium.vector import VectorEnv
from ray.rllib.algorithms.algorithm_config import AlgorithmConfig
from ray.rllib.callbacks.callbacks import RLlibCallback
from ray.rllib.env.multi_agent_env import MultiAgentEnv
from ray.tune.search.variant_generator import generate_variants

from alchemist_ray.arguments import checked_cpus, checked_gpus, known_options, positive_int
from alchemist_ray.cluster.ray_cluster import join_ray
from alchemist_ray.errors import ResourceError
from alchemist_ray.plural import counted
from envs.errors import EnvConfigError
from envs.rllib.env_runner import (
    SPANNING,
    GangCallbacks,
    GangEnvRunner,
    GangMultiAgentEnvRunner,
    resources_of_rank,
)

RUNNER_CPUS = 1  # of an env runner without its gangs
RUNNER_RESTARTS = 3
SINGLE_AGENT = (
    "is single-agent for RLlib: remove .multi_agent(...), or use "
    "envs.rllib.HPCSimulatorMultiAgentEnv. (The agents of a simulation are also sub-environments "
    "of HPCSimulatorVectorEnv, which share one policy.)"
)
MULTI_AGENT = (
    "is multi-agent for RLlib: write\n"
    "config.multi_agent(policies={'shared'}, policy_mapping_fn=lambda agent, *_, **__: 'shared')\n"
    "before configure, or policies=set(env.possible_agents) and policy_mapping_fn=lambda agent, "
    "*_, **__: agent for one policy per agent"
)


@known_options("configure")
def configure(
    config: AlgorithmConfig,
    env: Any,
    *,
    env_config: Mapping[str, Any],
    num_env_runners: int = 1,
    num_envs_per_env_runner: int = 1,
    ranks_per_bundle: int | None = None,
    max_runner_restarts: int = RUNNER_RESTARTS,
) -> AlgorithmConfig:
    """Set up an RLlib config for environments that run on gangs.

    Parameters
    ----------
    config : AlgorithmConfig
        Modified in place: environment, env runners, fault tolerance, callbacks. Training,
        learners and model are not touched.
    env : type or str
        `HPCSimulatorEnv`, `HPCSimulatorVectorEnv`, `HPCSimulatorMultiAgentEnv`, or a class or
        registered name like them.
    env_config : mapping
        The environment's config, with ``num_workers``. Its values, and those of ``sim``, may be
        search spaces of Tune, except for numbers of ranks, gangs and copies.
    num_env_runners : int
        Each has its own gang. With 0, the algorithm's own process has it.
    num_envs_per_env_runner : int
        Environments of a runner, each with its own gang. For a VectorEnv: its number of
        sub-environments, which share its gangs.
    ranks_per_bundle : int, optional
        For gangs over several nodes, with an algorithm made by `spanning`: the largest number of
        ranks that are placed together on a node. Default: a gang is on its runner's node.
    max_runner_restarts : int
        How often a runner whose process has died is restarted. Within a runner, environments are
        recreated as often as their ``max_restarts`` (per hour) allows.

    Returns
    -------
    AlgorithmConfig
        `config`.

    Raises
    ------
    EnvConfigError
        For a config that cannot work, with the line to write instead.
    ResourceError
        If the empty cluster could not hold the runners and their gangs.

    Notes
    -----
    Joins Ray, as an `AlchemistSession` does, and (except in a Tune trial) constructs the
    environment once, with a gang of one rank, because RLlib does not show errors of its
    construction in an env runner. Evaluation runners have gangs like the others.
    """
    _check_kinds(config, env, env_config)
    many = _is_multi_agent(config, env)
    settings = dict(env_config)
    workers = settings.get("num_workers", 1)
    for name, value, least in (
        ("config['num_workers']", workers, 1),
        ("config['gangs']", settings.get("gangs", 1), 1),
        ("num_env_runners", num_env_runners, 0),
        ("num_envs_per_env_runner", num_envs_per_env_runner, 1),
        ("max_runner_restarts", max_runner_restarts, 0),
    ):
        positive_int(name, value, EnvConfigError, least=least)
    vector = isinstance(env, type) and issubclass(env, VectorEnv)
    gangs = settings.get("gangs", 1) if vector else num_envs_per_env_runner
    resources: dict[str, Any] = {"num_cpus_per_env_runner": RUNNER_CPUS}
    if num_env_runners == 0:
        settings.setdefault("placement", "auto")
    elif ranks_per_bundle is not None:
        positive_int("ranks_per_bundle", ranks_per_bundle, EnvConfigError)
        if gangs != 1:
            raise EnvConfigError("ranks_per_bundle needs one environment and gang per runner")
        settings.update(placement=SPANNING, ranks_per_bundle=ranks_per_bundle)
    else:
        cpus, gpus = resources_of_rank(settings)
        resources = env_runner_resources(
            workers, num_envs=gangs, cpus_per_worker=cpus, gpus_per_worker=gpus
        )
        settings["placement"] = "auto"
    config.environment(env, env_config=settings)
    if many:  # RLlib's check would start a gang, to step it once
        config.environment(disable_env_checking=True)
    config.env_runners(
        env_runner_cls=GangMultiAgentEnvRunner if many else GangEnvRunner,
        num_env_runners=num_env_runners,
        num_envs_per_env_runner=num_envs_per_env_runner,
        gym_env_vectorize_mode="vector_entry_point" if vector else "sync",
        sample_timeout_s=None,  # each step has its own time limit
        **resources,
    )
    config.fault_tolerance(
        restart_failed_sub_environments=True,
        restart_failed_env_runners=True,
        max_num_env_runner_restarts=max_runner_restarts,
        delay_between_env_runner_restarts_s=1.0,
    )
    _add_callbacks(config)
    join_ray(None)
    _check_capacity(config, gangs * workers)
    if isinstance(env, type) and ray.util.get_current_placement_group() is None:
        _try_out(env, settings, num_envs_per_env_runner, vector)
    return config


def env_runner_resources(
    num_workers: int,
    *,
    num_envs: int = 1,
    cpus_per_worker: float = 1.0,
    gpus_per_worker: float = 0.0,
) -> dict[str, Any]:
    """Settings that give an env runner what its gangs need, for a dict of RLlib settings.

    Parameters
    ----------
    num_workers : int
        Ranks of a gang.
    num_envs : int
        Gangs of a runner: its environments, or the gangs of its VectorEnv.
    cpus_per_worker, gpus_per_worker : float
        CPUs and GPUs of each rank.

    Returns
    -------
    dict
        ``num_cpus_per_env_runner``, and ``num_gpus_per_env_runner`` for ranks with GPUs. The
        environment's config also needs ``"placement": "inherit"``.

    Raises
    ------
    ResourceError, ValueError
        For numbers that are not positive.
    """
    positive_int("num_workers", num_workers)
    positive_int("num_envs", num_envs)
    cpus_per_worker = checked_cpus("cpus_per_worker", cpus_per_worker)
    gpus = num_envs * num_workers * checked_gpus("gpus_per_worker", gpus_per_worker)
    return {"num_cpus_per_env_runner": RUNNER_CPUS + num_envs * num_workers * cpus_per_worker} | (
        {"num_gpus_per_env_runner": gpus} if gpus else {}
    )


def _check_capacity(config: AlgorithmConfig, ranks: int) -> None:
    """Refuse requests that the empty cluster, or the current trial, cannot hold.

    RLlib would wait for them forever.

    Parameters
    ----------
    config : AlgorithmConfig
    ranks : int
        Ranks of all gangs of a runner.

    Raises
    ------
    ResourceError
        If the cluster is too small.
    EnvConfigError
        If this process is in a Tune trial whose bundles are too small.
    """
    rooms = [node["Resources"].get("CPU", 0.0) for node in ray.nodes() if node["Alive"]]
    total, largest = sum(rooms), max(rooms, default=0.0)
    runners, each = config.num_env_runners, float(config.num_cpus_per_env_runner)
    cpus, gpus = resources_of_rank(config.env_config)
    wanted = max(1, runners) * ranks * gpus
    there = ray.cluster_resources().get("GPU", 0.0)
    if wanted > there:
        raise ResourceError(
            f"gangs of {counted(ranks, 'rank')} need {wanted:g} GPUs, and the cluster has "
            f"{there:g}: use fewer, or add nodes"
        )
    if config.env_config["placement"] == SPANNING or not runners:
        needed = runners * each + max(1, runners) * ranks * cpus
        if needed > total:
            raise ResourceError(
                f"{counted(runners, 'env runner')} and gangs of {counted(ranks, 'rank')} need "
                f"{needed:g} CPUs, and the cluster has {total:g}: use fewer, or add nodes"
            )
        return
    if _fitting(rooms, each) < runners:
        raise ResourceError(
            f"{counted(runners, 'env runner')} of {counted(each, 'CPU')} (1 for the runner, "
            f"{cpus:g} for each of {counted(ranks, 'rank')}) do not fit: the cluster has "
            f"{total:g} CPUs on {counted(len(rooms), 'node')}, at most {largest:g} on one. Use "
            "fewer runners or workers, add nodes, let gangs span nodes (ranks_per_bundle), or, if "
            "ranks may share cores, start Ray with more CPUs (ray.init(num_cpus=...))"
        )
    group = ray.util.get_current_placement_group()  # of the Tune trial; 0 is the trainable's bundle
    rooms = [bundle.get("CPU", 0.0) for bundle in group.bundle_specs[1:]] if group else []
    if group is not None and _fitting(rooms, each) < runners:
        raise EnvConfigError(
            "this process is in a Tune trial, whose bundles do not hold "
            f"{counted(runners, 'env runner')} of {counted(each, 'CPU')}. Reserve them "
            "with the trial:\n"
            "tune.with_resources(trainable, tune.PlacementGroupFactory("
            f'[{{"CPU": 1}}] + [{{"CPU": {each:g}}}] * {runners}))'
        )


def _fitting(rooms: list[float], each: float) -> int:
    return sum(int(room / each + 1e-9) for room in rooms)


def _check_kinds(config: Any, env: Any, env_config: Any) -> None:
    is_class = isinstance(env, type) and issubclass(env, gymnasium.Env | VectorEnv)
    if not isinstance(config, AlgorithmConfig):
        raise EnvConfigError(
            f"config is a {type(config).__name__}; it must be a config of RLlib, e.g. PPOConfig()"
        )
    if not is_class and not isinstance(env, str):
        raise EnvConfigError(
            f"env={env!r}: it must be a class of environments, e.g. HPCSimulatorEnv, or a name "
            "that is registered"
        )
    if not isinstance(env_config, Mapping):
        raise EnvConfigError(
            f"env_config is a {type(env_config).__name__}; it must be a dict, the config of the "
            "environment"
        )


def _is_multi_agent(config: AlgorithmConfig, env: Any) -> bool:
    """Whether config and environment are multi-agent. Raises `EnvConfigError` if only one is."""
    wanted: bool = config.is_multi_agent
    if isinstance(env, type) and issubclass(env, MultiAgentEnv) != wanted:
        raise EnvConfigError(f"{env.__name__} {SINGLE_AGENT if wanted else MULTI_AGENT}")
    return wanted


def _try_out(env: type, settings: dict[str, Any], num_envs: int, vector: bool) -> None:
    """Construct the environment here once, and close it. Raises its errors."""
    _, sampled = next(generate_variants(settings))  # of search spaces
    alone = {**sampled, "num_workers": 1, "placement": "own"}
    alone.pop("ranks_per_bundle", None)
    if vector:
        alone["gangs"] = 1
        if "copies" not in alone and "num_envs" not in alone:
            alone["num_envs"] = num_envs
    made: Any = env(alone)
    try:
        if vector and made.num_envs != num_envs:
            raise EnvConfigError(
                f"the VectorEnv has {made.num_envs} sub-environments (copies x agents), and "
                f"num_envs_per_env_runner is {num_envs}: write\n"
                f"configure(..., num_envs_per_env_runner={made.num_envs})"
            )
    finally:
        made.close()


def _add_callbacks(config: AlgorithmConfig) -> None:
    existing = config.callbacks_class
    kinds = existing if isinstance(existing, list) else [existing]
    if GangCallbacks not in kinds:
        config.callbacks([kind for kind in kinds if kind is not RLlibCallback] + [GangCallbacks])
