"""Pictures of episodes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from benchmarks.rayleigh_benard.baselines import Episode

pytest.importorskip("matplotlib", reason="needs pip install 'alchemist-on-ray[envs]'")
image = pytest.importorskip("PIL.Image", reason="needs pip install 'alchemist-on-ray[envs]'")

from benchmarks.rayleigh_benard.render import save_gif, save_strip  # noqa: E402


def field(left: float = 0.75, right: float = -0.75) -> np.ndarray:
    """Conduction above a plate that is hotter on the left."""
    fluid = np.repeat(np.linspace(-0.45, 0.45, 10)[:, None], 24, axis=1)
    plate = 0.5 + np.repeat([left, right], 12)[None]
    return np.concatenate([np.full((1, 24), -0.5), fluid, plate]).astype(np.float32)


def episode(steps: int = 6, nusselt: float = 4.1) -> Episode:
    fields = [field(0.1 * i, -0.1 * i) for i in range(steps + 1)]
    return Episode(np.linspace(4.9, nusselt, steps), fields)


def drawn(path: Path, *moments: int, **options: float) -> np.ndarray:
    """A strip of one episode, as (rows, columns, 3)."""
    save_strip({"test": episode(**options)}, path, moments)
    with image.open(path) as strip:
        return np.asarray(strip.convert("RGB")).astype(int)


def test_the_fluid_is_upright_hot_is_red_and_hot_heaters_rise(tmp_path: Path) -> None:
    picture = drawn(tmp_path / "strip.png", 6)
    red, blue = picture[..., 0], picture[..., 2]
    height, width = red.shape
    assert (blue - red)[height // 10 : height // 5].mean() > 30, "cold on top"
    assert (red - blue)[height // 2 : height * 11 // 20].mean() > 30, "hot at the bottom"
    bars = (picture != 255).any(-1)[height * 62 // 100 : height * 77 // 100]
    middle = np.flatnonzero(bars.mean(axis=1) > 0.8)[0]  # the line of the mean temperature
    upper, lower = bars[:middle].sum(axis=0), bars[middle + 1 :].sum(axis=0)
    assert upper[: width // 2].sum() > 5 * upper[width // 2 :].sum(), "hotter heaters rise"
    assert lower[width // 2 :].sum() > 5 * lower[: width // 2].sum(), "cooler ones hang"


def test_the_trace_falls_with_the_nusselt_number(tmp_path: Path) -> None:
    def ink(nusselt: float) -> float:
        picture = drawn(tmp_path / "strip.png", 6, nusselt=nusselt)
        trace = picture[picture.shape[0] * 3 // 4 :]
        return float(np.argwhere((trace < 100).all(-1))[:, 0].mean())

    assert ink(4.1) > ink(5.1) + 10


def test_a_film_has_every_second_moment(tmp_path: Path) -> None:
    path = tmp_path / "new" / "film.gif"
    save_gif(episode(), path, title="test", every=2)
    with image.open(path) as film:
        assert film.n_frames == 4


def test_a_strip_has_a_row_for_each_episode(tmp_path: Path) -> None:
    path, moments = tmp_path / "strip.png", (0, 3, 100)
    one = drawn(path, 0).shape
    save_strip({"a": episode(), "b": episode()}, path, moments)
    with image.open(path) as strip:
        assert strip.size == (3 * one[1], 2 * one[0])


def test_an_episode_without_fields_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="fields=True"):
        save_gif(Episode(np.ones(3)), tmp_path / "film.gif")
