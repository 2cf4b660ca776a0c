"""Rothauge et al. (2019), Section IV: reinforcement learning on an MPI simulation."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from benchmarks.harness import RESULTS
from benchmarks.papers.experiment import Page, Setting, cited
from benchmarks.rayleigh_benard.study import NAMES, draw_on, read, with_spread

RUNS = RESULTS / "rayleigh_benard"
SEEDS = 5  # that a curve should have
BASELINES = ("none", "p")


def run(setting: Setting, results: Path = RUNS) -> Page:
    """The learning curves of runs that `benchmarks.rayleigh_benard.study` has made."""
    page = Page(
        "rl",
        "Rothauge et al. 2019, Section IV: reinforcement learning on a simulation",
        "the same at every scale: drawn from the runs in `benchmarks/results/rayleigh_benard`, "
        "which `python -m benchmarks.rayleigh_benard.study` makes in hours",
    )
    fill(page, results)
    return page


def fill(page: Page, results: Path = RUNS) -> None:
    """Table, verdict and figure of the stored runs."""
    runs = read(results)
    page.figure_inches = (6.4 * max(1, len({rayleigh for rayleigh, _ in runs})), 4.0)
    add = page.table(
        "Ra", "policy", "seeds", "control steps", "first validation, Nu", "best validation, Nu",
        "50 test episodes, Nu",
    )  # fmt: skip
    tested: dict[tuple[float, str], list[float]] = {}
    for (rayleigh, method), found in runs.items():
        tested[rayleigh, method] = [float(np.mean(run["nusselt"])) for run in found]
        trained = method not in BASELINES
        add(
            f"{rayleigh:.1e}", NAMES[method], len(found) if trained else "-",
            min(run["steps"] for run in found) if trained else "-",
            with_spread([run["validation"][0][1] for run in found]) if trained else "-",
            with_spread([run["best"] for run in found]) if trained else "-",
            with_spread(tested[rayleigh, method]),
        )  # fmt: skip
    seeds = [len(found) for (_, method), found in runs.items() if method not in BASELINES]
    _conclude(page, tested, min(seeds, default=0))
    page.data = {f"{rayleigh:.1e}, {method}": found for (rayleigh, method), found in tested.items()}
    page.draw = lambda figure: draw_on(figure, runs)


def _conclude(page: Page, tested: dict[tuple[float, str], list[float]], seeds: int) -> None:
    learned = {
        key: float(np.mean(values)) for key, values in tested.items() if key[1] not in BASELINES
    }
    if not learned:
        page.measured(f"nothing, because there are no runs in {RUNS.name}")
        return
    better = [
        key for key, value in learned.items() if value < min(tested.get((key[0], "none"), [np.inf]))
    ]
    best = min(learned, key=lambda key: learned[key])
    note = "" if seeds >= SEEDS else f"; some curves have fewer than {SEEDS} seeds yet ({seeds})"
    page.measured(
        f"{len(better)} of {len(learned)} trainings transport less heat than no control, and the "
        f"best ({NAMES[best[1]]}, Ra = {best[0]:.1e}) has a Nusselt number of {learned[best]:.3f}"
        f"{note}. The paper leaves a case study to future work ({cited('2019, IV')}) and proposes "
        "RLlib; these runs of hours are by Stable-Baselines3, whose SAC and PPO are compared here. "
        "RLlib trains on the same environment in "
        "[a tutorial](../../../docs/tutorials/5-environments.ipynb) and in tests"
    )
