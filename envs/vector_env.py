"""HPCSimulatorVectorEnv: many sub-environments on one gang, advanced by one call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from gymnasium.utils import EzPickle, seeding
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space
from numpy.typing import NDArray

from envs import errors, pictures
from envs.config import EnvConfig
from envs.errors import EnvConfigError, EnvError
from envs.hpc_env import SEEDS
from envs.simulation import Simulation


class HPCSimulatorVectorEnv(VectorEnv[NDArray[Any], Any, NDArray[Any]], EzPickle):
    """A gymnasium VectorEnv over one gang of MPI ranks.

    Its sub-environments are the copies of a simulation, which are dealt to the ranks, and in
    each copy its agents (the heaters of one plate, say): copy by copy, agent by agent.

    Parameters
    ----------
    config : mapping, optional
        As for `HPCSimulatorEnv`, with ``copies`` (how many simulations) and ``agents`` (how many
        agents each must have).
    num_envs : int, optional
        Sub-environments in all: instead of ``copies``. 1, the default of
        ``gymnasium.make_vec``, is one simulation with all its agents.
    render_mode : {None, "rgb_array"}
        What `render` gives.
    **options
        The config's keys; they win over `config`.

    Raises
    ------
    EnvConfigError
        For a key or a value that cannot be.
    AlchemistError
        If a gang cannot be had, or the library is not a simulator.

    Notes
    -----
    A sub-environment whose episode is over begins the next one with the next `step`, whose
    action it passes over (``AutoresetMode.NEXT_STEP``): as `gymnasium.vector.SyncVectorEnv` does
    with as many `HPCSimulatorEnv`. Agents of one copy begin and end together.
    """

    metadata: dict[str, Any] = {  # noqa: RUF012 - as gymnasium has it
        "render_modes": ["rgb_array"],
        "render_fps": 10,
        "autoreset_mode": AutoresetMode.NEXT_STEP,
    }

    def __init__(
        self,
        config: Mapping[str, Any] | None = None,
        *,
        num_envs: int | None = None,
        render_mode: str | None = None,
        **options: Any,
    ) -> None:
        EzPickle.__init__(self, config, num_envs=num_envs, render_mode=render_mode, **options)
        self._simulation: Simulation | None = None
        given = {**(config or {}), **options}
        num_envs = given.pop("num_envs", num_envs)
        checked = EnvConfig.checked(given, {}, vector=True)
        simulation = self._simulation = Simulation(checked, num_envs)
        spec = self.simulator = simulation.spec
        self._copies, self._agents = simulation.copies, spec.agents
        self.num_envs = self._copies * self._agents
        try:
            if checked.agents not in (None, spec.agents):
                raise EnvConfigError(
                    f"config['agents']={checked.agents}: simulator {checked.lib_name!r} has "
                    f"{spec.agents}"
                )
            if num_envs not in (None, 1, self.num_envs):
                raise EnvConfigError(
                    f"num_envs={num_envs}: there are {self._copies} copies of {spec.agents} agents"
                )
            pictures.check_mode(render_mode, spec)
        except BaseException:
            self.close()
            raise
        self.render_mode = render_mode
        many = spec.agents > 1
        self.single_observation_space = spec.observation_space(agent=many)
        self.single_action_space = spec.action_space(agent=many)
        self.observation_space = batch_space(self.single_observation_space, self.num_envs)
        self.action_space = batch_space(self.single_action_space, self.num_envs)
        self._width = int(np.prod(spec.observation_shape))
        self._random: list[np.random.Generator | None] = [None] * self._copies
        self._seeds = [-1] * self._copies
        self._steps = np.zeros(self._copies, np.int64)
        self._over = np.zeros(self._copies, bool)
        self._observations = np.zeros(
            self.observation_space.shape or (), self.single_observation_space.dtype
        )

    # --- episodes and steps ---

    def reset(
        self,
        *,
        seed: int | Sequence[int | None] | None = None,
        options: dict[str, Any] | None = None,
    ) -> tuple[NDArray[Any], dict[str, Any]]:
        """Begin an episode in every copy, or in those of a mask.

        Parameters
        ----------
        seed : int, or sequence of int, optional
            Of the first copy, and one more for each further; or one per sub-environment, of which
            each copy takes that of its first agent.
        options : dict, optional
            ``{"reset_mask": mask}``, with a bool per sub-environment.

        Raises
        ------
        ValueError
            For too few or too many seeds, or a mask that parts the agents of a copy.
        SimulationError, GangLostError, StepTimeoutError, RestartLimitError
            As `HPCSimulatorEnv.reset`.
        """
        which = self._masked((options or {}).get("reset_mask"))
        seeds = self._given(seed)
        simulation = self._running()
        if not simulation.running:
            which = np.arange(self._copies)  # a fresh gang has no episodes to keep
        for copy in which:
            self._reseed(copy, seeds[copy])
        try:
            records = simulation.begin(which.tolist(), [self._drawn(c, seeds[c]) for c in which])
        except EnvError as error:
            raise errors.to_raise(error) from error.__cause__
        self._steps[which] = 0
        self._over[which] = False
        self._observe(records, which)
        return self._observations.copy(), {}

    def step(
        self, actions: Any
    ) -> tuple[
        NDArray[Any], NDArray[np.float64], NDArray[np.bool_], NDArray[np.bool_], dict[str, Any]
    ]:
        """A time step of every copy, in one call; those whose episode is over begin the next.

        Raises
        ------
        BadActionError, SimulationError, GangLostError, StepTimeoutError
            As `HPCSimulatorEnv.step`.
        """
        simulation = self._running()
        if not simulation.running:
            raise EnvError("there is no episode: reset() begins one")
        numbers = self._numbers(actions)
        fresh = np.flatnonzero(self._over).tolist()
        try:
            records = simulation.advance(
                numbers.tobytes(), fresh, [self._drawn(copy, None) for copy in fresh]
            )
        except EnvError as error:
            raise errors.to_raise(error) from error.__cause__
        self._steps += 1
        self._steps[fresh] = 0
        self._observe(records, slice(None))
        length = self.simulator.episode_length
        stepped = ~self._over
        terminated = (records[:, -1] != 0.0) & stepped
        truncated = stepped & (length is not None and self._steps >= (length or 0))
        self._over = terminated | truncated
        rewards = records[:, self._width : self._width + self._agents].ravel()
        return (
            self._observations.copy(),
            rewards.copy(),
            terminated.repeat(self._agents),
            truncated.repeat(self._agents),
            self._info(records, stepped),
        )

    def _numbers(self, actions: Any) -> NDArray[np.float64]:
        spec = self.simulator
        if spec.agents == 1:
            return spec.numbers(actions, self._copies)
        shape = (self.num_envs, *spec.action_shape[1:])
        array = np.asarray(actions)
        if array.shape != shape:
            raise errors.BadActionError(f"actions of shape {array.shape}: it must be {shape}")
        return spec.numbers(array.reshape(self._copies, *spec.action_shape), self._copies)

    def _observe(self, records: NDArray[np.float64], which: Any) -> None:
        """The observations of these copies out of the records."""
        flat = self._observations.reshape(self._copies, self._width)
        flat[which] = records[which, : self._width]

    def _info(self, records: NDArray[np.float64], stepped: NDArray[np.bool_]) -> dict[str, Any]:
        """Each named number as gymnasium has it: an array, and a mask of who has one."""
        infos: dict[str, Any] = {}
        mask = stepped.repeat(self._agents)
        for column, name in enumerate(self.simulator.info, self._width + self._agents):
            if mask.any():
                values = np.where(stepped, records[:, column], 0.0)
                infos[name] = values.repeat(self._agents)
                infos[f"_{name}"] = mask.copy()
        return infos

    # --- seeds ---

    def _masked(self, mask: Any) -> NDArray[np.intp]:
        """The copies that a mask of sub-environments means."""
        if mask is None:
            return np.arange(self._copies)
        mask = np.asarray(mask)
        if mask.shape != (self.num_envs,) or mask.dtype != bool or not mask.any():
            raise ValueError(
                f"options['reset_mask'] must be {self.num_envs} bools, at least one of them True"
            )
        by_copy = mask.reshape(self._copies, self._agents)
        if not np.array_equal(by_copy.any(axis=1), by_copy.all(axis=1)):
            raise ValueError("options['reset_mask'] parts agents of one simulation")
        return np.flatnonzero(by_copy.all(axis=1))

    def _given(self, seed: int | Sequence[int | None] | None) -> list[int | None]:
        """A seed per copy."""
        if seed is None:
            return [None] * self._copies
        if isinstance(seed, int | np.integer):
            return [int(seed) + copy for copy in range(self._copies)]
        seeds = list(seed)
        if len(seeds) != self.num_envs:
            raise ValueError(f"{len(seeds)} seeds for {self.num_envs} sub-environments")
        return seeds[:: self._agents]

    def _reseed(self, copy: int, seed: int | None) -> None:
        if seed is not None or self._random[copy] is None:
            self._random[copy], self._seeds[copy] = seeding.np_random(seed)

    def _drawn(self, copy: int, seed: int | None) -> int:
        """What the simulation is seeded with for its next episode."""
        if seed is not None:
            return seed % SEEDS
        random = self._random[copy]
        assert random is not None
        return int(random.integers(SEEDS))

    @property
    def np_random_seed(self) -> tuple[int, ...]:  # type: ignore[override]
        """The seed of each sub-environment; -1 before the first reset."""
        return tuple(np.repeat(self._seeds, self._agents).tolist())

    @property  # type: ignore[misc]
    def np_random(self) -> tuple[np.random.Generator, ...]:  # type: ignore[override]
        """The random numbers of each sub-environment; agents of one copy share them."""
        for copy in range(self._copies):
            self._reseed(copy, None)
        return tuple(r for r in self._random if r is not None for _ in range(self._agents))

    # --- the rest ---

    def render(self) -> tuple[NDArray[np.uint8], ...] | None:  # type: ignore[override]
        """A picture per sub-environment, each (height, width, 3); agents of one copy share it."""
        if self.render_mode is None:
            return None
        simulation = self._running()
        shown = [
            pictures.coloured(simulation.picture(copy), self.simulator)
            for copy in range(self._copies)
        ]
        return tuple(picture for picture in shown for _ in range(self._agents))

    def field(self, copy: int = 0) -> NDArray[np.float32]:
        """The field of one copy that `render` colours, as the simulator gives it; in any mode."""
        return self._running().picture(copy)

    def _running(self) -> Simulation:
        if self._simulation is None:
            raise EnvError("the environment is closed: make another one")
        return self._simulation

    def close_extras(self, **kwargs: Any) -> None:
        """End the gang; `close` calls it."""
        simulation, self._simulation = self._simulation, None
        if simulation is not None:
            simulation.close()

    def __enter__(self) -> HPCSimulatorVectorEnv:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self.num_envs}: {self._simulation or 'closed'}>"
