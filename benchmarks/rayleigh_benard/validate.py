"""Compares the simulator with the literature: ``python -m benchmarks.rayleigh_benard.validate``.

Prints a table. The exit code is 1 if a number is out of its tolerance.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import numpy as np

# Clever & Busse, J. Fluid Mech. 65, 625 (1974): Pr = 0.71, wave number 3.117. Their expansion is
# less accurate at higher Ra. By Ra: their number, the number of `spectral` for the same rolls, the
# height of the cell, and the tolerance for the printed number.
PRANDTL, WAVELENGTH = 0.71, 2.016
NUSSELT = {
    5e3: (2.116, 2.1103, 48, 0.005),
    1e4: (2.661, 2.6525, 64, 0.005),
    3e4: (3.662, 3.6202, 96, 0.015),
}
SPECTRAL = 0.001  # tolerance for the spectral numbers
CRITICAL = 1707.762  # rigid plates; Chandrasekhar, Hydrodynamic and Hydromagnetic Stability (1961)
UNCONTROLLED = 4.90  # of the control problem

Row = tuple[str, str, str, bool]


def heat_transport(cell: Any) -> Iterator[Row]:
    """Nusselt numbers of steady rolls."""
    for rayleigh, (printed, spectral, height, tolerance) in NUSSELT.items():
        cell.setup(
            height=height, width=round(WAVELENGTH * height), heaters=1, rayleigh=rayleigh,
            prandtl=PRANDTL, velocity=0.1, perturbation=0.3, spin_up=80.0,
        )  # fmt: skip
        volume, bottom, top = cell.measure()[:3]
        steady = abs(bottom / top - 1) < 1e-3
        for source, wanted, within in (
            ("Clever & Busse", printed, tolerance),
            ("spectral", spectral, SPECTRAL),
        ):
            error = volume / wanted - 1
            yield (
                f"Nu at Ra {rayleigh:.0e}, {height} nodes high: {source}",
                f"{wanted} ± {100 * within:.1f} %",
                f"{volume:.4f} ({100 * error:+.2f} %); bottom {bottom:.4f}, top {top:.4f}",
                abs(error) < within and steady,
            )


def onset(cell: Any) -> Iterator[Row]:
    """The Rayleigh number at which a small perturbation neither grows nor decays."""
    rates = {}
    for rayleigh in (1700.0, 1750.0):
        cell.setup(
            height=32, width=64, heaters=1, roll_pairs=1, rayleigh=rayleigh, perturbation=1e-3,
            spin_up=40.0,
        )  # fmt: skip
        before = cell.measure()
        cell.run(3200)
        after = cell.measure()
        rates[rayleigh] = np.log(after[3] / before[3]) / (after[8] - before[8])
    (low, slow), (high, fast) = rates.items()
    critical = low - slow * (high - low) / (fast - slow)
    yield (
        "critical Rayleigh number",
        f"{CRITICAL:.1f} ± 0.5 %",
        f"{critical:.1f} (growth {slow:+.5f} at {low:.0f}, {fast:+.5f} at {high:.0f})",
        slow < 0 < fast and abs(critical / CRITICAL - 1) < 0.005,
    )


def conservation(cell: Any) -> Iterator[Row]:
    """Mass is constant, and heat changes by the heat through the plates."""
    cell.setup()
    before = cell.measure()
    for turn in range(20):
        cell.step([float(np.cos(turn + j)) for j in range(12)])
    after = cell.measure()
    mass = after[4] / before[4] - 1
    heat = (after[5] - before[5]) - (after[6] - before[6]) + (after[7] - before[7])
    heat /= after[6] - before[6]
    yield ("change of mass in 3100 steps, relative", "0", f"{mass:+.0e}", abs(mass) < 1e-12)
    yield (
        "change of heat minus heat through the plates, relative", "0", f"{heat:+.0e}",
        abs(heat) < 1e-12,
    )  # fmt: skip


def control(cell: Any) -> Iterator[Row]:
    """The control problem without control, and the flow with one pair of rolls instead of two."""
    cell.setup()
    steady = cell.measure()[0]
    yield (
        "Nu without control, Ra 8e4", f"{UNCONTROLLED:.2f} ± 0.2 %", f"{steady:.4f}",
        abs(steady / UNCONTROLLED - 1) < 0.002,
    )  # fmt: skip
    cell.setup(roll_pairs=1, perturbation=0.3, spin_up=250.0)
    yield "Nu of one pair of rolls, Ra 8e4", "-", f"{cell.measure()[0]:.4f}", True


def digits(cell: Any) -> list[float]:
    """All numbers of a short episode."""
    cell.setup(spin_up=2.0, time_step=0.2)
    cell.seed(1)
    cell.reset()
    for turn in range(3):
        cell.step([float(np.sin(turn + j)) for j in range(12)])
    return [*cell.get_state(), *cell.get_score(), *cell.measure()]


def main() -> int:
    """Print the table; return 1 if a row is out of its tolerance."""
    from alchemist_ray import AlchemistSession

    right = True

    def say(row: Row) -> None:
        nonlocal right
        right &= row[3]
        print(f"| {row[0]} | {row[1]} | {row[2]} | {'yes' if row[3] else 'NO'} |", flush=True)

    print("| quantity | expected | found | holds |\n|---|---|---|---|")
    shown = {}
    for ranks in (1, 2, 3):
        with AlchemistSession(ranks) as als:
            cell = als.load_library("rayleigh_benard")
            shown[ranks] = digits(cell)
            if ranks == 1:
                for part in (heat_transport, onset, conservation, control):
                    for row in part(cell):
                        say(row)
    same = all(found == shown[1] for found in shown.values())
    say(("an episode on 1, 2 and 3 ranks", "identical bits", f"{len(shown[1])} numbers", same))
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
