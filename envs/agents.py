"""The agents of one simulation by name: what PettingZoo's and RLlib's environments share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from gymnasium import spaces
from gymnasium.vector.utils import iterate
from numpy.typing import NDArray

from envs.errors import BadActionError, EnvConfigError, EnvError
from envs.hpc_env import check_options
from envs.vector_env import HPCSimulatorVectorEnv

Agent = str
Space = spaces.Space[Any]
StepResult = tuple[
    dict[Agent, Any], dict[Agent, float], dict[Agent, bool], dict[Agent, bool], dict[Agent, Any]
]


class AgentsByName:
    """Observations and actions in dicts, with a key for each agent: ``agent_0``, ``agent_1``, ...

    Parameters
    ----------
    config : mapping, optional
        As for `HPCSimulatorEnv`. The simulator says how many agents it has.
    render_mode : {None, "rgb_array"}
        The result of `render`.
    **options
        The keys of the config; they override `config`.

    Raises
    ------
    EnvConfigError
        For an invalid key or value, also for more than one of ``copies``.
    AlchemistError
        If no gang can be started, or the library is not a simulator.

    Attributes
    ----------
    possible_agents : list of str
    agents : list of str
        Those of the current episode: all, or none after its end.
    observation_spaces, action_spaces : dict of str to Space
    """

    metadata: dict[str, Any] = {  # noqa: RUF012 - declared as in gymnasium
        "render_modes": ["rgb_array"],
        "render_fps": 10,
        "name": "alchemist_v0",
        "is_parallelizable": True,
    }

    def __init__(
        self,
        config: Mapping[str, Any] | None = None,
        *,
        render_mode: str | None = None,
        **options: Any,
    ) -> None:
        given = {**config, **options} if isinstance(config, Mapping) else options
        if given.get("copies") not in (None, 1):
            raise EnvConfigError(
                f"config['copies']={given['copies']!r}: {type(self).__name__} has one "
                "simulation; HPCSimulatorVectorEnv has copies of it"
            )
        options["copies"] = 1
        self._env = HPCSimulatorVectorEnv(config, render_mode=render_mode, **options)
        self.render_mode = render_mode
        env = self._env
        self.possible_agents: list[Agent] = [f"agent_{i}" for i in range(env.num_envs)]
        self.agents: list[Agent] = list(self.possible_agents)
        self.observation_spaces: dict[Agent, Space] = dict.fromkeys(
            self.agents, env.single_observation_space
        )
        self.action_spaces: dict[Agent, Space] = dict.fromkeys(self.agents, env.single_action_space)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[Agent, Any], dict[Agent, Any]]:
        """Begin an episode. Raises as `HPCSimulatorEnv.reset`."""
        check_options(options)
        observations, infos = self._env.reset(seed=seed)
        self.agents = list(self.possible_agents)
        return self._each(observations), self._infos(infos)

    def step(self, actions: Mapping[Agent, Any]) -> StepResult:
        """Advance the simulation by a time step, with an action of each agent.

        Raises
        ------
        BadActionError
            If an agent has no action, or an action is invalid.
        SimulationError, GangLostError, StepTimeoutError
            As `HPCSimulatorEnv.step`.
        """
        if not self.agents:
            raise EnvError("there is no episode: call reset() first")
        if not isinstance(actions, Mapping):
            raise BadActionError(
                f"the actions are a {type(actions).__name__}; they must be a dict, with a key for "
                "each agent"
            )
        if set(actions) != set(self.agents):
            missing = sorted(set(self.agents) ^ set(actions))
            raise BadActionError(f"each of {self.agents} needs one action; check {missing}")
        batch = self._batch([actions[agent] for agent in self.agents])
        found, rewards, terminated, truncated, infos = self._env.step(batch)
        if terminated.any() or truncated.any():  # of all agents
            self.agents = []
        names = self.possible_agents
        return (
            self._each(found),
            dict(zip(names, rewards.tolist(), strict=True)),
            dict(zip(names, terminated.tolist(), strict=True)),
            dict(zip(names, truncated.tolist(), strict=True)),
            self._infos(infos),
        )

    def _batch(self, actions: list[Any]) -> Any:
        """The actions of all agents as an action of the vector environment."""
        acted = self._env.simulator.acted
        rows = [acted.taken_apart(action) for action in actions]
        try:
            return acted.composed([np.stack(leaf) for leaf in zip(*rows, strict=True)])
        except ValueError as error:
            raise BadActionError(f"the agents' actions differ in shape: {error}") from None

    def _each(self, observations: Any) -> dict[Agent, Any]:
        each = iterate(self._env.observation_space, observations)
        return dict(zip(self.possible_agents, each, strict=True))

    def _infos(self, infos: dict[str, Any]) -> dict[Agent, Any]:
        return dict(zip(self.possible_agents, self._env.infos_by_env(infos), strict=True))

    def save_state(self) -> NDArray[Any]:
        """As `HPCSimulatorEnv.save_state`."""
        return self._env.save_state()

    def load_state(self, state: NDArray[Any]) -> None:
        """As `HPCSimulatorEnv.load_state`."""
        self._env.load_state(state)

    def render(self) -> NDArray[np.uint8] | None:
        """The field of the simulation in colours, shape (height, width, 3), or None."""
        pictures = self._env.render()
        return None if pictures is None else pictures[0]

    def close(self) -> None:
        """End the gang."""
        self._env.close()
