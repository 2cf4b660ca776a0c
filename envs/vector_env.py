"""HPCSimulatorVectorEnv: many sub-environments on one or more gangs, advanced by one call."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
from gymnasium.utils import EzPickle, seeding
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space, iterate
from numpy.typing import NDArray

from alchemist_ray.errors import ResourceError
from envs.config import EnvConfig
from envs.errors import (
    EnvConfigError,
    EnvError,
    GangLostError,
    SimulationError,
    for_caller,
    of_failure,
)
from envs.hpc_env import SteppedEnv, check_options, seed_of_episode
from envs.losses import Losses
from envs.simulation import Simulation
from envs.spec import Records, SimulatorSpec

Flags = NDArray[np.bool_]
Step = tuple[Any, NDArray[np.float64], Flags, Flags, dict[str, Any]]
# Work of a gang: its simulation, its copies, and the seeds of those of them that begin.
Work = Callable[[Simulation, range, dict[int, int]], Records]


class Gangs:
    """Copies of a simulator on one or more gangs.

    Parameters
    ----------
    config : EnvConfig

    Raises
    ------
    EnvConfigError
        If there are more gangs than copies.
    AlchemistError
        If the first gang is needed for the spec and does not start.
    """

    def __init__(self, config: EnvConfig) -> None:
        self.losses = Losses(config.lib_name)
        share = None if config.copies is None else config.copies // config.gangs
        first = Simulation(replace(config, copies=share), self.losses)
        self._parts = [first]
        self.spec: SimulatorSpec = first.spec
        self.copies = config.copies or max(1, (config.num_envs or 1) // self.spec.agents)
        if self.copies < config.gangs:
            first.close()
            raise EnvConfigError(
                f"config['gangs'] must be 1 to {self.copies} (the copies); got {config.gangs}"
            )
        self._parts += [Simulation(config, self.losses) for _ in range(config.gangs - 1)]
        bounds = [i * self.copies // config.gangs for i in range(config.gangs + 1)]
        self._ranges = [range(a, b) for a, b in pairwise(bounds)]
        for part, copies in zip(self._parts, self._ranges, strict=True):
            part.copies = len(copies)
        self._threads = ThreadPoolExecutor(config.gangs) if config.gangs > 1 else None

    def without_episodes(self) -> list[int]:
        """The copies of gangs without an episode: new gangs, or gangs that have failed."""
        parts = zip(self._parts, self._ranges, strict=True)
        return [copy for part, copies in parts if not part.running for copy in copies]

    def steps(self) -> NDArray[np.int64]:
        """The steps of the copies in their episodes."""
        return np.concatenate([part.steps for part in self._parts])

    def stop_episodes(self) -> None:
        """End all episodes: `begin` must come next."""
        for part in self._parts:
            part.running = False

    def interrupt(self) -> None:
        """Cancel the orders in progress, from another thread."""
        for part in self._parts:
            part.interrupt()

    def begin(self, seeds: dict[int, int]) -> Records:
        """Begin an episode in the copies of `seeds`; starts the gangs that are missing."""
        busy = [number for number, copies in enumerate(self._ranges) if seeds.keys() & set(copies)]
        return self._each(busy, seeds, lambda part, _, mine: part.begin(mine))

    def advance(self, actions: NDArray[np.float64], seeds: dict[int, int]) -> Records:
        """Advance every copy; those of `seeds` begin an episode instead.

        On a gang without an episode, only the copies of `seeds` begin.
        """

        def work(part: Simulation, copies: range, mine: dict[int, int]) -> Records:
            if not part.running:
                return part.begin(mine)
            return part.advance(actions[copies.start : copies.stop], mine)

        return self._each(range(len(self._parts)), seeds, work)

    def _each(self, busy: Sequence[int], seeds: dict[int, int], work: Work) -> Records:
        """Do the work of some gangs, all at once, and put the results together.

        The records of copies of a gang that failed or had nothing to do are zeros.
        """
        found: list[Records | EnvError | None] = [None] * len(self._parts)

        def run(number: int) -> None:
            part, copies = self._parts[number], self._ranges[number]
            mine = {copy - copies.start: seeds[copy] for copy in copies if copy in seeds}
            try:
                found[number] = work(part, copies, mine)
            except (SimulationError, GangLostError) as error:
                part.running = False
                found[number] = error

        if self._threads is None or len(busy) == 1:
            for number in busy:
                run(number)
        else:
            futures = [self._threads.submit(run, number) for number in busy]
            try:
                wait(futures)
            except BaseException:  # Ctrl-C: the threads must be back before the next step
                self.interrupt()
                wait(futures)
                raise
            for future in futures:
                future.result()
        return self._merged(found)

    def _merged(self, found: Sequence[Records | EnvError | None]) -> Records:
        only = found[0]
        if len(found) == 1 and isinstance(only, Records):
            return only
        spec = self.spec
        records = Records(
            [np.zeros((self.copies, leaf.count), leaf.dtype) for leaf in spec.observed.leaves],
            np.zeros((self.copies, spec.agents + len(spec.info))),
            np.zeros(self.copies, bool),
            {},
        )
        for copies, result in zip(self._ranges, found, strict=True):
            if isinstance(result, EnvError):
                records.failures.update(dict.fromkeys(copies, result))
            elif result is not None:
                part = slice(copies.start, copies.stop)
                for whole, mine in zip(records.observations, result.observations, strict=True):
                    whole[part] = mine
                records.scores[part] = result.scores
                records.ended[part] = result.ended
                for copy, why in result.failures.items():
                    records.failures[copies.start + copy] = why
        return records

    def owner(self, copy: int) -> tuple[Simulation, int]:
        """The gang of a copy, and its number there."""
        if isinstance(copy, int | np.integer):
            for part, copies in zip(self._parts, self._ranges, strict=True):
                if copy in copies:
                    return part, int(copy) - copies.start
        raise EnvError(f"there is no copy {copy!r}: copies are numbered 0 to {self.copies - 1}")

    def close(self) -> None:
        """End all gangs."""
        for part in self._parts:
            part.close()
        if self._threads is not None:
            self._threads.shutdown(wait=False)

    def __repr__(self) -> str:
        return ", ".join(map(repr, self._parts))


class HPCSimulatorVectorEnv(SteppedEnv[Gangs], VectorEnv[Any, Any, NDArray[Any]], EzPickle):
    """A gymnasium VectorEnv over one or more gangs of MPI ranks.

    Its sub-environments are the agents (the heaters of a plate, for example) of all copies of a
    simulation: copy by copy, agent by agent. The copies are distributed over the ranks.

    Parameters
    ----------
    config : mapping, optional
        As for `HPCSimulatorEnv`, and ``copies`` (number of simulations), ``agents`` (number of
        agents that each must have), ``gangs`` (number of gangs that share the copies).
    num_envs : int, optional
        Number of sub-environments, instead of ``copies``. 1, the default of
        ``gymnasium.make_vec``, is one simulation with all its agents.
    render_mode : {None, "rgb_array"}
        The result of `render`.
    autoreset_mode : AutoresetMode or str
        ``NEXT_STEP`` (default) or ``SAME_STEP``.
    **options
        The keys of the config; they override `config`.

    Raises
    ------
    EnvConfigError
        For an invalid key or value.
    AlchemistError
        If no gang can be started, or the library is not a simulator.

    Notes
    -----
    A sub-environment whose episode is over begins the next one in the next `step`, which ignores
    its action (``AutoresetMode.NEXT_STEP``), like `gymnasium.vector.SyncVectorEnv` over as many
    `HPCSimulatorEnv`. With ``SAME_STEP`` it begins in the same `step`, and ``infos["final_obs"]``
    and ``infos["final_info"]`` have the end of the last one: a second message to the ranks, when an
    episode ends. The agents of a copy begin and end together.

    A gang fails as a whole. With one gang (the default, and the fastest), a dead rank ends the
    episodes of all copies; with ``gangs=copies``, of one. ``on_failure="truncate"`` truncates these
    episodes, and the next step begins new ones on a new gang; the other copies continue.
    """

    metadata: dict[str, Any] = {  # noqa: RUF012 - declared as in gymnasium
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
        autoreset_mode: AutoresetMode | str = AutoresetMode.NEXT_STEP,
        **options: Any,
    ) -> None:
        EzPickle.__init__(
            self, config, num_envs=num_envs, render_mode=render_mode,
            autoreset_mode=autoreset_mode, **options,
        )  # fmt: skip
        mode = getattr(autoreset_mode, "name", str(autoreset_mode)).upper()
        if mode not in (AutoresetMode.NEXT_STEP.name, AutoresetMode.SAME_STEP.name):
            raise EnvConfigError(
                f"autoreset_mode={autoreset_mode!r}: it must be AutoresetMode.NEXT_STEP or "
                "SAME_STEP. (reset(options={'reset_mask': ...}) begins episodes of your choice)"
            )
        self.metadata = {**self.metadata, "autoreset_mode": AutoresetMode[mode]}
        if num_envs is not None and not (isinstance(config, Mapping) and "num_envs" in config):
            options["num_envs"] = num_envs
        checked = EnvConfig.checked(config, options, vector=True)
        num_envs = checked.num_envs
        gangs = self._simulation = Gangs(checked)
        spec = gangs.spec
        self._copies, self._agents = gangs.copies, spec.agents
        self.num_envs = self._copies * self._agents
        try:
            if checked.agents not in (None, spec.agents):
                raise EnvConfigError(
                    f"config['agents'] must be {spec.agents}, the number of agents of simulator "
                    f"{checked.lib_name!r}; got {checked.agents}"
                )
            if num_envs not in (None, 1, self.num_envs):
                raise EnvConfigError(
                    f"num_envs must be {self.num_envs} ({self._copies} copies with {spec.agents} "
                    f"agents each); got {num_envs}"
                )
            self._describe(spec, checked, render_mode, self.num_envs)
            many = spec.agents > 1
            self.single_observation_space = spec.observed.space(agent=many)
            self.single_action_space = spec.acted.space(agent=many)
            self.observation_space = batch_space(self.single_observation_space, self.num_envs)
            self.action_space = batch_space(self.single_action_space, self.num_envs)
        except BaseException as error:
            self.close()
            if isinstance(error, MemoryError):
                raise ResourceError(
                    f"{self.num_envs} sub-environments do not fit into the memory of this process: "
                    f"{error}. Use fewer copies"
                ) from None
            raise
        self._failure_reward = checked.failure_reward
        self._retries = checked.max_restarts
        self._random: dict[int, np.random.Generator] = {}
        self._over = np.zeros(self._copies, bool)
        self._lost: dict[int, EnvError] = {}
        self._observations = [
            np.zeros((self._copies, leaf.count), leaf.dtype) for leaf in spec.observed.leaves
        ]

    # --- episodes and steps ---

    def reset(
        self,
        *,
        seed: int | Sequence[int | None] | None = None,
        options: dict[str, Any] | None = None,
    ) -> tuple[Any, dict[str, Any]]:
        """Begin an episode in every copy, or in those of a mask.

        Parameters
        ----------
        seed : int, or sequence of int, optional
            The seed of the first copy; each further copy has the next number. Or one per
            sub-environment; each copy takes that of its first agent.
        options : dict, optional
            ``{"reset_mask": mask}``, with a bool per sub-environment.

        Raises
        ------
        ValueError
            For too few or too many seeds, or a mask that separates the agents of a copy.
        SimulationError, GangLostError, StepTimeoutError, RestartLimitError
            As `HPCSimulatorEnv.reset`.
        """
        gangs = self._idle()
        check_options(options, ["reset_mask"])
        chosen = self._masked((options or {}).get("reset_mask")).tolist()
        seeds = self._given(seed)
        # A new gang has no episodes to continue.
        ordered = sorted({*chosen, *gangs.without_episodes()})
        for copy in ordered:
            self._lost.pop(copy, None)
        self._begin({copy: self._drawn(copy, seeds[copy]) for copy in ordered})
        self._over[ordered] = False
        return self._observation(), self._added({}, range(self._copies), gangs.losses.info())

    def _begin(self, seeds: dict[int, int]) -> None:
        """Begin episodes; with ``on_failure="truncate"``, try again what fails."""
        gangs = self._open()
        for left in reversed(range(1 + (self._retries if self._truncates else 0))):
            records = gangs.begin(seeds)
            self._observe(records, [copy for copy in seeds if copy not in records.failures])
            if not records.failures:
                return
            if not left:
                self._raise(records)
            # Episodes that were in progress on a gang that is lost now: the next step says so.
            self._lost |= {c: why for c, why in records.failures.items() if c not in seeds}
            seeds = {copy: seeds[copy] for copy in records.failures if copy in seeds}

    def step(self, actions: Any) -> Step:
        """Advance every copy by a time step; those whose episode is over begin the next one.

        Raises
        ------
        BadActionError, SimulationError, GangLostError, StepTimeoutError
            As `HPCSimulatorEnv.step`.
        """
        self._idle()
        return self._step(actions)

    def _step(self, actions: Any) -> Step:
        gangs = self._open()
        without = gangs.without_episodes()
        if without and not (self._truncates and self._over[without].all()):
            raise EnvError("there is no episode: call reset() first")
        numbers = self._check_action(actions)
        fresh = np.flatnonzero(self._over).tolist()
        lost = {copy: why for copy, why in self._lost.items() if not self._over[copy]}
        begun = {copy: self._drawn(copy, None) for copy in (*fresh, *lost)}
        records = gangs.advance(numbers, begun)
        records.failures.update(lost)
        self._lost = {}
        if records.failures and not self._truncates:
            self._raise(records)
        failed = np.zeros(self._copies, bool)
        failed[list(records.failures)] = True
        stepped = ~self._over
        self._observe(records, np.flatnonzero(~failed))
        if again := [copy for copy in fresh if failed[copy]]:
            self._begin({copy: self._drawn(copy, None) for copy in again})
        length = self.simulator.episode_length
        terminated = records.ended & stepped & ~failed
        truncated = stepped & (failed | (length is not None and gangs.steps() >= (length or 0)))
        self._over = terminated | truncated
        rewards = np.where(failed[:, None], self._failure_reward, records.scores[:, : self._agents])
        infos = self._info(records.scores, stepped & ~failed)
        for copy, error in records.failures.items():
            if stepped[copy]:
                info = of_failure(error) | gangs.losses.info()
                infos = self._added(infos, [copy], info)
        if self.metadata["autoreset_mode"] == AutoresetMode.SAME_STEP and self._over.any():
            infos = self._begin_at_once(infos)
        return (
            self._observation(),
            rewards.ravel(),
            terminated.repeat(self._agents),
            truncated.repeat(self._agents),
            infos,
        )

    def _begin_at_once(self, infos: dict[str, Any]) -> dict[str, Any]:
        """Begin the next episodes of the copies whose episode is over; the infos then."""
        ended = self._over.repeat(self._agents)
        last = list(iterate(self.observation_space, self._observation()))
        infos_by_env = self.infos_by_env(infos)
        infos = {}
        for env, info in enumerate(infos_by_env):
            if ended[env]:
                info = {"final_obs": last[env], "final_info": info}
            infos = self._add_info(infos, info, env)
        over = np.flatnonzero(self._over).tolist()
        self._begin({copy: self._drawn(copy, None) for copy in over})
        self._over[over] = False
        return infos

    def _raise(self, records: Records) -> None:
        """Raise the first failure; all episodes must be reset then."""
        self._open().stop_episodes()
        error = next(iter(records.failures.values()))
        raise for_caller(error) from error.__cause__

    def _observe(self, records: Records, copies: Any) -> None:
        """Keep the observations of these copies."""
        if len(copies) == self._copies:
            self._observations = records.observations
            return
        for kept, found in zip(self._observations, records.observations, strict=True):
            kept[copies] = found[copies]

    def _observation(self) -> Any:
        return self.simulator.observed.composed(self.observed())

    def observed(self) -> list[NDArray[Any]]:
        """Copies of the last observations: the leaves of the space, (num_envs, ...) each."""
        leaves = self.simulator.observed.leaves
        many = self._agents > 1
        return [
            kept.copy().reshape(self.num_envs, *leaf.shape(agent=many))
            for leaf, kept in zip(leaves, self._observations, strict=True)
        ]

    def _info(self, scores: NDArray[np.float64], stepped: NDArray[np.bool_]) -> dict[str, Any]:
        """Each named number in gymnasium's form: an array, and a mask of its valid elements."""
        infos: dict[str, Any] = {}
        mask = stepped.repeat(self._agents)
        for column, name in enumerate(self.simulator.info, self._agents):
            if mask.any():
                infos[name] = np.where(stepped, scores[:, column], 0.0).repeat(self._agents)
                infos[f"_{name}"] = mask.copy()
        return infos

    def _added(
        self, infos: dict[str, Any], copies: Iterable[int], info: dict[str, Any]
    ) -> dict[str, Any]:
        """Infos with those of some copies, the same for each of their sub-environments."""
        for copy in copies if info else ():
            for env in range(copy * self._agents, (copy + 1) * self._agents):
                infos = self._add_info(infos, info, env)
        return infos

    def infos_by_env(self, infos: dict[str, Any]) -> list[dict[str, Any]]:
        """The infos of `reset` or `step` as a dict for each sub-environment."""
        columns = [
            (name, infos[name].tolist(), infos[f"_{name}"]) for name in infos if f"_{name}" in infos
        ]
        return [
            {name: values[env] for name, values, valid in columns if valid[env]}
            for env in range(self.num_envs)
        ]

    # --- seeds ---

    def _masked(self, mask: Any) -> NDArray[np.intp]:
        """The copies that a mask of sub-environments selects."""
        if mask is None:
            return np.arange(self._copies)
        mask = np.asarray(mask)
        if mask.shape != (self.num_envs,) or mask.dtype != bool or not mask.any():
            raise ValueError(
                f"options['reset_mask'] must be {self.num_envs} bools, at least one of them True"
            )
        by_copy = mask.reshape(self._copies, self._agents)
        if not np.array_equal(by_copy.any(axis=1), by_copy.all(axis=1)):
            raise ValueError("options['reset_mask'] must be equal for all agents of one simulation")
        return np.flatnonzero(by_copy.all(axis=1))

    def _given(self, seed: int | Sequence[int | None] | None) -> list[int | None]:
        """A seed per copy."""
        if seed is None:
            return [None] * self._copies
        if isinstance(seed, int | np.integer):
            return [int(seed) + copy for copy in range(self._copies)]
        seeds = list(seed) if isinstance(seed, Iterable) and not isinstance(seed, str) else None
        if seeds is None:
            raise ValueError(f"seed={seed!r}: it must be an integer, or one per sub-environment")
        if len(seeds) != self.num_envs:
            raise ValueError(f"{len(seeds)} seeds for {self.num_envs} sub-environments")
        return [int(x) if isinstance(x, np.integer) else x for x in seeds[:: self._agents]]

    def _drawn(self, copy: int, seed: int | None) -> int:
        """The seed of the simulation for its next episode; it may follow from an earlier one."""
        if seed is not None or copy not in self._random:
            self._random[copy], _ = seeding.np_random(seed)
        return seed_of_episode(self._random[copy], seed)

    # --- pictures, closing ---

    def render(self) -> tuple[NDArray[np.uint8], ...] | None:  # type: ignore[override]
        """A picture per sub-environment, each (height, width, 3); agents of one copy share it."""
        if self.render_mode is None:
            return None
        shown = [self.simulator.coloured(self.field(copy)) for copy in range(self._copies)]
        return tuple(picture for picture in shown for _ in range(self._agents))

    def field(self, copy: int = 0) -> NDArray[np.float32]:
        """The field that `render` colours, of one copy, as the simulator returns it."""
        part, local = self._idle().owner(copy)
        return part.picture(local)

    def save_state(self, copy: int = 0) -> NDArray[Any]:
        """The state of a copy, for `load_state`, if the simulator supports it.

        Raises
        ------
        AlchemistError
            NoSuchRoutineError, if it does not.
        """
        part, local = self._idle().owner(copy)
        return part.save_state(local)

    def load_state(self, state: NDArray[Any], copy: int = 0) -> None:
        """Restore in a copy a state of `save_state`, of any copy of any environment.

        The step count of its episode continues. The observation is that of the next step.
        """
        part, local = self._idle().owner(copy)
        part.load_state(state, local)

    def __del__(self) -> None:
        """Does not close, as VectorEnv's: unpickling drops an object with the same gangs."""

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self.num_envs}: {self._simulation or 'closed'}>"
