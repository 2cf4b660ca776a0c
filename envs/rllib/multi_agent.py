"""HPCSimulatorMultiAgentEnv: the agents of a simulation as RLlib's agents."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ray.rllib.env.multi_agent_env import MultiAgentEnv

from envs.agents import Agent, AgentsByName, StepResult


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
