"""RLlib with environments that are gangs: where they are placed, how they fail, how they come back.

    config = configure(
        PPOConfig(),
        HPCSimulatorEnv,
        env_config={"num_workers": 2, "lib_name": "lammps_crystal"},
        num_env_runners=2,
    )
    algo = config.build_algo()

A gang needs CPUs that its env runner does not have by itself, and RLlib waits for ever for what
it cannot get. So each runner is given the CPUs of its gang as well, and the gang runs inside of
them; what does not fit the cluster is refused before anything starts. Gangs over several nodes:
`spanning`. Written against RLlib 2.60's new API stack (EnvRunners, Learners).
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Mapping
from typing import Any

import ray
from gymnasium.vector import VectorEnv
from ray.rllib.algorithms.algorithm import Algorithm
from ray.rllib.algorithms.algorithm_config import AlgorithmConfig
from ray.rllib.callbacks.callbacks import RLlibCallback
from ray.rllib.env.env_errors import StepFailedRecreateEnvError
from ray.rllib.env.single_agent_env_runner import SingleAgentEnvRunner
from ray.tune import PlacementGroupFactory

from alchemist_ray.errors import ResourceError
from alchemist_ray.runtime.placement import Reservation, within
from alchemist_ray.runtime.ray_cluster import join_ray
from envs.errors import EnvConfigError, EnvError, RestartLimitError

__all__ = [
    "GangCallbacks",
    "GangEnvRunner",
    "configure",
    "env_runner_resources",
    "spanning",
    "step_failed",
]

RUNNER_CPUS = 1  # an env runner's own, beside its gangs'
RUNNER_RESTARTS = 3
MAX_RESTARTS = 10  # of an environment whose config does not say
TOLD_TIMEOUT_S = 10.0
NO_RUNNER_S = 120.0  # more than Ray needs to start one again, with its gang
SPANNING = "spanning"  # the placement by which a gang is put into appended bundles


def step_failed(error: EnvError) -> BaseException:
    """The error by which RLlib makes the environment anew: `error`, and RLlib's as well."""
    kind = type(error)
    about = {"__doc__": kind.__doc__, "__reduce__": lambda _: (step_failed, (error,))}
    mixed = type(kind.__name__, (kind, StepFailedRecreateEnvError), about)
    failed: BaseException = mixed(*error.args, **error.facts)
    return failed


def env_runner_resources(
    num_workers: int, *, num_envs: int = 1, cpus_per_worker: float = 1.0
) -> dict[str, Any]:
    """Settings that give an env runner the CPUs of its gangs, for a dict of RLlib settings.

    Parameters
    ----------
    num_workers : int
        Ranks of a gang.
    num_envs : int
        Environments in a runner, each with a gang of its own. One for a VectorEnv.
    cpus_per_worker : float
        CPUs of each rank.

    Returns
    -------
    dict
        ``num_cpus_per_env_runner``. The environment's own config says ``"placement": "inherit"``.
    """
    return {"num_cpus_per_env_runner": RUNNER_CPUS + num_envs * num_workers * cpus_per_worker}


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
    """Set up an RLlib config for environments that are gangs.

    Parameters
    ----------
    config : AlgorithmConfig
        Changed in place: environment, env runners, fault tolerance, callbacks. Set training,
        learners and the model as you like.
    env : type or str
        `HPCSimulatorEnv`, `HPCSimulatorVectorEnv`, or a class or registered name like them.
    env_config : mapping
        The environment's config, with ``num_workers``.
    num_env_runners : int
        Each with a gang (0: the algorithm's own process has it).
    num_envs_per_env_runner : int
        Environments in a runner: each has a gang of its own, but those of a VectorEnv share
        one (there it is the number of the VectorEnv's sub-environments).
    ranks_per_bundle : int, optional
        For gangs over several nodes, with an algorithm made by `spanning`: the most ranks that
        lie together on a node. Default: a gang is on its runner's node.
    max_runner_restarts : int
        How often a runner that has died is started again. Within one, environments are made
        anew as often as their ``max_restarts`` allows.

    Returns
    -------
    AlgorithmConfig
        `config`.

    Raises
    ------
    EnvConfigError
        For a config that cannot work.
    ResourceError
        If the cluster could never hold the runners and their gangs.

    Notes
    -----
    Joins Ray, as an `AlchemistSession` does, and makes the environment once, with a gang of one
    rank for the moment: RLlib swallows what goes wrong with it in an env runner. Evaluation
    runners, if you ask for them, have gangs (and the CPUs) like the others.
    """
    settings = dict(env_config)
    workers = settings.get("num_workers", 1)
    if isinstance(workers, bool) or not isinstance(workers, int) or workers < 1:
        raise EnvConfigError(f"num_workers={workers!r}: it must be a whole number, at least 1")
    vector = isinstance(env, type) and issubclass(env, VectorEnv)
    gangs = 1 if vector else num_envs_per_env_runner
    resources: dict[str, Any] = {"num_cpus_per_env_runner": RUNNER_CPUS}
    if num_env_runners == 0:
        settings.setdefault("placement", "own")  # where the algorithm runs is not for us to say
    elif ranks_per_bundle is not None:
        if gangs != 1 or ranks_per_bundle < 1:
            raise EnvConfigError("ranks_per_bundle: at least 1, and one environment for a runner")
        settings.update(placement=SPANNING, ranks_per_bundle=ranks_per_bundle)
    else:
        resources = env_runner_resources(workers, num_envs=gangs, cpus_per_worker=_cpus(settings))
        settings["placement"] = "inherit"
    config.environment(env, env_config=settings)
    config.env_runners(
        env_runner_cls=GangEnvRunner,
        num_env_runners=num_env_runners,
        num_envs_per_env_runner=num_envs_per_env_runner,
        gym_env_vectorize_mode="vector_entry_point" if vector else "sync",
        sample_timeout_s=None,  # each step has its own deadline
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
    if isinstance(env, type):
        _try_out(env, settings, num_envs_per_env_runner if vector else None)
    return config


def _cpus(env_config: Mapping[str, Any]) -> float:
    """CPUs of a rank, as the session will ask for them."""
    return float(env_config.get("cpus_per_worker") or 1)


def _try_out(env: type, settings: dict[str, Any], num_envs: int | None) -> None:
    """Make the environment here, and end it. Raises whatever is wrong with it."""
    alone = {**settings, "num_workers": 1, "placement": "own"}
    alone.pop("ranks_per_bundle", None)
    if num_envs is not None:
        alone["num_envs"] = num_envs
    env(alone).close()


def _add_callbacks(config: AlgorithmConfig) -> None:
    theirs = config.callbacks_class
    kinds = theirs if isinstance(theirs, list) else [theirs]
    if GangCallbacks not in kinds:
        config.callbacks([kind for kind in kinds if kind is not RLlibCallback] + [GangCallbacks])


def _check_capacity(config: AlgorithmConfig, ranks: int) -> None:
    """Refuse what no empty cluster like this one can hold: RLlib would wait for it for ever.

    `ranks` are those of a runner.
    """
    rooms = [node["Resources"].get("CPU", 0.0) for node in ray.nodes() if node["Alive"]]
    total, largest = sum(rooms), max(rooms, default=0.0)
    runners, each = config.num_env_runners, float(config.num_cpus_per_env_runner)
    cpus = _cpus(config.env_config)
    if config.env_config["placement"] == "inherit":
        if sum(int(room / each + 1e-9) for room in rooms) < runners:
            raise ResourceError(
                f"{runners} env runners with {each:g} CPUs each (1, and {ranks} ranks with "
                f"{cpus:g}) do not fit: the cluster has {total:g} CPUs on {len(rooms)} node(s), "
                f"at most {largest:g} on one. Ask for fewer runners or workers, add nodes, start "
                "Ray with more CPUs (ray.init(num_cpus=...)) if ranks may share cores, or let "
                "gangs span nodes (ranks_per_bundle)"
            )
        return
    needed = runners * each + max(1, runners) * ranks * cpus
    if needed > total:
        raise ResourceError(
            f"{runners} env runners and their gangs of {ranks} ranks need {needed:g} CPUs, and the "
            f"cluster has {total:g}: ask for fewer, or add nodes"
        )


def spanning(algorithm: type[Algorithm]) -> type[Algorithm]:
    """An algorithm whose trials under Tune reserve the CPUs of gangs over several nodes.

    Under Tune an env runner lives in its trial's placement group, and a gang that asks for CPUs
    outside of it waits for the trial, which waits for the gang. Here each runner's gang has
    bundles of its own in that group, of ``ranks_per_bundle`` ranks (`configure`) each.

    Parameters
    ----------
    algorithm : type
        Such as `PPO`.

    Returns
    -------
    type
        A subclass, to be given to `tune.Tuner`.
    """

    class Spanning(algorithm):  # type: ignore[valid-type, misc]
        @classmethod
        def default_resource_request(cls, config: Any) -> PlacementGroupFactory:
            request = super().default_resource_request(config)
            settings = config if isinstance(config, dict) else config.to_dict()
            bundles = _gang_bundles(settings["env_config"]) * settings["num_env_runners"]
            return PlacementGroupFactory(request.bundles + bundles, strategy=request.strategy)

    Spanning.__name__ = Spanning.__qualname__ = f"Spanning{algorithm.__name__}"
    return Spanning


def _gang_bundles(env_config: Mapping[str, Any]) -> list[dict[str, float]]:
    """The bundles of one runner's gang; those of all runners lie behind all of RLlib's."""
    if env_config.get("placement") != SPANNING:
        return []
    workers, most = env_config["num_workers"], env_config["ranks_per_bundle"]
    counts = [min(most, workers - most * i) for i in range(math.ceil(workers / most))]
    return [{"CPU": count * _cpus(env_config)} for count in counts]


class GangEnvRunner(SingleAgentEnvRunner):
    """An env runner that puts gangs into their bundles, and tells when restarts are used up."""

    gave_up: str | None = None
    _made = 0

    def make_env(self) -> None:
        settings = dict(self.config.env_config)
        most = settings.get("max_restarts", MAX_RESTARTS)
        if self._made > most:
            # RLlib calls this where it handles what has failed, and tells nobody of that.
            why = sys.exc_info()[1] or "unknown"
            raise RestartLimitError(
                f"the environment was made anew {most} times (max_restarts), and failed once more: "
                f"{why}"
            )
        self._made += 1
        if settings.get("placement") == SPANNING:
            self.config = self.config.copy(copy_frozen=False)
            settings["placement"] = self._bundles(settings)
            settings.pop("ranks_per_bundle")
            self.config.env_config = settings
        super().make_env()

    def _bundles(self, env_config: dict[str, Any]) -> str | Reservation:
        """Where this runner's gang goes: its part of the trial's bundles."""
        group = ray.util.get_current_placement_group()
        if group is None:  # not under Tune: a reservation of its own holds nobody up
            return "own"
        bundles = _gang_bundles(env_config)
        each = len(bundles)
        last = group.bundle_count - each * (self.config.num_env_runners - self.worker_index)
        mine = range(last - each, last)
        specs = [group.bundle_specs[index].get("CPU") for index in mine if index > 0]
        if specs != [bundle["CPU"] for bundle in bundles]:
            raise EnvConfigError(
                "ranks_per_bundle wants an algorithm whose trials have bundles for gangs: give "
                "tune.Tuner spanning(PPO) instead of PPO"
            )
        return within(group, mine, _cpus(env_config))

    def apply(self, func: Any, *args: Any, **kwargs: Any) -> Any:
        def noted(*args: Any, **kwargs: Any) -> Any:
            try:
                return func(*args, **kwargs)
            except RestartLimitError as error:
                self.gave_up = str(error)
                raise

        try:
            return super().apply(noted, *args, **kwargs)
        except SystemExit:  # what RLlib makes of any error
            if self.gave_up is None:
                raise
            raise RestartLimitError(self.gave_up) from None  # and live on, to tell of it


class GangCallbacks(RLlibCallback):
    """Ends a training whose environments do not come back, with the reason."""

    def __init__(self) -> None:
        super().__init__()
        self._seen = time.monotonic()

    def on_train_result(self, *, algorithm: Algorithm, result: dict[str, Any], **_: Any) -> None:
        group = algorithm.env_runner_group
        if group is None or group.num_remote_env_runners() == 0:
            return  # an error has come through by itself
        healthy = group.num_healthy_remote_env_runners()
        if healthy:
            self._seen = time.monotonic()
        if healthy == group.num_remote_env_runners():
            return
        told = group.foreach_env_runner(
            lambda runner: getattr(runner, "gave_up", None),
            local_env_runner=False,
            healthy_only=False,
            timeout_seconds=TOLD_TIMEOUT_S,
        )
        reasons = [reason for reason in told if reason]
        if reasons:
            raise RestartLimitError(reasons[0])
        if time.monotonic() - self._seen > NO_RUNNER_S:
            raise RestartLimitError(
                f"no env runner has been alive for {NO_RUNNER_S:.0f} s: they died more often than "
                "max_runner_restarts allows, or cannot start. Their logs say why"
            )
        if not healthy:
            time.sleep(1.0)  # an iteration without runners does nothing, and is over at once
