"""The learning curve of a training, as JSON and as a picture."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.harness import save_figure


@dataclass(slots=True)
class Curve:
    """Nusselt numbers during a training.

    Attributes
    ----------
    training : list of (float, int, float)
        Seconds, control steps of all cells, mean Nusselt number of the last episodes (with
        exploration).
    validation : list of (float, int, float)
        The same without exploration, on separate episodes.
    baselines : dict of str to float
        Means over the test episodes.
    """

    training: list[tuple[float, int, float]] = field(default_factory=list)
    validation: list[tuple[float, int, float]] = field(default_factory=list)
    baselines: dict[str, float] = field(default_factory=dict)

    @property
    def best(self) -> float:
        """The lowest validated Nusselt number; infinite before the first validation."""
        return min((nusselt for _, _, nusselt in self.validation), default=float("inf"))

    def save(self, path: Path, **about: Any) -> Path:
        """Write the curve and other facts as JSON."""
        path.write_text(json.dumps({**about, **asdict(self)}, indent=1) + "\n")
        return path

    def draw(self, path: Path, title: str = "") -> Path:
        """Draw it as a PNG."""
        save_figure(lambda figure: self._draw_on(figure.subplots(), title), path, (7.2, 4.0))
        return path

    def _draw_on(self, axes: Any, title: str) -> None:
        exploring: dict[str, Any] = {"color": "#9aa7b5", "lw": 1.2}
        itself: dict[str, Any] = {"color": "#b2182b", "marker": "o", "ms": 4}
        for points, label, style in (
            (self.training, "with exploration", exploring),
            (self.validation, "without exploration", itself),
        ):
            if points:
                axes.plot([p[1] for p in points], [p[2] for p in points], label=label, **style)
        for name, value in self.baselines.items():
            axes.axhline(value, color="#404040", lw=0.8, ls="--")
            beside = axes.get_yaxis_transform()  # x from 0 to 1, y in data coordinates
            axes.annotate(f"{name}\n{value:.2f}", (1.01, value), xycoords=beside, fontsize=8)
        axes.set_xlabel("control steps")
        axes.set_ylabel("Nusselt number (heat transport; lower is better)")
        axes.set_title(title, fontsize=10)
        if self.training or self.validation:
            axes.legend(loc="center right", fontsize=8, frameon=False)
        axes.spines[["top", "right"]].set_visible(False)
