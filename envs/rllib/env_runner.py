"""RLlib's env runners for gangs: bundles, restarts, permanent errors, metrics; multi-agent."""

from __future__ import annotations

import math
import sys
import time
from collections import Counter
from collections.abc import Mapping
from typing import Any

import ray
from ray.rllib.algorithms.algorithm import Algorithm
from ray.rllib.callbacks.callbacks import RLlibCallback
from ray.rllib.env.multi_agent_env import MultiAgentEnv
from ray.rllib.env.multi_agent_env_runner import MultiAgentEnvRunner
from ray.rllib.env.single_agent_env_runner import SingleAgentEnvRunner
from ray.rllib.utils.metrics import NUM_ENV_STEPS_SAMPLED_LIFETIME
from ray.tune import PlacementGroupFactory

from alchemist_ray.arguments import checked_cpus, checked_gpus
from alchemist_ray.attached.options import RankResources
from alchemist_ray.cluster.placement import Reservation, within
from alchemist_ray.errors import AlchemistError, GroupFailedError, GroupRecoveredError
from envs.agents import Agent, AgentsByName, StepResult
from envs.config import MAX_RESTARTS
from envs.errors import EnvConfigError, GangLostError, RestartLimitError, SimulationError
from envs.losses import DROPPED, EVENTS, Losses, RestartRate, in_this_process

# Errors that a new environment may fix. Other errors of this package end the sampling.
TRANSIENT = (SimulationError, GangLostError, GroupFailedError, GroupRecoveredError)
SPANNING = "spanning"  # the placement of a gang in bundles that are appended to the trial's
ASK_TIMEOUT_S = 10.0
NO_RUNNER_S = 120.0  # longer than Ray needs to restart a runner with its gang


def resources_of_rank(env_config: Mapping[str, Any]) -> RankResources:
    """What a rank gets, as the session requests it."""
    cpus, gpus = env_config.get("cpus_per_worker"), env_config.get("gpus_per_worker", 0.0)
    return RankResources(
        1.0 if cpus is None else checked_cpus("config['cpus_per_worker']", cpus, EnvConfigError),
        checked_gpus("config['gpus_per_worker']", gpus, EnvConfigError),
    )


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
    return [resources_of_rank(env_config).times(count) for count in counts]


class _NoSpaces(dict[str, Any]):
    """The spaces of a runner that has no environment: reading them raises the reason.

    RLlib drops the errors of runners' constructors and fails in its next line, with an IndexError.
    """

    def __init__(self, reason: AlchemistError) -> None:
        super().__init__()
        self._reason = reason

    def __reduce__(self) -> tuple[Any, ...]:
        return _NoSpaces, (self._reason,)

    def __getitem__(self, _: str) -> Any:
        raise self._reason

    __iter__ = items = keys = values = get = __getitem__  # type: ignore[assignment]


class _GangRunner:
    """Places gangs, limits restarts, and reports why it has given up.

    Attributes
    ----------
    gave_up : AlchemistError or None
        The permanent error that ended sampling.
    """

    config: Any
    metrics: Any
    worker_index: int
    gave_up: AlchemistError | None = None
    _reported: Counter[str] | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._recreated = RestartRate()
        try:
            super().__init__(*args, **kwargs)
        except AlchemistError as error:
            if self.worker_index == 0 or isinstance(error, TRANSIENT):
                raise
            self.gave_up = error

    def assert_healthy(self) -> None:
        """RLlib's; a runner that tells why it has no environment must be asked."""
        if self.gave_up is None:
            super().assert_healthy()  # type: ignore[misc]

    def get_spaces(self) -> dict[str, Any]:
        """RLlib's, or the reason why there is no environment."""
        return _NoSpaces(self.gave_up) if self.gave_up else super().get_spaces()  # type: ignore[misc]

    def make_env(self) -> None:
        """Create the environment, also again after a failure."""
        # RLlib calls this in its exception handler and does not pass the exception.
        cause = sys.exc_info()[1]
        if isinstance(cause, AlchemistError) and not isinstance(cause, TRANSIENT):
            raise cause
        if self._reported is None:  # what this process has lost before is not this runner's
            self._reported = in_this_process.copy()
        settings = dict(self.config.env_config)
        if cause is not None:
            # RLlib drops what it has sampled of the episodes in progress, besides the failed step.
            ongoing = sum(map(len, getattr(self, "_ongoing_episodes", None) or ()))
            Losses(settings.get("lib_name", "")).add(DROPPED, ongoing, "RLlib drops its episodes")
            self._recreated.add()
            if self._recreated.recent() > (most := settings.get("max_restarts", MAX_RESTARTS)):
                raise RestartLimitError(
                    f"{cause}\nThe environment was recreated {most} times within an hour "
                    "(max_restarts), and this was its next failure"
                )
        if settings.get("placement") == SPANNING:
            self.config = self.config.copy(copy_frozen=False)
            settings["placement"] = self._bundles(settings)
            settings.pop("ranks_per_bundle")
            self.config.env_config = settings
        super().make_env()  # type: ignore[misc]

    def _bundles(self, env_config: dict[str, Any]) -> str | Reservation:
        """The placement of this runner's gang: its part of the trial's bundles."""
        group = ray.util.get_current_placement_group()
        if group is None:  # not under Tune: a reservation of its own blocks nothing
            return "own"
        bundles = gang_bundles(env_config)
        each = len(bundles)
        last = group.bundle_count - each * (self.config.num_env_runners - self.worker_index)
        mine = range(last - each, last)
        specs = [group.bundle_specs[index].get("CPU") for index in mine if index > 0]
        if specs != [bundle["CPU"] for bundle in bundles]:
            raise EnvConfigError(
                "ranks_per_bundle needs an algorithm whose trials have bundles for gangs: pass "
                "spanning(PPO) instead of PPO to tune.Tuner"
            )
        return within(group, mine, *resources_of_rank(env_config))

    def get_metrics(self) -> Any:
        """RLlib's metrics, and the losses of this process's environments."""
        reported, self._reported = self._reported or Counter(), in_this_process.copy()
        for name in EVENTS:
            added = self._reported[name] - reported[name]
            self.metrics.log_value(name, added, reduce="lifetime_sum")
        return super().get_metrics()  # type: ignore[misc]

    def apply(self, func: Any, *args: Any, **kwargs: Any) -> Any:
        """Call a function on this runner; a permanent error is raised, not the end of the actor."""

        def noted(*args: Any, **kwargs: Any) -> Any:
            try:
                return func(*args, **kwargs)
            except AlchemistError as error:
                if not isinstance(error, TRANSIENT):
                    self.gave_up = error
                raise

        try:
            return super().apply(noted, *args, **kwargs)  # type: ignore[misc]
        except SystemExit:  # RLlib converts every error to this
            if self.gave_up is None:
                raise
            raise self.gave_up from None  # the actor survives and can report the error


class GangEnvRunner(_GangRunner, SingleAgentEnvRunner):
    """For `HPCSimulatorEnv` and `HPCSimulatorVectorEnv`."""


class GangMultiAgentEnvRunner(_GangRunner, MultiAgentEnvRunner):
    """For `HPCSimulatorMultiAgentEnv`."""


class HPCSimulatorMultiAgentEnv(AgentsByName, MultiAgentEnv):  # type: ignore[misc]
    __doc__ = AgentsByName.__doc__

    def __init__(self, config: Mapping[str, Any] | None = None, **options: Any) -> None:
        AgentsByName.__init__(self, config, **options)
        MultiAgentEnv.__init__(self)

    def step(self, actions: Mapping[Agent, Any]) -> StepResult:  # type: ignore[override]
        """As `AgentsByName.step`, with the key ``__all__`` for the end of the episode."""
        found, rewards, terminated, truncated, infos = AgentsByName.step(self, actions)
        for ends in (terminated, truncated):
            ends["__all__"] = all(ends.values())
        return found, rewards, terminated, truncated, infos


class GangCallbacks(RLlibCallback):
    """Raises the error with which env runners have given up; reports `timesteps_total`."""

    def __init__(self) -> None:
        super().__init__()
        self._last_healthy = time.monotonic()

    def on_train_result(self, *, algorithm: Algorithm, result: dict[str, Any], **_: Any) -> None:
        # For Tune's stop={"timesteps_total": n}: the new API stack does not report it.
        result.setdefault("timesteps_total", result.get(NUM_ENV_STEPS_SAMPLED_LIFETIME, 0))
        group = algorithm.env_runner_group
        if group is None or group.num_remote_env_runners() == 0:
            return  # errors of a local runner are raised by themselves
        healthy = group.num_healthy_remote_env_runners()
        if healthy:
            self._last_healthy = time.monotonic()
        if healthy == group.num_remote_env_runners():
            return
        errors = group.foreach_env_runner(
            lambda runner: getattr(runner, "gave_up", None),
            local_env_runner=False,
            healthy_only=False,
            timeout_seconds=ASK_TIMEOUT_S,
        )
        for error in errors:
            if error:
                raise error
        if time.monotonic() - self._last_healthy > NO_RUNNER_S:
            raise RestartLimitError(
                f"no env runner has been alive for {NO_RUNNER_S:.0f} s: they died more often than "
                "max_runner_restarts allows, or cannot start. Their logs contain the reason"
            )
        if not healthy:
            time.sleep(1.0)  # an iteration without runners does nothing and ends at once
