"""Renders a scalar field as a picture."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from envs.errors import EnvConfigError
from envs.spec import SimulatorSpec

# Cold to hot through white, evenly spaced (ColorBrewer's RdBu, reversed).
COLOURS = np.array(
    [
        [5, 48, 97], [33, 102, 172], [67, 147, 195], [146, 197, 222], [209, 229, 240],
        [247, 247, 247],
        [253, 219, 199], [244, 165, 130], [214, 96, 77], [178, 24, 43], [103, 0, 31],
    ],
    np.float64,
)  # fmt: skip
_stops = np.linspace(0, 255, len(COLOURS))
TABLE = np.stack(
    [np.interp(np.arange(256), _stops, COLOURS[:, channel]) for channel in range(3)], axis=1
).astype(np.uint8)


def check_mode(mode: Any, spec: SimulatorSpec) -> None:
    """Check that a simulator supports a render mode. Raises `EnvConfigError`."""
    if mode not in (None, "rgb_array"):
        raise EnvConfigError(f"render_mode={mode!r}: it must be None or 'rgb_array'")
    if mode is not None and spec.render is None:
        raise EnvConfigError(
            f"render_mode={mode!r}: simulator {spec.name!r} cannot be rendered (its spec has no "
            "'render')"
        )


def coloured(field: NDArray[np.float32], spec: SimulatorSpec) -> NDArray[np.uint8]:
    """A field in colours, shape (height, width, 3).

    The colours range from the spec's ``low`` to its ``high``; by default, over the field's values.
    """
    ends = spec.render or {}
    low = ends.get("low")
    high = ends.get("high")
    low = float(np.nanmin(field)) if low is None else float(low)
    high = float(np.nanmax(field)) if high is None else float(high)
    share = np.nan_to_num((field - low) / ((high - low) or 1.0), nan=0.5)
    picture: NDArray[np.uint8] = TABLE[np.clip(share * 255.0, 0, 255).astype(np.uint8)]
    return picture
