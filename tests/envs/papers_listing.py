"""The environment of Rothauge et al. (2019), Section IV, and what gymnasium wants of it today.

`HPCSimulator` is the paper's class as printed; only the modules are this project's. `ForRLlib` adds
the spaces, and the form in which today's gymnasium takes the results of `reset` and `step`.
"""

# ruff: noqa: F403, F405
from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
from ray.rllib.models.torch.fcnet import FullyConnectedNetwork

from alchemist_ray import *


class HPCSimulator(gym.Env[Any, Any]):
    # Initialize simulation environment
    def __init__(self, config: Any) -> None:
        hostname = config["hostname"]
        port = config["port"]
        num_workers = config["num_workers"]
        lname = config["lib_name"]
        lpath = config["lib_path"]
        self.als = AlchemistSession()
        self.als.connect(hostname, port)
        self.als.request_workers(num_workers)
        self.HPClib = self.als.load_library(lname, lpath)

    # Reset simulator
    def reset(self) -> Any:  # type: ignore[override]
        self.HPClib.reset()
        return self.HPClib.get_state()

    # Take a step in the simulation in response to an action
    def step(self, action: Any) -> Any:
        self.HPClib.step(action)
        return self.HPClib.get_state(), self.HPClib.get_score()


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
