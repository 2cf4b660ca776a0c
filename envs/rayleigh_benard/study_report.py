"""The results of `envs.rayleigh_benard.study` as a table, and its learning curves as a picture."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np

NAMES = {
    "none": "no control",
    "p": "P-control",
    "ppo": "PPO, one policy for the cell",
    "sac": "SAC, one policy for the cell",
    "ppo-agents": "PPO, one policy shared by the heaters",
}
COLOURS = {"ppo": "#2166ac", "sac": "#1b7837", "ppo-agents": "#b2182b"}
Runs = dict[tuple[float, str], list[dict[str, Any]]]


def read(results: Path) -> Runs:
    """The finished runs, by Rayleigh number and method."""
    found: Runs = defaultdict(list)
    for file in sorted(results.glob("ra*.json")):
        run = json.loads(file.read_text())
        found[run["rayleigh"], run["method"]].append(run)
    return found


def report(results: Path) -> str:
    """The table, as Markdown; draws ``study.png`` beside the results, if there is matplotlib."""
    runs = read(results)
    rows = [
        "| Ra | policy | seeds | control steps | Nu, mean of the seeds ± standard deviation "
        "| best .. worst seed | last 100 actions |",
        "|---|---|---|---|---|---|---|",
    ]
    for rayleigh in sorted({key[0] for key in runs}):
        for method, name in NAMES.items():
            found = runs.get((rayleigh, method))
            if not found:
                continue
            means = np.array([np.mean(run["nusselt"]) for run in found])
            late = np.mean([np.mean(run["last_100"]) for run in found])
            spread = f" ± {means.std(ddof=1):.3f}" if len(means) > 1 else ""
            between = f"{means.min():.3f} .. {means.max():.3f}" if len(means) > 1 else "-"
            steps = min(run["steps"] for run in found) or "-"
            rows.append(
                f"| {rayleigh:.1e} | {name} | {len(found)} | {steps} | {means.mean():.3f}{spread} "
                f"| {between} | {late:.3f} |"
            )
    draw(runs, results / "study.png")
    return "\n".join(rows)


def draw(runs: Runs, path: Path) -> None:
    """Validated Nusselt numbers by control steps: the mean of the seeds, and their range."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: PLC0415
        from matplotlib.figure import Figure  # noqa: PLC0415
    except ModuleNotFoundError:
        return
    numbers = sorted({key[0] for key in runs})
    if not numbers:
        return
    figure = Figure(figsize=(5.2 * len(numbers), 4.0), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    draw_on(figure, runs)
    figure.savefig(path)


def draw_on(figure: Any, runs: Runs) -> None:
    """The curves of `draw` on a matplotlib figure."""
    numbers = sorted({key[0] for key in runs})
    for column, rayleigh in enumerate(numbers, 1):
        axes = figure.add_subplot(1, len(numbers), column)
        for method, colour in COLOURS.items():
            found = runs.get((rayleigh, method), [])
            length = min((len(run["validation"]) for run in found), default=0)
            if not length:
                continue
            curves = np.array([run["validation"][:length] for run in found])
            steps, nusselt = curves[0, :, 0], curves[:, :, 1]
            axes.plot(steps, nusselt.mean(axis=0), color=colour, label=NAMES[method])
            axes.fill_between(
                steps, nusselt.min(axis=0), nusselt.max(axis=0), color=colour, alpha=0.2, lw=0
            )
        for method in ("none", "p"):
            for run in runs.get((rayleigh, method), []):
                level = float(np.mean(run["nusselt"]))
                axes.axhline(level, color="#404040", lw=0.8, ls="--")
                beside = axes.get_yaxis_transform()
                axes.annotate(NAMES[method], (0.99, level), xycoords=beside, fontsize=8,
                              ha="right", va="bottom")  # fmt: skip
        axes.set_xlabel("control steps")
        axes.set_ylabel("Nusselt number (lower is better)")
        axes.set_title(f"Ra = {rayleigh:.1e}; mean and range of the seeds", fontsize=9)
        axes.spines[["top", "right"]].set_visible(False)
    curves_drawn = {line.get_label(): line for axes in figure.axes for line in axes.lines}
    named = {name: curves_drawn[name] for name in NAMES.values() if name in curves_drawn}
    figure.legend(
        list(named.values()), list(named), loc="outside upper center", ncols=3, fontsize=8,
        frameon=False,
    )  # fmt: skip
