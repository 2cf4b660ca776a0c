"""The gangs of a vector environment: each has a part of the copies, and all step at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import replace
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

# Work of a gang: its simulation, its copies, and the numbers and seeds of those that begin.
Work = Callable[[Simulation, range, list[int], list[int]], Records]


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
            part.running = False

    def interrupt(self) -> None:
        """Cancel the orders in progress, from another thread."""
        for part in self._parts:
            part.interrupt()

    def begin(self, seeds: dict[int, int]) -> Records:
        """Begin an episode in the copies of `seeds`; starts the gangs that are missing."""
        busy = [number for number, copies in enumerate(self._ranges) if seeds.keys() & set(copies)]
        return self._each(busy, seeds, lambda part, _, which, given: part.begin(which, given))

    def advance(self, actions: NDArray[np.float64], seeds: dict[int, int]) -> Records:
        """Advance every copy; those of `seeds` begin an episode instead.

        On a gang without an episode, only the copies of `seeds` begin.
        """

        def work(part: Simulation, copies: range, which: list[int], given: list[int]) -> Records:
            if not part.running:
                return part.begin(which, given)
            return part.advance(actions[copies.start : copies.stop], which, given)

        return self._each(range(len(self._parts)), seeds, work)

    def _each(self, busy: Sequence[int], seeds: dict[int, int], work: Work) -> Records:
        """Do the work of some gangs, all at once, and put the results together.

        The records of copies of a gang that failed or had nothing to do are zeros.
        """
        found: list[Records | EnvError | None] = [None] * len(self._parts)

        def run(number: int) -> None:
            part, copies = self._parts[number], self._ranges[number]
            which = [copy for copy in copies if copy in seeds]
            local, given = [copy - copies.start for copy in which], [seeds[copy] for copy in which]
            try:
                found[number] = work(part, copies, local, given)
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
