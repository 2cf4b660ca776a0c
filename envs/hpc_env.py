"""HPCSimulatorEnv: a gymnasium environment whose step is a time step of an MPI simulation."""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self

import gymnasium
import numpy as np
from gymnasium.utils import EzPickle
from numpy.typing import NDArray

from envs import errors, pictures
from envs.config import EnvConfig
from envs.errors import EnvConfigError, EnvError
from envs.simulation import Simulation

SEEDS = 1 << 31


class HPCSimulatorEnv(gymnasium.Env[NDArray[Any], Any], EzPickle):
    """An environment over a simulator that runs on a gang of MPI ranks.

    Parameters
    ----------
    config : mapping, optional
        Keys as `envs.config.EnvConfig` lists them: ``lib_name``, ``lib_path``, ``num_workers``,
        ``hostname``, ``port``, ``sim``, ... RLlib's EnvContext is one.
    render_mode : {None, "rgb_array"}
        What `render` gives.
    **options
        The same keys, for ``gymnasium.make``; they win over `config`.

    Raises
    ------
    EnvConfigError
        For a key or a value that cannot be.
    AlchemistError
        If a gang cannot be had, or the library is not a simulator.

    Notes
    -----
    The spaces come from the simulator. The first environment of a process that uses it
    starts its gang in the constructor; later ones know the spaces, and start theirs in the
    first `reset`. `close` ends the gang, and so does dropping the environment. A copy (by
    pickle or deepcopy) is a new environment of the same config, without a gang.
    """

    metadata: dict[str, Any] = {"render_modes": ["rgb_array"], "render_fps": 10}  # noqa: RUF012

    def __init__(
        self,
        config: Mapping[str, Any] | None = None,
        *,
        render_mode: str | None = None,
        **options: Any,
    ) -> None:
        EzPickle.__init__(self, config, render_mode=render_mode, **options)
        self._simulation: Simulation | None = None
        checked = EnvConfig.checked(config, options, vector=False)
        self._simulation = Simulation(checked)
        self.simulator = self._simulation.spec
        try:
            if self.simulator.agents > 1:
                raise EnvConfigError(
                    f"simulator {checked.lib_name!r} has {self.simulator.agents} agents: it is for "
                    "HPCSimulatorVectorEnv (or ask it for one, by an option in 'sim')"
                )
            pictures.check_mode(render_mode, self.simulator)
        except BaseException:
            self.close()
            raise
        self.render_mode = render_mode
        self.observation_space = self.simulator.observation_space()
        self.action_space = self.simulator.action_space()
        self._observations = int(np.prod(self.simulator.observation_shape))
        self._steps = 0

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[NDArray[Any], dict[str, Any]]:
        """Begin an episode. The same seed gives the same observation.

        Without a seed the episode follows from the last one that was given. `options` are
        not used: what can be set is set by the config's ``sim``.

        Raises
        ------
        SimulationError, GangLostError, StepTimeoutError
            As `step`.
        RestartLimitError
            If gangs were lost more than ``max_restarts`` times.
        ResourceError, LaunchError
            If a fresh gang is needed and cannot be had.
        """
        super().reset(seed=seed)
        given = int(self.np_random.integers(SEEDS)) if seed is None else seed % SEEDS
        try:
            records = self._running().begin([0], [given])
        except EnvError as error:
            raise errors.to_raise(error) from error.__cause__
        self._steps = 0
        return self._observation(records[0]), {}

    def step(self, action: Any) -> tuple[NDArray[Any], float, bool, bool, dict[str, Any]]:
        """A time step of the simulation.

        Returns
        -------
        observation : ndarray
        reward : float
        terminated : bool
            The simulation says that it has ended.
        truncated : bool
            The episode has its ``episode_length``.
        info : dict
            Numbers that the simulator names.

        Raises
        ------
        BadActionError
            Of another shape, with NaN, or no choice. Nothing was simulated; the episode goes on.
        SimulationError
            The simulator raised on a rank.
        GangLostError, StepTimeoutError
            A rank died; or this took longer than ``step_timeout_s``. Nothing of the gang is left.
        """
        simulation = self._running()
        if not simulation.running:
            raise EnvError("there is no episode: reset() begins one")
        numbers = self.simulator.numbers(action)
        try:
            record = simulation.advance(numbers.tobytes())[0]
        except EnvError as error:
            raise errors.to_raise(error) from error.__cause__
        self._steps += 1
        length = self.simulator.episode_length
        scores = record[self._observations : -1].tolist()
        return (
            self._observation(record),
            scores[0],
            bool(record[-1]),
            length is not None and self._steps >= length,
            dict(zip(self.simulator.info, scores[1:], strict=True)),
        )

    def _observation(self, record: NDArray[np.float64]) -> NDArray[Any]:
        box = self.observation_space
        flat = record[: self._observations]
        assert box.dtype is not None
        return flat.astype(box.dtype).reshape(self.simulator.observation_shape)

    def render(self) -> NDArray[np.uint8] | None:  # type: ignore[override]
        """A picture of the simulation's field, shape (height, width, 3); None in no mode."""
        if self.render_mode is None:
            return None
        return pictures.coloured(self._running().picture(0), self.simulator)

    def field(self) -> NDArray[np.float32]:
        """The field that `render` colours, as the simulator gives it; in any mode."""
        return self._running().picture(0)

    def save_state(self) -> NDArray[Any]:
        """The simulation's state, if the simulator can tell it, as its library has it."""
        return self._running().save_state()

    def load_state(self, state: NDArray[Any]) -> None:
        """Go back to what `save_state` gave. The steps of the episode are counted on."""
        self._running().load_state(state)

    def _running(self) -> Simulation:
        if self._simulation is None:
            raise EnvError("the environment is closed: make another one")
        return self._simulation

    def close(self) -> None:
        """End the gang. Closing twice is fine."""
        simulation, self._simulation = self._simulation, None
        if simulation is not None:
            simulation.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None = None,
        error: BaseException | None = None,
        trace: TracebackType | None = None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._simulation or 'closed'}>"

    __str__ = __repr__
