"""HPCSimulatorParallelEnv: the agents of a simulation for PettingZoo's parallel API."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from pettingzoo import ParallelEnv

from envs.agents import Agent, AgentsByName, Space


class HPCSimulatorParallelEnv(AgentsByName, ParallelEnv[Agent, Any, Any]):
    __doc__ = AgentsByName.__doc__

    def observation_space(self, agent: Agent) -> Space:
        """The space of an agent's observations."""
        return self.observation_spaces[agent]

    def action_space(self, agent: Agent) -> Space:
        """The space of an agent's actions."""
        return self.action_spaces[agent]

    def state(self) -> NDArray[Any]:
        """The observations of all agents, one after another. No gang is asked."""
        return np.concatenate([leaf.ravel() for leaf in self._env.observed()])
