"""Pictures of episodes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from benchmarks.rayleigh_benard.baselines import Episode

pytest.importorskip("matplotlib", reason="needs pip install 'alchemist-on-ray[envs]'")
image = pytest.importorskip("PIL.Image", reason="needs pip install 'alchemist-on-ray[envs]'")

from benchmarks.rayleigh_benard.render import SCALE, colours, frame, save_gif, save_strip  # noqa: E402


def field(left: float = 0.75, right: float = -0.75) -> np.ndarray:
    """Conduction above a plate that is hotter on the left."""
    fluid = np.repeat(np.linspace(-0.45, 0.45, 10)[:, None], 24, axis=1)
    plate = 0.5 + np.repeat([left, right], 12)[None]
    return np.concatenate([np.full((1, 24), -0.5), fluid, plate]).astype(np.float32)


def episode(steps: int = 6) -> Episode:
    fields = [field(0.1 * i, -0.1 * i) for i in range(steps + 1)]
    return Episode(np.linspace(4.9, 4.1, steps), fields)


def test_hot_is_red_and_cold_is_blue() -> None:
    red, blue = colours(np.array([0.5, -0.5])).astype(int)
    assert red[0] > red[2] + 50
    assert blue[2] > blue[0] + 50


def test_a_frame_shows_the_fluid_upright_and_the_heaters() -> None:
    picture = frame(field(), [4.9, 4.5], steps=10, title="test")
    assert picture.dtype == np.uint8
    assert picture.shape[1:] == (24 * SCALE, 3)
    fluid = picture[16 : 16 + 10 * SCALE].astype(int)
    assert fluid[0, :, 2].mean() > fluid[0, :, 0].mean(), "cold on top"
    assert fluid[-1, :, 0].mean() > fluid[-1, :, 2].mean(), "hot at the bottom"
    bars = picture[16 + 10 * SCALE : 16 + 10 * SCALE + 44]
    upper, lower = bars[4:18], bars[26:40]
    left, right = slice(0, 12 * SCALE), slice(12 * SCALE, None)
    assert (upper[:, left] != 255).any(-1).all(), "hotter heaters rise"
    assert (upper[:, right] == 255).all()
    assert (lower[:, right] != 255).any(-1).all(), "cooler ones hang"
    assert (lower[:, left] == 255).all()


def test_the_trace_falls_with_the_nusselt_number() -> None:
    def ink(nusselt: list[float]) -> float:
        trace = frame(field(), nusselt, steps=len(nusselt))[-66:]
        return float(np.argwhere((trace < 100).all(-1))[:, 0].mean())

    assert ink([4.1] * 20) > ink([5.1] * 20) + 20


def test_a_film_has_every_second_moment(tmp_path: Path) -> None:
    path = save_gif(episode(), tmp_path / "new" / "film.gif", title="test", every=2)
    with image.open(path) as film:
        assert film.n_frames == 4
        assert film.size[0] == 24 * SCALE


def test_a_strip_has_a_row_for_each_episode(tmp_path: Path) -> None:
    moments = (0, 3, 100)
    path = save_strip({"a": episode(), "b": episode()}, tmp_path / "strip.png", moments)
    with image.open(path) as strip:
        width, height = strip.size
    one = frame(field())
    assert width == 3 * one.shape[1] + 2 * 12
    assert height == 2 * one.shape[0] + 12


def test_what_cannot_be_drawn_is_said(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"shape \(24,\)"):
        frame(np.zeros(24))
    with pytest.raises(ValueError, match="fields=True"):
        save_gif(Episode(np.ones(3)), tmp_path / "film.gif")
