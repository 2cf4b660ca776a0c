"""Baselines for trained policies: no control, and proportional control.

``python -m benchmarks.rayleigh_benard.baselines`` prints both over several episodes.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

Policy = Callable[[NDArray[Any]], NDArray[Any]]
HEATERS = 12
PROBE_ROWS = 4
# Scales of the observed probes (measure.c).
TEMPERATURE_SCALE, VELOCITY_SCALE = 2.0, 3.0
SEEDS = (101, 102, 103, 104)  # of the episodes for which baselines are reported


@dataclass(frozen=True, slots=True)
class ProportionalControl:
    """Cool where warm fluid rises.

    With the means of the two middle probes above heater j, of the vertical velocity v (in
    free-fall units) and the temperature T, the action is
    ``clip(-(velocity_gain * v + temperature_gain * T), -1, 1)``, after subtracting the mean
    over the heaters.

    Parameters
    ----------
    velocity_gain, temperature_gain : float
        The defaults are for the default cell; `gains` searches those for another Rayleigh number.
    """

    velocity_gain: float = 12.0
    temperature_gain: float = -8.0

    def __call__(self, observation: NDArray[Any]) -> NDArray[np.float32]:
        """The action for an observation of the cell or of its agents.

        Parameters
        ----------
        observation : ndarray
            Shape (144,): the whole cell; the action is (12,). Shape (n, 144): agents, each of
            which observes the cell from its own heater on; the actions are (n, 1).
        """
        cell = np.asarray(observation, np.float64).reshape(-1, HEATERS, 3, PROBE_ROWS)
        middle = cell[..., PROBE_ROWS // 2 - 1 : PROBE_ROWS // 2 + 1].mean(axis=-1)
        wanted = -(
            self.temperature_gain / TEMPERATURE_SCALE * middle[:, :, 0]
            + self.velocity_gain / VELOCITY_SCALE * middle[:, :, 2]
        )
        wanted -= wanted.mean(axis=1, keepdims=True)
        action: NDArray[np.float32] = np.clip(wanted, -1, 1).astype(np.float32)
        return action[0] if np.ndim(observation) == 1 else action[:, :1]


def agent_views(observation: NDArray[Any]) -> NDArray[np.float32]:
    """What each heater's agent observes, (12, 144), from an observation of the cell, (144,)."""
    cell = np.asarray(observation, np.float32).reshape(HEATERS, -1)
    return np.stack([np.roll(cell, -heater, axis=0).ravel() for heater in range(HEATERS)])


def no_control(observation: NDArray[Any]) -> NDArray[np.float32]:
    """Equal temperature of all heaters; shapes as in `ProportionalControl`."""
    shape = (HEATERS,) if np.ndim(observation) == 1 else (len(observation), 1)
    return np.zeros(shape, np.float32)


NO_CONTROL: Policy = no_control
P_CONTROL: Policy = ProportionalControl()
POLICIES = {"none": NO_CONTROL, "p": P_CONTROL}


@dataclass(frozen=True, slots=True)
class Episode:
    """The results of an episode.

    Attributes
    ----------
    nusselt : ndarray
        After each action, shape (steps,).
    fields : list of ndarray
        If requested: temperatures at the beginning and after each action, as the simulator
        renders them (cold plate, fluid, plate with the heaters), shape (height + 2, width).
    """

    nusselt: NDArray[np.float64]
    fields: list[NDArray[np.float32]] = field(default_factory=list)


def play(env: Any, policy: Policy, seed: int | None = None, *, fields: bool = False) -> Episode:
    """Play an episode of a single-agent environment.

    Parameters
    ----------
    env : HPCSimulatorEnv
        With ``lib_name="rayleigh_benard"``; wrapped or not.
    policy : callable
        From an observation (144,) to an action (12,).
    seed : int, optional
        Seed of the reset.
    fields : bool
        Keep the temperature fields.
    """
    observation, _ = env.reset(seed=seed)
    kept = [env.unwrapped.field()] if fields else []
    nusselt, over = [], False
    while not over:
        observation, _, terminated, truncated, info = env.step(policy(observation))
        over = terminated or truncated
        nusselt.append(info["nusselt"])
        if fields:
            kept.append(env.unwrapped.field())
    return Episode(np.array(nusselt), kept)


def mean_nusselt(env: Any, policy: Policy, seeds: Sequence[int]) -> float:
    """The mean Nusselt number of a policy over whole episodes."""
    return float(np.mean([play(env, policy, seed).nusselt.mean() for seed in seeds]))


def evaluate(policy: Policy, seeds: Sequence[int] = SEEDS, **config: Any) -> NDArray[np.float64]:
    """Nusselt numbers of a policy over episodes, shape (episodes, steps).

    Parameters
    ----------
    policy : callable
        From an observation (144,) to an action (12,).
    seeds : sequence of int
        One episode for each.
    **config
        Keys of the environment's config: ``num_workers``, ``sim``, ...

    Raises
    ------
    EnvError, AlchemistError
        As `HPCSimulatorEnv`.

    Notes
    -----
    About half a second an episode.
    """
    from envs import HPCSimulatorEnv

    with HPCSimulatorEnv({"lib_name": "rayleigh_benard", **config}) as env:
        return np.stack([play(env, policy, seed).nusselt for seed in seeds])


def main(argv: list[str] | None = None) -> int:
    """Print the table of baselines."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.rayleigh_benard.baselines",
        description="Print the results of no control and of proportional control.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--episodes", type=int, default=len(SEEDS), help="episodes of each policy")
    parser.add_argument("--num-workers", type=int, default=1, help="MPI ranks")
    options = parser.parse_args(argv)
    seeds = range(SEEDS[0], SEEDS[0] + options.episodes)
    print("| policy | Nusselt number | last 100 actions | episodes from .. to |")
    print("|---|---|---|---|")
    for name, policy in (("no control", NO_CONTROL), ("P-control", P_CONTROL)):
        found = evaluate(policy, seeds, num_workers=options.num_workers)
        means = found.mean(axis=1)
        print(
            f"| {name} | {found.mean():.3f} | {found[:, -100:].mean():.3f} "
            f"| {means.min():.3f} .. {means.max():.3f} |",
            flush=True,
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
