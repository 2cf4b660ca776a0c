"""HPCSimulatorVecEnv: gangs as a vector environment of Stable-Baselines3."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import gymnasium
import numpy as np
from gymnasium.vector.utils import iterate
from numpy.typing import NDArray
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.vec_env import VecEnv
from stable_baselines3.common.vec_env.base_vec_env import VecEnvIndices, VecEnvStepReturn

from envs.hpc_env import check_options
from envs.vector_env import HPCSimulatorVectorEnv


class HPCSimulatorVecEnv(VecEnv):
    """A Stable-Baselines3 ``VecEnv`` over one or more gangs with many copies of a simulation.

    Its sub-environments are those of `HPCSimulatorVectorEnv`, which is in `env`: the agents of all
    copies. A sub-environment whose episode ends begins the next one in the same step, as
    Stable-Baselines3 expects; the last observation is in ``info["terminal_observation"]``. Return,
    length and time of the episode are in ``info["episode"]``, from which Stable-Baselines3 logs its
    means: a `VecMonitor` is not needed.

    Parameters
    ----------
    config, num_envs, render_mode, **options
        As for `HPCSimulatorVectorEnv`.
    """

    def __init__(
        self,
        config: Mapping[str, Any] | None = None,
        *,
        num_envs: int | None = None,
        render_mode: str | None = None,
        **options: Any,
    ) -> None:
        self.env = env = HPCSimulatorVectorEnv(
            config, num_envs=num_envs, render_mode=render_mode, **options
        )
        super().__init__(env.num_envs, env.single_observation_space, env.single_action_space)
        self._returns, self._lengths = np.zeros(env.num_envs), np.zeros(env.num_envs, np.int64)
        self._started = time.monotonic()

    def reset(self) -> Any:
        """Begin an episode in every copy; returns the observations."""
        for options in self._options:
            check_options(options)
        seeds = list(self._seeds)
        observations, infos = self.env.reset(seed=None if None in seeds else seeds)
        self.reset_infos = self.env.infos_by_env(infos)
        self._reset_seeds()
        self._reset_options()
        self._returns[:], self._lengths[:] = 0, 0
        return observations

    def step_async(self, actions: NDArray[Any]) -> None:
        """Begin a step."""
        self.env.step_async(actions)

    def step_wait(self) -> VecEnvStepReturn:
        """Wait for the step; begin the episodes that follow those that have ended."""
        observations, rewards, terminated, truncated, infos = self.env.step_wait()
        over = terminated | truncated
        each = self.env.infos_by_env(infos)
        for info, cut in zip(each, truncated & ~terminated, strict=True):
            info["TimeLimit.truncated"] = bool(cut)
        self._returns += rewards
        self._lengths += 1
        if over.any():
            last = list(iterate(self.env.observation_space, observations))
            for number in np.flatnonzero(over).tolist():
                each[number]["terminal_observation"] = last[number]
                each[number]["episode"] = {
                    "r": float(self._returns[number]), "l": int(self._lengths[number]),
                    "t": round(time.monotonic() - self._started, 6),
                }  # fmt: skip
                self._returns[number] = self._lengths[number] = 0
            observations, first = self.env.reset(options={"reset_mask": over})
            for number, info in enumerate(self.env.infos_by_env(first)):
                if over[number]:
                    self.reset_infos[number] = info
        return observations, rewards.astype(np.float32), over, each

    def close(self) -> None:
        """End the gangs."""
        self.env.close()

    def get_images(self) -> Sequence[NDArray[np.uint8] | None]:
        """A picture of each sub-environment."""
        return self.env.render() or [None] * self.num_envs

    def get_attr(self, attr_name: str, indices: VecEnvIndices = None) -> list[Any]:
        """An attribute of the environment, once for each sub-environment."""
        return [getattr(self.env, attr_name)] * len(list(self._get_indices(indices)))

    def set_attr(self, attr_name: str, value: Any, indices: VecEnvIndices = None) -> None:
        """Set an attribute of the environment, which all sub-environments share."""
        setattr(self.env, attr_name, value)

    def env_method(
        self, method_name: str, *args: Any, indices: VecEnvIndices = None, **kwargs: Any
    ) -> list[Any]:
        """Call a method of the environment once; the result for each sub-environment."""
        result = getattr(self.env, method_name)(*args, **kwargs)
        return [result] * len(list(self._get_indices(indices)))

    def env_is_wrapped(
        self,
        wrapper_class: type[gymnasium.Wrapper[Any, Any, Any, Any]],
        indices: VecEnvIndices = None,
    ) -> list[bool]:
        """Whether a sub-environment has what a wrapper adds: `Monitor`'s episodes, nothing else."""
        return [wrapper_class is Monitor] * len(list(self._get_indices(indices)))
