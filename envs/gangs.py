"""The gangs of a vector environment: each has a part of the copies, and all step at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from alchemist_ray.arguments import positive_int
from envs.config import EnvConfig
from envs.errors import EnvConfigError, EnvError, GangLostError, SimulationError
from envs.losses import Losses
from envs.records import Records
from envs.simulation import Simulation
from envs.spec import SimulatorSpec

Work = Callable[[Simulation], Records]


@dataclass(frozen=True, slots=True)
class Outcome:
    """The results of a step of all gangs.

    Attributes
    ----------
    records : Records
        Of all copies; zeros for the copies of a gang that failed or had nothing to do.
    failures : dict of int to EnvError
        By copy: why its episode has ended.
    """

    records: Records
    failures: dict[int, EnvError]

    def first_failure(self) -> EnvError | None:
        return next(iter(self.failures.values()), None)


class Gangs:
    """Copies of a simulator on one or more gangs.

    Parameters
    ----------
    config : EnvConfig
    num_envs : int, optional
        Sub-environments in all (copies x agents), where the config has no ``copies``.

    Raises
    ------
    EnvConfigError
        If there are more gangs than copies.
    AlchemistError
        If the first gang is needed for the spec and does not start.
    """

    def __init__(self, config: EnvConfig, num_envs: int | None) -> None:
        self.losses = Losses(config.lib_name)
        if num_envs is not None:
            positive_int("num_envs", num_envs, EnvConfigError)
        share = None if config.copies is None else config.copies // config.gangs
        first = Simulation(replace(config, copies=share), self.losses)
        self._parts = [first]
        self.spec: SimulatorSpec = first.spec
        self.copies = config.copies or max(1, (num_envs or 1) // self.spec.agents)
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

    def stop_episodes(self) -> None:
        """End all episodes: `begin` must come next."""
        for part in self._parts:
            part.stop_episode()

    def interrupt(self) -> None:
        """Cancel the orders in progress, from another thread."""
        for part in self._parts:
            part.interrupt()

    def begin(self, seeds: dict[int, int]) -> Outcome:
        """Begin an episode in the copies of `seeds`; starts the gangs that are missing."""
        return self._each(lambda copies: self._begin(copies, seeds))

    def advance(self, actions: NDArray[np.float64], seeds: dict[int, int]) -> Outcome:
        """Advance every copy; those of `seeds` begin an episode instead.

        On a gang without an episode, only the copies of `seeds` begin.
        """
        return self._each(lambda copies: self._advance(copies, actions, seeds))

    def _begin(self, copies: range, seeds: dict[int, int]) -> Work | None:
        which = [copy for copy in copies if copy in seeds]
        if not which:
            return None
        local = [copy - copies.start for copy in which]
        return lambda part: part.begin(local, [seeds[copy] for copy in which])

    def _advance(
        self, copies: range, actions: NDArray[np.float64], seeds: dict[int, int]
    ) -> Work | None:
        which = [copy for copy in copies if copy in seeds]
        local = [copy - copies.start for copy in which]
        mine = actions[copies.start : copies.stop]

        def work(part: Simulation) -> Records:
            given = [seeds[copy] for copy in which]
            return part.advance(mine, local, given) if part.running else part.begin(local, given)

        return work

    def _each(self, work_for: Callable[[range], Work | None]) -> Outcome:
        """Run the work of each gang, all at once, and put the results together."""
        found: list[Records | EnvError | None] = [None] * len(self._parts)

        def run(number: int, work: Work) -> None:
            part = self._parts[number]
            try:
                found[number] = work(part)
            except (SimulationError, GangLostError) as error:
                part.stop_episode()
                found[number] = error

        works = [(i, work) for i, c in enumerate(self._ranges) if (work := work_for(c)) is not None]
        if self._threads is None or len(works) == 1:
            for number, work in works:
                run(number, work)
        else:
            futures = [self._threads.submit(run, *each) for each in works]
            try:
                wait(futures)
            except BaseException:  # Ctrl-C: the threads must be back before the next step
                self.interrupt()
                wait(futures)
                raise
            for future in futures:
                future.result()
        return self._merged(found)

    def _merged(self, found: Sequence[Records | EnvError | None]) -> Outcome:
        failures: dict[int, EnvError] = {}
        for copies, result in zip(self._ranges, found, strict=True):
            if isinstance(result, EnvError):
                failures |= dict.fromkeys(copies, result)
            elif result is not None:
                failures |= {copies.start + i: why for i, why in result.unusable.items()}
        only = found[0]
        if len(found) == 1 and isinstance(only, Records):
            return Outcome(only, failures)
        spec = self.spec
        records = Records(
            [np.zeros((self.copies, leaf.count), leaf.dtype) for leaf in spec.observed.leaves],
            np.zeros((self.copies, spec.agents + len(spec.info))),
            np.zeros(self.copies, bool),
            {},
        )
        for copies, result in zip(self._ranges, found, strict=True):
            if isinstance(result, Records):
                part = slice(copies.start, copies.stop)
                for whole, mine in zip(records.observations, result.observations, strict=True):
                    whole[part] = mine
                records.scores[part] = result.scores
                records.ended[part] = result.ended
        return Outcome(records, failures)

    def picture(self, copy: int) -> NDArray[np.float32]:
        """The rendered field of a copy."""
        part, local = self._owner(copy)
        return part.picture(local)

    def save_state(self, copy: int) -> NDArray[Any]:
        """The state of a copy."""
        part, local = self._owner(copy)
        return part.save_state(local)

    def load_state(self, state: NDArray[Any], copy: int) -> None:
        """Restore a state in a copy."""
        part, local = self._owner(copy)
        part.load_state(state, local)

    def _owner(self, copy: int) -> tuple[Simulation, int]:
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
