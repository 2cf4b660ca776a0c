"""Difficult data for comparisons with other libraries; the same in the test and on the ranks."""

from __future__ import annotations

from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

SCALES = (1e-30, 1.0, 1e30)
LAMBDA = 0.7  # times the square of a matrix's norm: ridge regression scales with its data


def matrices() -> dict[str, Array]:
    """Tall matrices, by name; those named "any" have no gap that a component could be told by."""
    rng = np.random.default_rng(17)
    plain = rng.standard_normal((60, 5)) * [5, 4, 3, 2, 1]
    found: dict[str, Array] = {"plain": plain}
    for name, column in (
        ("constant", np.full(60, 0.1)),
        ("zero", np.zeros(60)),
        ("duplicated", plain[:, 0]),
        ("nearly dependent", plain[:, 0] + 1e-9 * plain[:, 4]),
    ):
        found[name] = plain.copy()
        found[name][:, 3] = column
    found["far"] = plain + 1e6
    for scale in SCALES:
        found[f"{scale:g}"] = plain * scale
    found["float32"] = plain.astype("float32")
    found["float32 far"] = (plain + 1e3).astype("float32")
    top = np.iinfo("int64").max
    found["int64"] = (plain / np.abs(plain).max() * (top - 1024)).astype("int64")
    found["int32"] = np.clip(plain * 1e9, -(2**31), 2**31 - 1).astype("int32")
    for m in (1, 2, 3):
        for n in (1, 2):
            found[f"{m} x {n}"] = plain[:m, :n] + 7
    return found


def right_sides(a: Array) -> Array:
    """Two columns of the size of a's elements."""
    rng = np.random.default_rng(18)
    wide = a.astype("float64")
    size = float(np.abs(wide).max())
    b = rng.standard_normal((len(a), 2)) + wide[:, :1] / size
    return np.asarray((b * size).astype("float32" if a.dtype == "float32" else "float64"))


def blobs() -> dict[str, Array]:
    """Points around four centers, by name."""
    rng = np.random.default_rng(19)
    middle = np.array([[0, 0, 9], [0, 9, 0], [9, 0, 0], [9, 9, 9.0]])
    points = middle[np.arange(120) % 4] + rng.uniform(-1, 1, (120, 3))
    found = {f"{scale:g}": points * scale for scale in SCALES}
    found["far"] = points + 1e6
    found["float32"] = points.astype("float32")
    found["float32 far"] = (points + 1e3).astype("float32")
    found["constant"] = np.column_stack([points, np.full(120, 0.1)])
    found["int64"] = (points * 1e15).astype("int64")
    found["twice"] = np.concatenate([points, points])
    return found


def spoiled() -> dict[str, Array]:
    """Matrices that every library refuses."""
    found = {}
    for name, value in (("nan", np.nan), ("inf", np.inf), ("-inf", -np.inf)):
        found[name] = matrices()["plain"]
        found[name][57, 2] = value
    return found


def definite(a: Array) -> Array:
    """A positive definite matrix with the columns of a."""
    wide = a.astype("float64")
    wide = wide / np.abs(wide).max()
    return np.asarray(wide.T @ wide + 1e-3 * np.eye(a.shape[1]))
