"""HPCSimulatorEnv: a gymnasium environment whose step is a time step of an MPI simulation."""

from __future__ import annotations

import copy
import warnings
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, Generic, Protocol, Self, TypeVar

import gymnasium
import numpy as np
from gymnasium.utils import EzPickle
from numpy.typing import NDArray

from envs.config import EnvConfig
from envs.errors import (
    EnvConfigError,
    EnvError,
    GangLostError,
    SimulationError,
    for_caller,
    of_failure,
)
from envs.simulation import Simulation
from envs.spec import ActionCheck, Records, SimulatorSpec

SEEDS = 1 << 31  # seeds of simulators are below: their generators may take no more bits

Step = tuple[Any, float, bool, bool, dict[str, Any]]


def seed_of_episode(random: np.random.Generator, seed: int | None) -> int:
    """The seed that a simulator gets: the user's, if it is below `SEEDS`, or a hash of it.

    Without one it is the next number of `random`.
    """
    if seed is None:
        return int(random.integers(SEEDS))
    return seed if seed < SEEDS else int(np.random.SeedSequence(seed).generate_state(1)[0]) % SEEDS


def check_options(options: Any, known: Sequence[str] = ()) -> None:
    """Warn of options of ``reset`` other than those `known`. Raises `ValueError` for no dict.

    No error: PettingZoo's test of an API gives some.
    """
    example = f", for example with {known[0]}" if known else ""
    if options is not None and not isinstance(options, Mapping):
        raise ValueError(f"options={options!r}: it must be a dict{example}")
    for name in options or ():
        if name not in known:
            warnings.warn(
                f"reset ignores the option {name!r}: options of the simulator are in "
                "config['sim'], for all episodes of an environment",
                stacklevel=3,
            )


class Stepped(Protocol):
    """A simulation that steps in another thread: a `Simulation`, or several (`Gangs`)."""

    def interrupt(self) -> None:
        """Cancel the step in progress."""

    def close(self) -> None:
        """End the gangs."""


S = TypeVar("S", bound=Stepped)


class SteppedEnv(Generic[S]):
    """An environment over a simulation, until it is closed.

    Each environment steps in a thread of its own, which waits for its gang, so that the gangs of
    several environments compute at the same time::

        for env, action in zip(envs, actions):
            env.step_async(action)
        results = [env.step_wait() for env in envs]

    Attributes
    ----------
    closed : bool
    """

    closed = False
    _simulation: S | None = None
    _pending: Future[Any] | None = None
    _stepper: ThreadPoolExecutor | None = None

    @abstractmethod
    def _step(self, action: Any) -> Any:
        """Advance by a time step."""

    def _describe(
        self,
        spec: SimulatorSpec,
        config: EnvConfig,
        render_mode: str | None,
        num_envs: int | None = None,
    ) -> None:
        """Set what follows from spec and config. Raises `EnvConfigError`."""
        self.simulator = spec
        spec.check_render_mode(render_mode)
        self.render_mode = render_mode
        self._truncates = config.on_failure == "truncate"
        self._check_action = ActionCheck(spec, config.out_of_bounds, num_envs)

    def _open(self) -> S:
        """The simulation. Raises `EnvError` if the environment is closed."""
        if self._simulation is None:
            raise EnvError("the environment is closed: make another one")
        return self._simulation

    def _idle(self) -> S:
        """The simulation, between two steps. Raises `EnvError`."""
        if self._pending is not None:
            raise EnvError("a step is in progress: call step_wait() first")
        return self._open()

    def step_async(self, action: Any) -> None:
        """Begin a step; `step_wait` must come next.

        Raises
        ------
        EnvError
            If a step is in progress, or the environment is closed.
        """
        self._idle()
        self._stepper = self._stepper or ThreadPoolExecutor(1)
        self._pending = self._stepper.submit(self._step, action)

    def step_wait(self) -> Any:
        """Wait for the step of `step_async`. Returns and raises as ``step``.

        Raises
        ------
        EnvError
            If no step is in progress.
        """
        if self._pending is None:
            raise EnvError("no step is in progress: call step_async(action) first")
        try:
            return self._pending.result()
        except BaseException:  # of the step; or Ctrl-C, or another signal's handler, in the wait
            self._abandon_step()
            raise
        finally:
            self._pending = None

    def _abandon_step(self) -> None:
        """End a step in progress; its result is lost."""
        if self._pending is not None and not self._pending.done():
            self._open().interrupt()
            wait([self._pending])
        self._pending = None

    def close(self, **_: Any) -> None:
        """End the gangs. Closing twice is allowed."""
        self.closed = True
        self._abandon_step()
        if self._stepper is not None:
            self._stepper.shutdown(wait=False)
            self._stepper = None
        simulation, self._simulation = self._simulation, None
        if simulation is not None:
            simulation.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._simulation or 'closed'}>"

    def __str__(self) -> str:
        return repr(self)


class HPCSimulatorEnv(SteppedEnv[Simulation], gymnasium.Env[Any, Any], EzPickle):
    """An environment over a simulator that runs on a gang of MPI ranks.

    Parameters
    ----------
    config : mapping, optional
        The keys of `envs.config.EnvConfig`: ``lib_name``, ``lib_path``, ``num_workers``,
        ``hostname``, ``port``, ``sim``, ... RLlib's EnvContext is accepted.
    render_mode : {None, "rgb_array"}
        The result of `render`.
    **options
        The same keys, for ``gymnasium.make``; they override `config`.

    Raises
    ------
    EnvConfigError
        For an invalid key or value.
    AlchemistError
        If no gang can be started, or the library is not a simulator.

    Notes
    -----
    The spaces come from the simulator. The first environment of a process that uses a simulator
    starts its gang in the constructor; later ones know the spaces, and start theirs in the first
    `reset`. `close` ends the gang, and so does garbage collection. A copy (by pickle or deepcopy)
    is a new environment with the same config, without a gang.

    Counts of losses are in `info` of `reset`, and of the step that ended with a failure, as soon
    as there was one: ``gang_restarts``, ``step_timeouts``, ``dropped_steps``.
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
        checked = EnvConfig.checked(config, options, vector=False)
        simulation = self._simulation = Simulation(checked)
        spec = simulation.spec
        try:
            if spec.agents > 1:
                raise EnvConfigError(
                    f"simulator {checked.lib_name!r} has {spec.agents} agents: use "
                    "HPCSimulatorVectorEnv (or an option in 'sim' that gives it one agent)"
                )
            self._describe(spec, checked, render_mode)
        except BaseException:
            self.close()
            raise
        self.observation_space = spec.observed.space()
        self.action_space = spec.acted.space()
        self._last: Any = None

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Begin an episode. The same seed gives the same observation.

        Without a seed, the episode follows from the last seed. `options` are not used, and a
        warning says so; the config's ``sim`` has the options of the simulator.

        Raises
        ------
        SimulationError, GangLostError, StepTimeoutError
            As `step`. With ``on_failure="truncate"``, `reset` tries again instead.
        RestartLimitError
            If more gangs were lost within an hour than ``max_restarts``.
        ResourceError, LaunchError
            If a new gang is needed and cannot be started.
        """
        simulation = self._idle()
        check_options(options)
        super().reset(seed=seed)
        number = seed_of_episode(self.np_random, seed)
        attempts = 1 + (simulation.config.max_restarts if self._truncates else 0)
        for left in reversed(range(attempts)):
            try:
                records = simulation.begin({0: number})
                self._check(records)
                break
            except (SimulationError, GangLostError) as error:
                if not left:
                    raise for_caller(error) from error.__cause__
        return self._observation(records), dict(simulation.losses.info())

    def step(self, action: Any) -> Step:
        """Advance the simulation by a time step.

        Returns
        -------
        observation : element of `observation_space`
        reward : float
        terminated : bool
            The simulation says that its episode has ended.
        truncated : bool
            The episode has reached its ``episode_length``, or has failed
            (``on_failure="truncate"``).
        info : dict
            The numbers that the simulator names. After a failure: ``gang_lost`` (bool),
            ``failure`` (the error as text) and the counts of losses.

        Raises
        ------
        BadActionError
            Wrong shape, NaN, not a choice, or (``out_of_bounds="refuse"``) out of bounds. Nothing
            was simulated; the episode continues.
        SimulationError
            The simulator raised on a rank.
        NotFiniteError
            An observation or the reward is not finite (``check_finite``).
        GangLostError, StepTimeoutError
            A rank died, or the step took longer than ``step_timeout_s``. The gang is gone.
        """
        self._idle()
        return self._step(action)

    def _step(self, action: Any) -> Step:
        simulation = self._open()
        if not simulation.running:
            raise EnvError("there is no episode: call reset() first")
        numbers = self._check_action(action)
        try:
            records = simulation.advance(numbers)
            self._check(records)
        except (SimulationError, GangLostError) as error:
            simulation.running = False
            if not self._truncates:
                raise for_caller(error) from error.__cause__
            info = of_failure(error) | simulation.losses.info()
            return copy.deepcopy(self._last), simulation.config.failure_reward, False, True, info
        length = self.simulator.episode_length
        scores = records.scores[0].tolist()
        return (
            self._observation(records),
            scores[0],
            bool(records.ended[0]),
            length is not None and bool(simulation.steps[0] >= length),
            dict(zip(self.simulator.info, scores[1:], strict=True)),
        )

    def _check(self, records: Records) -> None:
        if records.failures:
            raise records.failures[0]

    def _observation(self, records: Records) -> Any:
        observation = self.simulator.observed.one(records.observations)
        if self._truncates:
            self._last = copy.deepcopy(observation)
        return observation

    def render(self) -> NDArray[np.uint8] | None:  # type: ignore[override]
        """The field of the simulation in colours, shape (height, width, 3), or None."""
        if self.render_mode is None:
            return None
        return self.simulator.coloured(self.field())

    def field(self) -> NDArray[np.float32]:
        """The field that `render` colours, as the simulator returns it; in any mode."""
        return self._idle().picture(0)

    def save_state(self) -> NDArray[Any]:
        """The state of the simulation, for `load_state`, if the simulator supports it.

        Raises
        ------
        AlchemistError
            NoSuchRoutineError, if it does not.
        """
        return self._idle().save_state()

    def load_state(self, state: NDArray[Any]) -> None:
        """Restore a state of `save_state`. The step count of the episode continues."""
        self._idle().load_state(state)
