"""Searches the gains of P-control for a Rayleigh number, so that it is a fair baseline there.

    python -m benchmarks.rayleigh_benard.gains --rayleigh 1e4 8e4 3.2e5

plays each pair of gains of a grid in the episodes on which `study` validates policies, and the
best pairs in ten others.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Sequence
from typing import Any

from benchmarks.rayleigh_benard.baselines import ProportionalControl, mean_nusselt
from benchmarks.rayleigh_benard.study import LIBRARY, VALIDATION_SEEDS, Case

Gains = Sequence[float]
VELOCITY_GAINS: Gains = (4.0, 8.0, 12.0, 24.0, 48.0, 64.0, 96.0, 128.0)
TEMPERATURE_GAINS: Gains = (-96.0, -64.0, -48.0, -32.0, -24.0, -16.0, -8.0, 0.0, 8.0)

FINALISTS, FINAL_SEEDS = 8, range(21, 31)


def search(
    rayleigh: float,
    velocity: Gains = VELOCITY_GAINS,
    temperature: Gains = TEMPERATURE_GAINS,
    final_seeds: Sequence[int] = FINAL_SEEDS,
) -> list[tuple[float, ProportionalControl]]:
    """Mean Nusselt numbers of the best pairs of gains, the lowest first.

    All pairs are played twice, and the best of these for `final_seeds`: control that is almost on
    or off differs between episodes.

    Raises
    ------
    EnvError, AlchemistError
        As `HPCSimulatorEnv`.

    Notes
    -----
    224 episodes: some minutes for a Rayleigh number.
    """
    from envs import HPCSimulatorEnv

    policies = [ProportionalControl(*gains) for gains in itertools.product(velocity, temperature)]
    with HPCSimulatorEnv(LIBRARY, sim=Case(rayleigh, "p", 0).sim()) as env:
        first = _played(env, policies, VALIDATION_SEEDS)
        return _played(env, [policy for _, policy in first[:FINALISTS]], final_seeds)


def _played(
    env: Any, policies: Sequence[ProportionalControl], seeds: Sequence[int]
) -> list[tuple[float, ProportionalControl]]:
    found = [(mean_nusselt(env, policy, seeds), policy) for policy in policies]
    return sorted(found, key=lambda pair: pair[0])


def main(argv: list[str] | None = None) -> int:
    """Print the best gains for each Rayleigh number."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.rayleigh_benard.gains",
        description="Search the gains of P-control.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--rayleigh", type=float, nargs="+", default=[8e4], help="Rayleigh numbers")
    options = parser.parse_args(argv)
    print("| Ra | velocity gain | temperature gain | Nu |\n|---|---|---|---|", flush=True)
    for rayleigh in options.rayleigh:
        for value, policy in search(rayleigh):
            gains = f"{policy.velocity_gain:g} | {policy.temperature_gain:g}"
            print(f"| {rayleigh:.1e} | {gains} | {value:.3f} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
