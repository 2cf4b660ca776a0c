"""Ends a training whose environments cannot be restored, with the cause; counts its steps."""

from __future__ import annotations

import time
from typing import Any

from ray.rllib.algorithms.algorithm import Algorithm
from ray.rllib.callbacks.callbacks import RLlibCallback
from ray.rllib.utils.metrics import NUM_ENV_STEPS_SAMPLED_LIFETIME

from envs.errors import RestartLimitError

ASK_TIMEOUT_S = 10.0
NO_RUNNER_S = 120.0  # longer than Ray needs to restart a runner with its gang


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
