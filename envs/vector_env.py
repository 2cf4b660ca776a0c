"""HPCSimulatorVectorEnv: many sub-environments on one or more gangs, advanced by one call."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from gymnasium.utils import EzPickle, seeding
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space, iterate
from numpy.typing import NDArray

from alchemist_ray.errors import ResourceError
from envs.config import EnvConfig
from envs.errors import EnvConfigError, EnvError, for_caller, of_failure
from envs.gangs import Gangs
from envs.hpc_env import SEEDS
from envs.pictures import check_mode, coloured
from envs.records import Records
from envs.spec import ActionCheck
from envs.stepping import SteppedEnv

Flags = NDArray[np.bool_]
Step = tuple[Any, NDArray[np.float64], Flags, Flags, dict[str, Any]]


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
        if config is not None and not isinstance(config, Mapping):
            raise EnvConfigError(f"config is a {type(config).__name__}; it must be a dict")
        mode = getattr(autoreset_mode, "name", str(autoreset_mode)).upper()
        if mode not in (AutoresetMode.NEXT_STEP.name, AutoresetMode.SAME_STEP.name):
            raise EnvConfigError(
                f"autoreset_mode={autoreset_mode!r}: it must be AutoresetMode.NEXT_STEP or "
                "SAME_STEP. (reset(options={'reset_mask': ...}) begins episodes of your choice)"
            )
        self.metadata = {**self.metadata, "autoreset_mode": AutoresetMode[mode]}
        given = {**(config or {}), **options}
        num_envs = given.pop("num_envs", num_envs)
        checked = EnvConfig.checked(given, {}, vector=True)
        gangs = self._simulation = Gangs(checked, num_envs)
        spec = self.simulator = gangs.spec
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
            check_mode(render_mode, spec)
            many = spec.agents > 1
            self.single_observation_space = spec.observed.space(agent=many)
            self.single_action_space = spec.acted.space(agent=many)
            self.observation_space = batch_space(self.single_observation_space, self.num_envs)
            self.action_space = batch_space(self.single_action_space, self.num_envs)
        except MemoryError as error:
            self.close()
            raise ResourceError(
                f"{self.num_envs} sub-environments do not fit into the memory of this process: "
                f"{error}. Use fewer copies"
            ) from None
        except BaseException:
            self.close()
            raise
        self.render_mode = render_mode
        self._check_action = ActionCheck(spec, checked.out_of_bounds, self.num_envs)
        self._truncates = checked.on_failure == "truncate"
        self._failure_reward = checked.failure_reward
        self._retries = checked.max_restarts
        self._random: list[np.random.Generator | None] = [None] * self._copies
        self._seeds = [-1] * self._copies
        self._steps = np.zeros(self._copies, np.int64)
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
        if options is not None and not isinstance(options, Mapping):
            raise ValueError(f"options={options!r}: it must be a dict, for example with reset_mask")
        which = set(self._masked((options or {}).get("reset_mask")).tolist())
        seeds = self._given(seed)
        which.update(gangs.without_episodes())  # a new gang has no episodes to continue
        ordered = sorted(which)
        for copy in ordered:
            self._reseed(copy, seeds[copy])
            self._lost.pop(copy, None)
        self._begin({copy: self._drawn(copy, seeds[copy]) for copy in ordered})
        self._steps[ordered] = 0
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
        self._steps += 1
        self._steps[fresh] = 0
        length = self.simulator.episode_length
        terminated = records.ended & stepped & ~failed
        truncated = stepped & (failed | (length is not None and self._steps >= (length or 0)))
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
        over, ended = np.flatnonzero(self._over).tolist(), self._over.repeat(self._agents)
        last = np.full(self.num_envs, None, object)
        for env, observation in enumerate(iterate(self.observation_space, self._observation())):
            if ended[env]:
                last[env] = observation
        final = _of(infos, ended)
        self._begin({copy: self._drawn(copy, None) for copy in over})
        self._steps[over], self._over[over] = 0, False
        kept = _of(infos, ~ended) | {"final_obs": last, "_final_obs": ended}
        return kept | {"final_info": final, "_final_info": ended.copy()}

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
        leaves, many = self.simulator.observed.leaves, self._agents > 1
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
        names = [name for name in infos if f"_{name}" in infos]
        return [
            {
                name: infos[name][env].item()
                if hasattr(infos[name][env], "item")
                else infos[name][env]
                for name in names
                if infos[f"_{name}"][env]
            }
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

    def _reseed(self, copy: int, seed: int | None) -> None:
        if seed is not None or self._random[copy] is None:
            self._random[copy], self._seeds[copy] = seeding.np_random(seed)

    def _drawn(self, copy: int, seed: int | None) -> int:
        """The seed of the simulation for its next episode."""
        if seed is not None:
            return seed % SEEDS
        self._reseed(copy, None)
        random = self._random[copy]
        assert random is not None
        return int(random.integers(SEEDS))

    @property
    def np_random_seed(self) -> tuple[int, ...]:  # type: ignore[override]
        """The seed of each sub-environment; -1 before the first reset."""
        return tuple(np.repeat(self._seeds, self._agents).tolist())

    @property  # type: ignore[misc]
    def np_random(self) -> tuple[np.random.Generator, ...]:  # type: ignore[override]
        """The generator of each sub-environment; agents of one copy share it."""
        for copy in range(self._copies):
            self._reseed(copy, None)
        return tuple(r for r in self._random if r is not None for _ in range(self._agents))

    # --- pictures, closing ---

    def render(self) -> tuple[NDArray[np.uint8], ...] | None:  # type: ignore[override]
        """A picture per sub-environment, each (height, width, 3); agents of one copy share it."""
        if self.render_mode is None:
            return None
        shown = [coloured(self.field(copy), self.simulator) for copy in range(self._copies)]
        return tuple(picture for picture in shown for _ in range(self._agents))

    def field(self, copy: int = 0) -> NDArray[np.float32]:
        """The field that `render` colours, of one copy, as the simulator returns it."""
        return self._idle().picture(copy)

    def save_state(self, copy: int = 0) -> NDArray[Any]:
        """The state of a copy, for `load_state`, if the simulator supports it.

        Raises
        ------
        AlchemistError
            NoSuchRoutineError, if it does not.
        """
        return self._idle().save_state(copy)

    def load_state(self, state: NDArray[Any], copy: int = 0) -> None:
        """Restore in a copy a state of `save_state`, of any copy of any environment.

        The step count of its episode continues. The observation is that of the next step.
        """
        self._idle().load_state(state, copy)

    def __del__(self) -> None:
        """Does not close, as VectorEnv's: unpickling drops an object with the same gangs."""

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self.num_envs}: {self._simulation or 'closed'}>"


def _of(infos: dict[str, Any], envs: Flags) -> dict[str, Any]:
    """The infos of some sub-environments, as if the others had none."""
    kept: dict[str, Any] = {}
    for name, values in infos.items():
        valid = infos.get(f"_{name}", np.False_) & envs
        if valid.any():
            chosen = np.full(len(values), None if values.dtype == object else 0, values.dtype)
            chosen[valid] = values[valid]
            kept |= {name: chosen, f"_{name}": valid}
    return kept
