"""Pictures of an episode: temperature, heaters, Nusselt number.

``python -m benchmarks.rayleigh_benard.render --policy p --out out/rbc.gif`` (or ``.png``: a strip).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.rayleigh_benard.baselines import POLICIES, SEEDS, Episode, play

Picture = NDArray[np.uint8]

SCALE = 5  # pixels per node
HEATERS_HEIGHT, TRACE_HEIGHT, MARGIN = 44, 60, 6
UNCONTROLLED = 4.90
LOWEST, HIGHEST = 3.9, 5.3  # range of the trace
HOT = 0.5
AMPLITUDE = 0.75  # largest deviation of a heater from HOT
INK, PALE, BACKGROUND = (40, 40, 40), (190, 190, 190), (255, 255, 255)


def _need(name: str) -> Any:
    """Import a module of the extra ``envs``."""
    import importlib

    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise ImportError(
            f"pictures need {error.name}: pip install 'alchemist-on-ray[envs]'"
        ) from None


def colours(temperature: NDArray[Any]) -> Picture:
    """Temperatures as colours, blue (-0.5 and below) to red (0.5 and above), shape (..., 3)."""
    table = _need("matplotlib").colormaps["RdYlBu_r"]
    return np.asarray(table(np.asarray(temperature, np.float64) + 0.5)[..., :3] * 255, np.uint8)


def frame(
    field: NDArray[Any],
    nusselt: Sequence[float] | NDArray[Any] = (),
    *,
    steps: int = 200,
    title: str = "",
) -> Picture:
    """A picture of one moment of an episode.

    Parameters
    ----------
    field : ndarray
        Temperatures as the simulator renders them: cold plate, fluid, plate with the heaters,
        shape (height + 2, width).
    nusselt : sequence of float
        After each action so far; drawn with the number without control.
    steps : int
        Actions of an episode, the width of the trace.
    title : str
        Text above the picture.

    Returns
    -------
    ndarray
        uint8, shape (rows, columns, 3): 5 pixels per node of the fluid, plus margins.
    """  # fmt: skip
    image_module, draw_module = _need("PIL.Image"), _need("PIL.ImageDraw")
    field = np.asarray(field, np.float32)
    if field.ndim != 2 or field.shape[0] < 3:
        raise ValueError(f"a field of shape {field.shape}: it must be (height + 2, width)")
    fluid, plate = field[1:-1], field[-1]
    width, height = SCALE * fluid.shape[1], SCALE * fluid.shape[0]
    head = 16
    size = (width, head + height + HEATERS_HEIGHT + TRACE_HEIGHT + 2 * MARGIN)
    canvas = image_module.new("RGB", size, BACKGROUND)
    pen = draw_module.Draw(canvas)
    pen.text((4, 2), _caption(title, nusselt), fill=INK)
    smooth = image_module.fromarray(fluid).resize((width, height), image_module.Resampling.BICUBIC)
    canvas.paste(image_module.fromarray(colours(np.asarray(smooth))), (0, head))
    _draw_heaters(pen, plate, head + height)
    _draw_trace(pen, nusselt, steps, width, head + height + HEATERS_HEIGHT + MARGIN)
    return np.asarray(canvas)


def _caption(title: str, nusselt: Sequence[float] | NDArray[Any]) -> str:
    now = f"t = {len(nusselt)}" + (f"   Nu = {nusselt[-1]:.2f}" if len(nusselt) else "")
    return f"{title}   {now}" if title else now


def _draw_heaters(pen: Any, plate: NDArray[np.float32], top: int) -> None:
    """The profile of the plate: a bar per column, upwards where it is hotter than the mean."""
    middle = top + HEATERS_HEIGHT // 2
    paint = colours((plate - HOT) / (2 * AMPLITUDE))
    for x, (temperature, colour) in enumerate(zip(plate, paint, strict=True)):
        rise = np.clip((temperature - HOT) / AMPLITUDE, -1, 1) * (HEATERS_HEIGHT // 2 - 2)
        ends = sorted((middle, middle - round(float(rise))))
        box = (x * SCALE, ends[0], (x + 1) * SCALE - 1, ends[1])
        pen.rectangle(box, fill=tuple(int(c) for c in colour))
    pen.line((0, middle, len(plate) * SCALE, middle), fill=INK)


def _draw_trace(
    pen: Any, nusselt: Sequence[float] | NDArray[Any], steps: int, width: int, top: int
) -> None:
    """The Nusselt number over time, with a line at the number without control."""

    def at(value: float) -> float:
        share = (min(max(value, LOWEST), HIGHEST) - LOWEST) / (HIGHEST - LOWEST)
        return top + (1 - share) * (TRACE_HEIGHT - 1)

    pen.line((0, at(UNCONTROLLED), width, at(UNCONTROLLED)), fill=PALE)
    pen.text((4, at(UNCONTROLLED) - 12), f"without control {UNCONTROLLED:.2f}", fill=PALE)
    points = [(i * width / max(1, steps), at(float(v))) for i, v in enumerate(nusselt, 1)]
    if len(points) > 1:
        pen.line(points, fill=INK, width=2)


def save_gif(episode: Episode, path: str | Path, *, title: str = "", every: int = 2) -> Path:
    """An episode as a film.

    Parameters
    ----------
    episode : Episode
        With its fields (``play(..., fields=True)``).
    path : path_like
        Ends with ``.gif``; its folder is created.
    title : str
        Text above every picture.
    every : int
        Actions between pictures.
    """
    steps = len(episode.nusselt)
    moments = range(0, steps + 1, every)
    pictures = [
        frame(_field(episode, i), episode.nusselt[:i], steps=steps, title=title) for i in moments
    ]
    image_module = _need("PIL.Image")
    first, *others = (
        image_module.fromarray(picture).quantize(64, dither=image_module.Dither.NONE)
        for picture in pictures
    )
    path = _place(path)
    first.save(path, save_all=True, append_images=others, duration=80, loop=0, optimize=True)
    return path


def save_strip(
    episodes: Mapping[str, Episode],
    path: str | Path,
    moments: Sequence[int] = (0, 20, 60, 200),
) -> Path:
    """Moments of episodes as one picture: one row per episode, with its title.

    Parameters
    ----------
    episodes : mapping of str to Episode
        With their fields.
    path : path_like
        Ends with ``.png``; its folder is created.
    moments : sequence of int
        Numbers of actions; the last moment for numbers beyond the end.
    """  # fmt: skip
    rows = []
    for title, episode in episodes.items():
        steps = len(episode.nusselt)
        shown = [
            frame(_field(episode, i), episode.nusselt[:i], steps=steps, title=title)
            for i in (min(moment, steps) for moment in moments)
        ]
        gap = np.full((shown[0].shape[0], 2 * MARGIN, 3), 255, np.uint8)
        rows.append(np.concatenate([p for s in shown for p in (s, gap)][:-1], axis=1))
    gap = np.full((2 * MARGIN, rows[0].shape[1], 3), 255, np.uint8)
    whole = np.concatenate([p for row in rows for p in (row, gap)][:-1], axis=0)
    path = _place(path)
    _need("PIL.Image").fromarray(whole).save(path, optimize=True)
    return path


def _field(episode: Episode, moment: int) -> NDArray[np.float32]:
    if len(episode.fields) != len(episode.nusselt) + 1:
        raise ValueError("this episode has no fields: use play(env, policy, fields=True)")
    return episode.fields[moment]


def _place(path: str | Path) -> Path:
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


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
    titles = {"none": "no control", "p": "P-control"}
    with HPCSimulatorEnv(config) as env:
        episode = play(env, POLICIES[options.policy], options.seed, fields=True)
    title = titles[options.policy]
    if options.out.suffix == ".gif":
        save_gif(episode, options.out, title=title)
    else:
        save_strip({title: episode}, options.out)
    print(f"{options.out}: mean Nusselt number {episode.nusselt.mean():.3f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
