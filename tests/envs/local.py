"""The pendulum in this process: what environments on gangs are compared with."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from tests.envs.pendulum import FAULTS, OPTIONS, moved, simulated

SEEDS = 1 << 31


class LocalPendulum(gymnasium.Env[Any, Any]):
    """One pendulum with one agent, without a gang."""

    metadata = {"render_modes": []}  # noqa: RUF012

    def __init__(self, **options: Any) -> None:
        self.options = {**OPTIONS, **FAULTS, **options}
        size = self.options["size"]
        self.observation_space = spaces.Box(-100.0, 100.0, (size,), np.float32)
        self.action_space = spaces.Box(-1.0, 1.0, (1,), np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        drawn = int(self.np_random.integers(SEEDS)) if seed is None else seed
        self.state = simulated(self.options, np.random.default_rng(drawn))
        self.steps = 0
        return self.state.ravel().astype(np.float32), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.steps += 1
        self.state = x = moved(self.options, self.state, np.asarray(action, np.float64))
        return (
            x.ravel().astype(np.float32),
            float(-(x[:, 0] ** 2)[0]),
            bool(abs(x).max() > self.options["limit"]),
            self.steps >= self.options["length"],
            {"energy": float((x**2).sum()), "ranks": 1.0},
        )
