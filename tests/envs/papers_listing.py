"""The environment of Rothauge et al. (2019), Section IV, and what gymnasium wants of it today.

`HPCSimulator` has the paper's calls, with this project's modules instead of the paper's. `ForRLlib`
adds the spaces, and the form in which today's gymnasium takes the results of `reset` and `step`.
"""

# ruff: noqa: F403, F405
from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
from ray.rllib.models.torch.fcnet import FullyConnectedNetwork

from alchemist_ray import *


class HPCSimulator(gym.Env[Any, Any]):
    def __init__(self, config: Any) -> None:
        self.als = AlchemistSession()
        self.als.connect(config["hostname"], config["port"])
        self.als.request_workers(config["num_workers"])
        self.lib = self.als.load_library(config["lib_name"], config["lib_path"])

    def reset(self) -> Any:  # type: ignore[override]
        self.lib.reset()
        return self.lib.get_state()

    def step(self, action: Any) -> Any:
        self.lib.step(action)
        return self.lib.get_state(), self.lib.get_score()


class ForRLlib(HPCSimulator):
    observation_space = gym.spaces.Box(-np.inf, np.inf, (2,), np.float32)
    action_space = gym.spaces.Box(-1.0, 1.0, (1,), np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:  # type: ignore[override]
        return np.array(super().reset(), np.float32), {}

    def step(self, action: Any) -> Any:
        state, score = super().step(action.tolist())
        return np.array(state, np.float32), score[0], False, False, {}

    def close(self) -> None:
        self.als.stop()


class CustomModel(FullyConnectedNetwork):
    """A model of one's own, for ``ModelCatalog.register_custom_model``."""
