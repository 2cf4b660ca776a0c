"""CPUs of env runners and their gangs: requests, bundles of trials, checks against the cluster."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import ray
from ray.rllib.algorithms.algorithm import Algorithm
from ray.rllib.algorithms.algorithm_config import AlgorithmConfig
from ray.tune import PlacementGroupFactory

from alchemist_ray.arguments import checked_cpus, positive_int
from alchemist_ray.errors import ResourceError
from alchemist_ray.plural import counted
from envs.errors import EnvConfigError

RUNNER_CPUS = 1  # of an env runner without its gangs
SPANNING = "spanning"  # the placement of a gang in bundles that are appended to the trial's


def cpus_per_rank(env_config: Mapping[str, Any]) -> float:
    """CPUs of a rank, as the session requests them."""
    given = env_config.get("cpus_per_worker")
    if given is None:
        return 1.0
    return checked_cpus("config['cpus_per_worker']", given, EnvConfigError)


def env_runner_resources(
    num_workers: int, *, num_envs: int = 1, cpus_per_worker: float = 1.0
) -> dict[str, Any]:
    """Settings that give an env runner the CPUs of its gangs, for a dict of RLlib settings.

    Parameters
    ----------
    num_workers : int
        Ranks of a gang.
    num_envs : int
        Gangs of a runner: its environments, or the gangs of its VectorEnv.
    cpus_per_worker : float
        CPUs of each rank.

    Returns
    -------
    dict
        ``num_cpus_per_env_runner``. The environment's config also needs ``"placement": "inherit"``.

    Raises
    ------
    ResourceError, ValueError
        For numbers that are not positive.
    """
    positive_int("num_workers", num_workers)
    positive_int("num_envs", num_envs)
    cpus_per_worker = checked_cpus("cpus_per_worker", cpus_per_worker)
    return {"num_cpus_per_env_runner": RUNNER_CPUS + num_envs * num_workers * cpus_per_worker}


def check_capacity(config: AlgorithmConfig, ranks: int) -> None:
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
    cpus = cpus_per_rank(config.env_config)
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
    _check_trial(runners, each)


def _check_trial(runners: int, each: float) -> None:
    """Inside a Tune trial, env runners must fit the trial's own bundles."""
    group = ray.util.get_current_placement_group()
    if group is None:
        return
    rooms = [bundle.get("CPU", 0.0) for bundle in group.bundle_specs[1:]]  # 0 is the trainable's
    if _fitting(rooms, each) < runners:
        raise EnvConfigError(
            "this process is in a Tune trial, whose bundles do not hold "
            f"{counted(runners, 'env runner')} of {counted(each, 'CPU')}. Reserve them "
            "with the trial:\n"
            "tune.with_resources(trainable, tune.PlacementGroupFactory("
            f'[{{"CPU": 1}}] + [{{"CPU": {each:g}}}] * {runners}))'
        )


def _fitting(rooms: list[float], each: float) -> int:
    return sum(int(room / each + 1e-9) for room in rooms)


def spanning(algorithm: type[Algorithm]) -> type[Algorithm]:
    """An algorithm whose trials under Tune reserve the CPUs of gangs over several nodes.

    Under Tune an env runner is inside its trial's placement group. A gang that asks for CPUs
    outside of it waits for the trial, which waits for the gang. With this algorithm, each runner's
    gang has its own bundles in that group, of ``ranks_per_bundle`` ranks (`configure`) each.

    Parameters
    ----------
    algorithm : type
        For example `PPO`.

    Returns
    -------
    type
        A subclass, for `tune.Tuner`.
    """

    if not isinstance(algorithm, type) or not issubclass(algorithm, Algorithm):
        raise EnvConfigError(f"spanning takes a class of RLlib, for example PPO; got {algorithm!r}")

    class Spanning(algorithm):  # type: ignore[valid-type, misc]
        @classmethod
        def default_resource_request(cls, config: Any) -> PlacementGroupFactory:
            request = super().default_resource_request(config)
            settings = config if isinstance(config, dict) else config.to_dict()
            bundles = gang_bundles(settings["env_config"]) * settings["num_env_runners"]
            return PlacementGroupFactory(request.bundles + bundles, strategy=request.strategy)

    Spanning.__name__ = Spanning.__qualname__ = f"Spanning{algorithm.__name__}"
    return Spanning


def gang_bundles(env_config: Mapping[str, Any]) -> list[dict[str, float]]:
    """The bundles of one runner's gang. Those of all runners follow RLlib's own."""
    if env_config.get("placement") != SPANNING:
        return []
    workers, most = env_config["num_workers"], env_config["ranks_per_bundle"]
    counts = [min(most, workers - most * i) for i in range(math.ceil(workers / most))]
    return [{"CPU": count * cpus_per_rank(env_config)} for count in counts]
