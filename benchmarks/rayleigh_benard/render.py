"""Pictures of an episode: temperature, heaters, Nusselt number.

``python -m benchmarks.rayleigh_benard.render --policy p --out out/rbc.gif`` (or ``.png``: a strip).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness import new_figure, save_figure
from benchmarks.rayleigh_benard.baselines import POLICIES, SEEDS, Episode, play

INCHES = 5.4, 3.4  # of one moment
SHARES = 5, 1.3, 1.8  # of its height: fluid, heaters, Nusselt number
UNCONTROLLED = 4.90
LOWEST, HIGHEST = 3.9, 5.3  # of the Nusselt number
HOT = 0.5
AMPLITUDE = 0.75  # largest deviation of a heater from HOT
FRAMES_PER_S = 12


def draw(figure: Any, episode: Episode, moment: int, title: str = "") -> None:
    """Draw one moment of an episode: the fluid, its heaters, the Nusselt number until then.

    Parameters
    ----------
    figure : Figure or SubFigure
        Of matplotlib, empty.
    episode : Episode
        With its fields (``play(..., fields=True)``).
    moment : int
        Number of actions; the last moment for numbers beyond the end.
    title : str
    """
    from matplotlib import colormaps

    steps = len(episode.nusselt)
    if len(episode.fields) != steps + 1:
        raise ValueError("this episode has no fields: use play(env, policy, fields=True)")
    moment = min(moment, steps)
    _, *fluid, plate = episode.fields[moment]
    colours, nusselt = colormaps["RdYlBu_r"], episode.nusselt[:moment]
    flow, heaters, trace = figure.subplots(3, height_ratios=SHARES)
    for axes in (flow, heaters, trace):
        axes.set_axis_off()
    shown = f"t = {moment}" + (f"   Nu = {nusselt[-1]:.2f}" if moment else "")
    flow.set_title(f"{title}   {shown}".strip(), fontsize=9, loc="left")
    flow.imshow(fluid, colours, aspect="auto", interpolation="bicubic", vmin=-0.5, vmax=0.5)
    rise = plate - HOT
    heaters.bar(range(len(plate)), rise, 1.0, color=colours(rise / (2 * AMPLITUDE) + 0.5))
    heaters.axhline(0, color="black", lw=0.8)
    heaters.set(xlim=(-0.5, len(plate) - 0.5), ylim=(-AMPLITUDE, AMPLITUDE))
    trace.axhline(UNCONTROLLED, color="silver", lw=0.8)
    without = f"without control {UNCONTROLLED:.2f}"
    trace.text(0, UNCONTROLLED, without, color="silver", fontsize=8, va="bottom")
    trace.plot(range(1, moment + 1), nusselt, color="black")
    trace.set(xlim=(0, steps), ylim=(LOWEST, HIGHEST))


def save_gif(episode: Episode, path: Path, *, title: str = "", every: int = 2) -> None:
    """An episode as a film, a picture for `every` so many actions."""
    from matplotlib.animation import FuncAnimation, PillowWriter

    path.parent.mkdir(parents=True, exist_ok=True)

    figure = new_figure(INCHES)

    def show(moment: int) -> None:
        figure.clear()
        draw(figure, episode, moment, title)

    show(0)  # an episode without fields is refused here
    moments = range(0, len(episode.nusselt) + 1, every)
    film = FuncAnimation(figure, show, moments, init_func=lambda: None)
    film.save(path, PillowWriter(FRAMES_PER_S))


def save_strip(
    episodes: Mapping[str, Episode], path: Path, moments: Sequence[int] = (0, 20, 60, 200)
) -> None:
    """Moments of episodes as one picture: a row for each episode, with its title."""
    path.parent.mkdir(parents=True, exist_ok=True)
    shape = len(episodes), len(moments)

    def strip(figure: Any) -> None:
        rows = figure.subfigures(*shape, squeeze=False)
        for row, (title, episode) in zip(rows, episodes.items(), strict=True):
            for part, moment in zip(row, moments, strict=True):
                draw(part, episode, moment, title)

    save_figure(strip, path, (INCHES[0] * shape[1], INCHES[1] * shape[0]))


def main(argv: list[str] | None = None) -> int:
    """Play an episode and draw it."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.rayleigh_benard.render",
        description="Play an episode and draw it.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--policy", choices=list(POLICIES), default="p", help="policy to show")
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("out/rayleigh_benard.gif"),
        help="file: an animation (.gif) or an image strip (.png)",
    )
    parser.add_argument("--seed", type=int, default=SEEDS[0], help="seed of the episode")
    parser.add_argument("--steps", type=int, default=200, help="number of actions")
    parser.add_argument("--num-workers", type=int, default=1, help="MPI ranks")
    options = parser.parse_args(argv)
    if options.out.suffix not in (".gif", ".png"):
        parser.error(f"--out {options.out}: it must end with .gif (an animation) or .png (a strip)")
    from envs import HPCSimulatorEnv

    config = {
        "lib_name": "rayleigh_benard",
        "num_workers": options.num_workers,
        "sim": {"episode_length": options.steps},
    }
    title = {"none": "no control", "p": "P-control"}[options.policy]
    with HPCSimulatorEnv(config) as env:
        episode = play(env, POLICIES[options.policy], options.seed, fields=True)
    if options.out.suffix == ".gif":
        save_gif(episode, options.out, title=title)
    else:
        save_strip({title: episode}, options.out)
    print(f"{options.out}: mean Nusselt number {episode.nusselt.mean():.3f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
